#pragma once
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "backends/process/links.hpp"
#include "backends/process/secret.hpp"
#include "engine/run/peers.hpp"
#include "engine/run/world.hpp"

// Processes build their slices alone. Before a program runs, they compare what must be equal: each slice can be sound
// and still have another size or another number of operations than that of a peer, which would be a hang or wrong
// numbers.
namespace stepgraph {

// What several processes must have in common: the collectives of a group, or the messages between two ranks.
struct Outline {
  std::string subject = {};  // "group 'dp' of ranks 0, 1: collectives"
  Digest id           = {};  // of the subject
  bool is_group       = false;
  Rank from{-1}, to{-1};                // of messages
  std::uint32_t here             = 0;   // how many members of the group, or of the two ends, this process has
  std::uint32_t all              = 0;   // how many there are
  std::vector<std::string> lines = {};  // by turn
};
// The outlines of groups come first, in the order of `groups`. `batches`: the world takes collectives that are issued
// together as one, so all members must issue the same ones together.
[[nodiscard]] std::vector<Outline> outline(const Graph& graph, std::span<const Communicator> groups,
                                           bool batches = false);

struct Agreed {
  std::vector<std::uint32_t> numbers = {};  // of the groups, in their order
  Connections connections            = {};  // what the links must have for the program
};

// Numbers the groups of programs. Groups of equal names and ranks get equal numbers, in all processes and programs.
class Agreement {
 public:
  // Collective. Throws Error(config) in all processes if their programs do not fit together, with the first operation
  // that differs.
  [[nodiscard]] Agreed agree(Peers& peers, const Graph& graph, std::span<const Communicator> groups,
                             bool batches = false);

 private:
  [[nodiscard]] Bytes answer(const std::vector<Bytes>& all);

  std::map<Digest, std::uint32_t> numbers_;  // process 0: of all groups
};

}  // namespace stepgraph
