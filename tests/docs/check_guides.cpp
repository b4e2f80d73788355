// Checks the statements of the guides about files, headers and keys.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <filesystem>
#include <map>
#include <set>

#include "engine/base/error.hpp"
#include "graphs/config/config.hpp"
#include "graphs/files/json_value.hpp"
#include "tests/docs/block.hpp"
#include "tests/docs/guide.hpp"
#include "tests/support/paths.hpp"
#include "tests/support/temp_folder.hpp"

namespace fs = std::filesystem;
namespace sg = stepgraph;
using namespace sg::testing;

namespace {

std::vector<Guide> all_guides() {
  std::vector<Guide> guides;
  for (const std::string& path : find_guides(source_path())) guides.push_back(read_guide(source_path(), path));
  return guides;
}

// The leaf values of an object, by path: "layout.tp".
std::map<std::string, sg::JsonValue> flat_keys(const sg::JsonValue& object, const std::string& prefix = {}) {
  std::map<std::string, sg::JsonValue> keys;
  for (std::size_t i = 0; i < object.size(); ++i) {
    const std::string key = prefix + object.key[i];
    if (object[i].is_object())
      keys.merge(flat_keys(object[i], key + "."));
    else
      keys.emplace(key, object[i]);
  }
  return keys;
}

// "`engine/graph/graph.hpp`" without its quotes.
std::string unquoted(std::string text) {
  std::erase(text, '`');
  return text;
}

// "engine/graph/graph.hpp" or "tools/bench/": lower-case words below one of our folders.
bool names_a_file(const std::string& code) {
  const auto is_letter = [](char letter) {
    return (letter >= 'a' && letter <= 'z') || (letter >= '0' && letter <= '9') || letter == '_' || letter == '/' ||
           letter == '.';
  };
  const std::string folder = code.substr(0, code.find('/'));
  const std::set<std::string> folders{"engine", "ops", "graphs", "backends", "tools", "tests"};
  return folder.size() + 1 < code.size() && folders.contains(folder) &&
         std::all_of(code.begin(), code.end(), is_letter);
}

}  // namespace

