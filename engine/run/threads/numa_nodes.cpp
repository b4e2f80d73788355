#include "engine/run/threads/numa_nodes.hpp"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/run/threads/affinity.hpp"

namespace stepgraph {
namespace {

constexpr std::string_view variable = "STEPGRAPH_NUMA";

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorKind::config, str(variable, ": ", why)); }

std::optional<int> number(std::string_view text) {
  int value              = 0;
  const auto [end, fail] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (fail != std::errc() || end != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

// The pieces between separators; text without a separator is one piece.
std::vector<std::string_view> split(std::string_view text, std::string_view separators) {
  std::vector<std::string_view> pieces;
  for (std::size_t begin = 0;;) {
    const std::size_t end = text.find_first_of(separators, begin);
    pieces.push_back(text.substr(begin, end - begin));
    if (end == std::string_view::npos) return pieces;
    begin = end + 1;
  }
}

// "4", "0-7" or "0-6:2".
struct Range {
  int first, last, step;
};

std::optional<Range> parse_range(std::string_view text) {
  const std::size_t dash = text.find('-'), colon = text.find(':');
  if (dash == std::string_view::npos) {
    const auto one = number(text);
    return one ? std::optional(Range{*one, *one, 1}) : std::nullopt;
  }
  if (colon != std::string_view::npos && colon < dash) return std::nullopt;
  const auto first = number(text.substr(0, dash)), last = number(text.substr(dash + 1, colon - dash - 1));
  const auto step = colon == std::string_view::npos ? std::optional(1) : number(text.substr(colon + 1));
  if (!first || !last || !step || *step == 0 || *last < *first) return std::nullopt;
  return Range{*first, *last, *step};
}

// The number in the name of a folder such as "node12".
std::optional<int> node_number(const std::string& name) {
  return name.starts_with("node") ? number(std::string_view(name).substr(4)) : std::nullopt;
}

// The allowed processors of a list of the kernel, such as "0-3,8-11". The list of a node without processors is empty.
std::vector<int> processors_in(const std::filesystem::path& path, std::span<const int> allowed) {
  std::string text;
  std::vector<int> found;
  if (!(std::ifstream(path) >> text)) return found;
  for (const std::string_view piece : split(text, ",")) {
    const auto range = parse_range(piece);
    if (!range) refuse(str("auto: ", path.string(), " has '", text, "', which is not a list of processors such as 0-3,8-11 (STEPGRAPH_NUMA takes such lists, too)"));
    for (const int processor : allowed) {
      if (processor >= range->first && processor <= range->last && (processor - range->first) % range->step == 0)
        found.push_back(processor);
    }
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

}  // namespace

std::vector<int> allowed_processors() { return Affinity::of_thread(getpid()).processors(); }

int num_processors(std::span<const NumaNode> nodes) noexcept {
  std::size_t sum = 0;
  for (const NumaNode& node : nodes) sum += node.processors.size();
  return static_cast<int>(sum);
}

std::string processor_list(std::span<const int> processors) {
  std::string text;
  for (std::size_t i = 0; i < processors.size();) {
    std::size_t last = i;
    while (last + 1 < processors.size() && processors[last + 1] == processors[last] + 1) ++last;
    text += str(text.empty() ? "" : ",", processors[i]);
    if (last > i) text += str("-", processors[last]);
    i = last + 1;
  }
  return text;
}

std::vector<NumaNode> parse_numa_nodes(std::string_view text, std::span<const int> allowed) {
  std::vector<NumaNode> nodes;
  std::set<int> used;
  for (const std::string_view list : split(text, "/;")) {
    NumaNode node;
    for (const std::string_view piece : split(list, ",")) {
      const auto range = parse_range(piece);
      if (!range)
        refuse(str("'", text, "' is not off, auto or lists of processors: '", piece,
                   "' (such as 0-7/8-15: a list for each NUMA node, with numbers and ranges as taskset has them)"));
      for (std::int64_t i = range->first; i <= range->last; i += range->step) {
        const auto processor = static_cast<int>(i);
        if (!std::binary_search(allowed.begin(), allowed.end(), processor))
          refuse(str("'", text, "' has processor ", processor, ", which this process may not use (it may use ",
                     processor_list(allowed), ")"));
        if (!used.insert(processor).second)
          refuse(str("'", text, "' has processor ", processor, " twice (each processor in one list)"));
        node.processors.push_back(processor);
      }
    }
    std::sort(node.processors.begin(), node.processors.end());
    nodes.push_back(std::move(node));
  }
  return nodes;
}

std::vector<NumaNode> numa_nodes_in(const std::filesystem::path& folder, std::span<const int> allowed) {
  std::map<int, NumaNode> nodes;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(folder, none)) {
    const auto number_of = node_number(entry.path().filename().string());
    if (!number_of) continue;
    NumaNode node{processors_in(entry.path() / "cpulist", allowed)};
    if (!node.processors.empty()) nodes.emplace(*number_of, std::move(node));
  }
  std::vector<NumaNode> found;
  for (auto& [number_of, node] : nodes) found.push_back(std::move(node));
  if (found.empty()) found.push_back({{allowed.begin(), allowed.end()}});
  return found;
}

std::vector<NumaNode> chosen_numa_nodes() {
  const char* const value = std::getenv(variable.data());
  if (value == nullptr || *value == '\0' || std::string_view(value) == "off") return {};
  const std::vector<int> allowed = allowed_processors();
  if (std::string_view(value) != "auto") return parse_numa_nodes(value, allowed);
  std::vector<NumaNode> nodes = numa_nodes_in("/sys/devices/system/node", allowed);
  if (nodes.size() < 2) nodes.clear();
  return nodes;
}

}  // namespace stepgraph
