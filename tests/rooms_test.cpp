// Includes point one way: between the top folders, and between the rooms of engine/ and of graphs/.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/paths.hpp"

namespace {

namespace fs = std::filesystem;

using Names = std::set<std::string, std::less<>>;

// By top folder: the folders that its files may include.
const std::map<std::string, Names, std::less<>> folders{
    {"engine", {"engine"}},
    {"ops", {"engine", "ops"}},
    {"graphs", {"engine", "ops", "graphs"}},
    {"backends", {"engine", "backends"}},
    {"tools", {"engine", "ops", "graphs", "backends", "tools"}},
};

// By room: the rooms of its folder that its files may include, beside its own. Files directly below the folder
// (graphs/stepgraph.hpp) may include all rooms, and no room includes them.
const std::map<std::string, Names, std::less<>> rooms{
    {"engine/base", {}},
    {"engine/graph", {"base"}},
    {"engine/simulate", {"base", "graph"}},
    {"engine/plan", {"base", "graph", "simulate"}},
    {"engine/run", {"base", "graph", "simulate", "plan"}},
    {"engine/verify", {"base", "graph", "simulate", "plan", "run"}},
    {"engine/look", {"base", "graph", "simulate", "plan", "run"}},
    {"engine/draw", {"base", "graph", "simulate", "plan", "run", "look"}},
    {"graphs/layout", {}},
    {"graphs/files", {"layout"}},
    {"graphs/schedule", {"layout", "files"}},
    {"graphs/collectives", {"layout", "schedule", "files"}},
    {"graphs/models", {"layout", "schedule", "collectives", "files"}},
    {"graphs/plan", {"layout", "schedule", "collectives", "files", "models"}},
    {"graphs/step", {"layout", "schedule", "collectives", "files", "models", "plan"}},
    {"graphs/config", {"layout", "schedule", "collectives", "files", "models", "plan", "step"}},
    {"graphs/train", {"layout", "schedule", "collectives", "files", "models", "plan", "step"}},
    {"graphs/predict", {"layout", "schedule", "collectives", "files", "models", "plan", "step", "config", "train"}},
};

// Path below the source folder -> text.
using Sources = std::map<std::string, std::string>;

struct Include {
  std::string file, target;
  bool system = false;  // <target>
};

std::string first_of(std::string_view path) { return std::string(path.substr(0, path.find('/'))); }

// "engine/graph" for "engine/graph/access.hpp"; empty for a file directly below its folder.
std::string room_of(std::string_view path) {
  const std::size_t folder = path.find('/');
  if (folder == std::string_view::npos) return {};
  const std::size_t room = path.find('/', folder + 1);
  return room == std::string_view::npos ? std::string() : std::string(path.substr(0, room));
}

std::vector<Include> includes_of(const std::string& file, const std::string& text) {
  std::vector<Include> found;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::string_view rest = line;
    const auto skip_space = [&] { rest.remove_prefix(std::min(rest.find_first_not_of(" \t"), rest.size())); };
    skip_space();
    if (!rest.starts_with('#')) continue;
    rest.remove_prefix(1);
    skip_space();
    if (!rest.starts_with("include")) continue;
    rest.remove_prefix(std::string_view("include").size());
    skip_space();
    if (rest.empty() || (rest.front() != '"' && rest.front() != '<')) continue;
    const bool system       = rest.front() == '<';
    const std::size_t close = rest.find(system ? '>' : '"', 1);
    if (close != std::string_view::npos) found.push_back({file, std::string(rest.substr(1, close - 1)), system});
  }
  return found;
}

// The headers that a folder's CMakeLists.txt lists as HEADERS: words of that argument, up to the next argument in
// capitals or the closing parenthesis.
Names public_headers(const std::string& folder, const std::string& cmake) {
  Names found;
  std::istringstream words(cmake.substr(std::min(cmake.find("stepgraph_library("), cmake.size())));
  bool inside = false;
  for (std::string word; words >> word;) {
    const bool ends = word.ends_with(')');
    if (ends) word.pop_back();
    const bool capitals = !word.empty() && word.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZ_") == std::string::npos;
    if (capitals) {
      inside = word == "HEADERS";
    } else if (inside) {
      found.insert(folder + "/" + word);
    }
    if (ends) break;
  }
  return found;
}

