#pragma once
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace stepgraph {

// A NUMA node: processors that reach the same memory fastest.
struct NumaNode {
  std::vector<int> processors;  // ascending, at least one
  friend bool operator==(const NumaNode&, const NumaNode&) = default;
};

// The NUMA nodes that the environment variable STEPGRAPH_NUMA chooses for the threads and the memory of this process.
// Empty: threads are not bound to nodes. The variable is
// - "off", empty or not set: none;
// - "auto": those of the machine, with the processors that this process may use; none if it may use only one node;
// - lists of processors such as "0-7/8-15": one list for each node.
// Throws Error(config) for other text, and for processors that this process may not use.
[[nodiscard]] std::vector<NumaNode> chosen_numa_nodes();

// The processors that this process may use, ascending: the affinity mask of its first thread.
[[nodiscard]] std::vector<int> allowed_processors();

// Nodes as text describes them: a list for each node, with '/' or ';' between them. A list has numbers and ranges, as
// those of taskset: "0,2,4-7" or "0-6:2". All processors must be among `allowed`, each in one list.
[[nodiscard]] std::vector<NumaNode> parse_numa_nodes(std::string_view text, std::span<const int> allowed);

// The nodes that a folder such as /sys/devices/system/node describes, in the order of their numbers, without processors
// that are not allowed and without nodes that then have none. If the folder does not exist, all processors are one
// node.
[[nodiscard]] std::vector<NumaNode> numa_nodes_in(const std::filesystem::path& folder, std::span<const int> allowed);

[[nodiscard]] int num_processors(std::span<const NumaNode> nodes) noexcept;

// Ascending processors as a list: "0-3,8".
[[nodiscard]] std::string processor_list(std::span<const int> processors);

}  // namespace stepgraph