TEST_CASE("the front page has at most 15000 bytes", "[docs]") {
  CHECK(fs::file_size(fs::path(source_path()) / "README.md") <= 15'000);
}

TEST_CASE("every folder of the libraries has a guide", "[docs]") {
  for (const char* folder : {"engine", "graphs"}) {
    for (const auto& entry : fs::directory_iterator(fs::path(source_path()) / folder)) {
      CAPTURE(entry.path());
      if (entry.is_directory()) CHECK(fs::exists(entry.path() / "README.md"));
    }
  }
  for (const char* folder : {".", "engine", "ops", "graphs", "backends", "tools", "tools/bench", "tests"})
    CHECK(fs::exists(fs::path(source_path()) / folder / "README.md"));
}

TEST_CASE("links in guides lead to files and headings", "[docs]") {
  int links = 0;
  for (const Guide& guide : all_guides()) {
    for (const Link& link : guide.links) {
      if (link.target.starts_with("http")) continue;
      CAPTURE(guide.path, link.line, link.target);
      const std::size_t hash   = link.target.find('#');
      const std::string file   = link.target.substr(0, hash);
      const fs::path target    = (file.empty() ? fs::path(guide.path) : fs::path(guide.path).parent_path() / file);
      const std::string inside = target.lexically_normal().string();
      ++links;
      REQUIRE(fs::exists(fs::path(source_path()) / inside));
      if (hash == std::string::npos) continue;
      const std::vector<std::string> headings = read_guide(source_path(), inside).headings;
      CHECK(std::any_of(headings.begin(), headings.end(), [&](const std::string& heading) {
        return anchor_of(heading) == link.target.substr(hash + 1);
      }));
    }
  }
  CHECK(links > 50);
}

TEST_CASE("files that guides name in their text exist", "[docs]") {
  for (const Guide& guide : all_guides()) {
    for (const std::string& code : guide.code) {
      if (!names_a_file(code)) continue;
      CAPTURE(guide.path, code);
      CHECK(fs::exists(fs::path(source_path()) / code));
    }
  }
}

TEST_CASE("tables of public headers equal the lists in CMake", "[docs]") {
  // Each header belongs to the nearest guide above it.
  const fs::path root = source_path();
  const auto guide_of = [&](const fs::path& header) {
    fs::path folder = header.parent_path();
    while (!fs::exists(root / folder / "README.md")) folder = folder.parent_path();
    return (folder / "README.md").string();
  };
  std::map<std::string, std::set<std::string>> listed, built;
  const auto take = [&](std::string header) {
    if (header.starts_with(root.string())) header = fs::relative(header, root).string();
    built[guide_of(header)].insert(header);
  };
  for (const std::string& header : split_lines(file_bytes(STEPGRAPH_PUBLIC_HEADERS))) take(header);
  for (const auto& entry : fs::directory_iterator(root / "engine/base")) {  // all headers there are public
    if (entry.path().extension() == ".hpp") take(entry.path().string());
  }
  for (const Guide& guide : all_guides()) {
    for (const auto& row : table_rows(guide, "Header")) {
      const std::string header = unquoted(row.front());
      CAPTURE(guide.path, header);
      CHECK(fs::exists(root / header));
      CHECK(guide_of(header) == guide.path);
#ifndef STEPGRAPH_WITH_CUDA
      if (header.starts_with("backends/cuda/")) continue;  // in the lists of CUDA builds only
#endif
      listed[guide.path].insert(header);
    }
  }
  for (const auto& [guide, headers] : built) {
    CAPTURE(guide);
    CHECK(listed[guide] == headers);
  }
  CHECK(listed.size() == built.size());
}

TEST_CASE("a block that is not run is marked", "[docs]") {
  std::size_t compiled = 0, commands = 0, marked = 0;
  for (const Guide& guide : all_guides()) {
    for (const Block& block : guide.blocks) {
      CAPTURE(guide.path, block.first_line, block.language);
      marked += !block.runs();
      if (block.language == "cpp") compiled += block.runs();
      if (block.language == "json") CHECK(block.file);
      if (block.language == "sh" || block.language == "cmake") CHECK(block.not_run);
      if (block.language == "console" && block.runs()) {
        for (const Command& command : commands_of(block)) CHECK(command.text.starts_with("stepgraph "));
        commands += commands_of(block).size();
      }
    }
  }
  CHECK(compiled == num_compiled_blocks);
  CHECK(compiled > 25);
  CHECK(commands > 25);
  CHECK(marked < 10);
}

TEST_CASE("the table of config keys has every key with its default", "[docs][config]") {
  std::map<std::string, std::string> table;  // key: default, without quotes and remarks
  for (const auto& row : table_rows(read_guide(source_path(), "graphs/config/README.md"), "Key")) {
    REQUIRE(row.size() == 4);
    CAPTURE(row[0]);
    CHECK(table.emplace(unquoted(row[0]), unquoted(row[2]).substr(0, unquoted(row[2]).find(" ("))).second);
    CHECK_FALSE(row[1].empty());
    CHECK_FALSE(row[3].empty());
  }
  // Without a default.
  std::set<std::string> known{"model.load",  "data.text", "data.tokens", "data.type",
                              "data.ignore", "eval.data", "devices"};
  const auto check = [&](const sg::Config& config) {
    for (const auto& [key, value] : flat_keys(sg::parse_json(sg::to_json(config)))) {
      CAPTURE(key);
      REQUIRE(table.contains(key));
      if (!known.insert(key).second || key == "model.kind" || key == "optimizer.kind" || key == "data.synthetic")
        continue;
      if (value.is_number())
        CHECK(std::stod(table[key]) == value.as_real());
      else if (table[key] != "as param")
        CHECK(table[key] == (value.is_string() ? value.as_string() : sg::json_line(value)));
    }
  };
  check({});
  check({.model = sg::LlamaSpec{}});
  check({.data = {.source = sg::TextFiles{{"file"}}}});
  check({.model = sg::MlpSpec{}, .plan = {.optimizer = {.kind = sg::OptimizerKind::sgd}}});
  for (const auto& [key, otherwise] : table) {
    CAPTURE(key);
    CHECK(known.contains(key));
  }
}

TEST_CASE("expected output is compared line by line, and ... matches any text", "[docs]") {
  CHECK(output_matches({"a", "b"}, {"a", "b"}));
  CHECK_FALSE(output_matches({"a"}, {"a", "b"}));
  CHECK_FALSE(output_matches({"a", "b"}, {"a"}));
  CHECK(output_matches({"..."}, {}));
  CHECK(output_matches({"...", "b", "..."}, {"a", "b", "c", "d"}));
  CHECK_FALSE(output_matches({"...", "x"}, {"a", "b"}));
  CHECK(output_matches({"loss ...  norm ...s"}, {"loss 1.5  norm 2 s"}));
  CHECK_FALSE(output_matches({"loss ...  norm"}, {"loss 1.5  norm 2"}));
}

TEST_CASE("a guide with an invalid fence or comment is refused", "[docs][refuses]") {
  const TempFolder folder;
  const auto refusal = [&](const std::string& text) {
    folder.put("guide.md", text);
    try {
      static_cast<void>(read_guide(folder.path(), "guide.md"));
    } catch (const std::runtime_error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(refusal("# A\n\n```cpp\nint x;\n```\n").empty());
  CHECK(refusal("```cpp\nint x;\n") == "guide.md:1: the fence is not closed");
  CHECK(refusal("```c++\n```\n") == "guide.md:1: unknown language 'c++' (cpp, console, json, sh, cmake, text)");
  CHECK(refusal("<!-- prelud: x -->\n```cpp\n```\n") ==
        "guide.md:1: unknown comment 'prelud' (prelude, definitions, file, not run)");
  CHECK(refusal("<!-- prelude: x -->\n```sh\n```\n") == "guide.md:1: comment 'prelude' above a block of sh");
  CHECK(refusal("<!-- not run -->\n```sh\n```\n") == "guide.md:1: 'not run' gives no reason");
}