bool is_vendor(std::string_view header) {
  static constexpr std::string_view prefixes[] = {"cuda", "cublas", "cudnn", "cupti", "nccl", "nvtx", "nvml"};
  return header == "mpi.h" || header == "cooperative_groups.h" ||
         std::any_of(std::begin(prefixes), std::end(prefixes), [&](auto prefix) { return header.starts_with(prefix); });
}

bool is_scheduler(std::string_view header) {
  return header.starts_with("taskflow/") || header.starts_with("tbb/") || header.starts_with("oneapi/tbb");
}

// The reason why an include is wrong; empty if it is allowed.
std::string fault_of(const Include& include, const Names& engine_headers) {
  const std::string folder = first_of(include.file), target = first_of(include.target);
  if (include.system) {
    if (is_vendor(include.target) && folder != "backends" && room_of(include.file) != "ops/cuda") {
      return "vendor headers belong in backends/ and ops/cuda/";
    }
    if (is_scheduler(include.target) && !include.file.ends_with(".cpp")) {
      return "Taskflow and TBB belong in .cpp files";
    }
    return {};
  }
  if (!folders.contains(target)) return target == "tests" ? "only tests include tests/" : "";
  if (!folders.at(folder).contains(target)) return folder + "/ must not include " + target + "/";
  if (folder != target) {
    const bool internal = target == "engine" && !engine_headers.contains(include.target);
    return internal ? "an internal header of engine/" : "";
  }
  const std::string room = room_of(include.file), other = room_of(include.target);
  if (room.empty() || room == other || (folder != "engine" && folder != "graphs")) return {};
  const auto allowed = rooms.find(room);
  if (allowed == rooms.end()) return room + "/ has no place in the order of rooms";
  const std::string name = other.empty() ? std::string() : other.substr(folder.size() + 1);
  return allowed->second.contains(name) ? "" : room + "/ must not include " + (other.empty() ? folder : other) + "/";
}

struct Fault {
  Include include;
  std::string why;
};

std::vector<Fault> faults_of(const Sources& sources, const Names& engine_headers) {
  std::vector<Fault> faults;
  for (const auto& [file, text] : sources) {
    for (const Include& include : includes_of(file, text)) {
      if (std::string why = fault_of(include, engine_headers); !why.empty())
        faults.push_back({include, std::move(why)});
    }
  }
  return faults;
}

std::string read(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

Sources read_sources(const fs::path& root) {
  static const Names suffixes{".hpp", ".cpp", ".h", ".cc", ".cu", ".cuh"};
  Sources sources;
  for (const auto& [folder, allowed] : folders) {
    for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
      if (!entry.is_regular_file() || !suffixes.contains(entry.path().extension().string())) continue;
      sources.emplace(fs::relative(entry.path(), root).generic_string(), read(entry.path()));
    }
  }
  return sources;
}

const Names made_up_headers{"engine/graph/graph.hpp"};

std::vector<std::string> made_up(const std::string& file, const std::string& line) {
  std::vector<std::string> found;
  for (const Fault& fault : faults_of({{file, line + "\n"}}, made_up_headers)) found.push_back(fault.why);
  return found;
}

}  // namespace

TEST_CASE("every include follows the order of folders and rooms", "[rooms]") {
  const fs::path root        = stepgraph::testing::source_path();
  const Names engine_headers = public_headers("engine", read(root / "engine" / "CMakeLists.txt"));
  const Sources sources      = read_sources(root);
  REQUIRE(sources.size() > 300);
  REQUIRE(engine_headers.contains("engine/graph/graph.hpp"));
  REQUIRE_FALSE(engine_headers.contains("engine/graph/graph_data.hpp"));
  std::string wrong;
  for (const Fault& fault : faults_of(sources, engine_headers)) {
    wrong += fault.include.file + " includes " + fault.include.target + ": " + fault.why + "\n";
  }
  CHECK(wrong == "");
}

TEST_CASE("every room has a place in the order", "[rooms]") {
  const fs::path root      = stepgraph::testing::source_path();
  const std::string folder = GENERATE("engine", "graphs");
  for (const auto& entry : fs::directory_iterator(root / folder)) {
    if (!entry.is_directory()) continue;
    CAPTURE(entry.path().string());
    CHECK(rooms.contains(folder + "/" + entry.path().filename().string()));
  }
  for (const auto& [room, allowed] : rooms) {
    CAPTURE(room);
    CHECK(fs::is_directory(root / room));
    for (const std::string& other : allowed) {  // an order: never both ways
      const auto back = rooms.find(room.substr(0, room.find('/') + 1) + other);
      REQUIRE(back != rooms.end());
      CHECK_FALSE(back->second.contains(room.substr(room.find('/') + 1)));
    }
  }
}

TEST_CASE("an include against the order is reported", "[rooms]") {
  struct Case {
    std::string file, line, why;
  };
  const Case given = GENERATE(values<Case>({
      {"engine/graph/a.hpp", "#include \"graphs/plan/plan.hpp\"", "engine/ must not include graphs/"},
      {"ops/a.cpp", "#include \"backends/loopback/world.hpp\"", "ops/ must not include backends/"},
      {"graphs/step/a.cpp", "#include \"backends/loopback/world.hpp\"", "graphs/ must not include backends/"},
      {"backends/cuda/a.cpp", "#include \"ops/layers/linear.hpp\"", "backends/ must not include ops/"},
      {"engine/base/a.hpp", "#include \"engine/graph/graph.hpp\"", "engine/base/ must not include engine/graph/"},
      {"engine/look/a.cpp", "#include \"engine/draw/dot.hpp\"", "engine/look/ must not include engine/draw/"},
      {"graphs/plan/a.hpp", "  #  include \"graphs/step/a.hpp\"", "graphs/plan/ must not include graphs/step/"},
      {"graphs/train/a.hpp", "#include \"graphs/config/a.hpp\"", "graphs/train/ must not include graphs/config/"},
      {"graphs/step/a.hpp", "#include \"graphs/stepgraph.hpp\"", "graphs/step/ must not include graphs/"},
      {"graphs/attic/a.hpp", "#include \"graphs/step/a.hpp\"", "graphs/attic/ has no place in the order of rooms"},
      {"ops/a.cpp", "#include \"engine/graph/graph_data.hpp\"", "an internal header of engine/"},
      {"tools/a.cpp", "#include \"tests/support/paths.hpp\"", "only tests include tests/"},
      {"ops/a.cpp", "#include <cuda_runtime.h>", "vendor headers belong in backends/ and ops/cuda/"},
      {"engine/run/a.cpp", "#include <mpi.h>", "vendor headers belong in backends/ and ops/cuda/"},
      {"tools/a.cpp", "#include <nccl.h>", "vendor headers belong in backends/ and ops/cuda/"},
      {"engine/run/a.hpp", "#include <taskflow/taskflow.hpp>", "Taskflow and TBB belong in .cpp files"},
      {"engine/run/a.hpp", "#include <oneapi/tbb/info.h>", "Taskflow and TBB belong in .cpp files"},
  }));
  CAPTURE(given.file, given.line);
  CHECK(made_up(given.file, given.line) == std::vector{given.why});
}

TEST_CASE("an include along the order is not reported", "[rooms]") {
  struct Case {
    std::string file, line;
  };
  const Case given = GENERATE(values<Case>({
      {"graphs/step/a.cpp", "#include \"graphs/plan/plan.hpp\""},
      {"graphs/step/a.cpp", "#include \"engine/graph/graph.hpp\""},
      {"graphs/stepgraph.hpp", "#include \"graphs/step/a.hpp\""},
      {"engine/verify/a.cpp", "#include \"engine/run/world.hpp\""},
      {"engine/run/a.cpp", "#include <taskflow/taskflow.hpp>"},
      {"ops/cuda/a.cu", "#include <cuda_runtime_api.h>"},
      {"backends/mpi/a.cpp", "#include <mpi.h>"},
      {"tools/a.cpp", "#include \"backends/loopback/world.hpp\""},
      {"graphs/plan/a.hpp", "// #include \"graphs/step/a.hpp\""},
  }));
  CAPTURE(given.file, given.line);
  CHECK(made_up(given.file, given.line).empty());
}

TEST_CASE("public headers are those that CMakeLists.txt lists as HEADERS", "[rooms]") {
  const std::string cmake =
      "set(others x.hpp)\nstepgraph_library(engine\n  SOURCES a.cpp b.cpp\n  HEADERS\n    a.hpp graph/b.hpp\n"
      "  PRIVATE_LINK c.hpp)\nset(HEADERS d.hpp)\n";
  CHECK(public_headers("engine", cmake) == Names{"engine/a.hpp", "engine/graph/b.hpp"});
}
