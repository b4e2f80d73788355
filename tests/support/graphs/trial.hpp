#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "engine/graph/graph.hpp"
#include "tests/support/ops/elements.hpp"

namespace stepgraph::testing {

// One member of a communication: the accesses it reads, writes, and both.
struct TrialMember {
  Rank rank         = {};
  AccessList reads  = {};
  AccessList writes = {};
  AccessList both   = {};
  Rank peer         = Rank{-1};
  Rank source       = Rank{-1};
};

// A communication with all its members, in group order; a message is a `send` with its sender and its receiver.
struct Meeting {
  std::string name                 = {};
  PartOp op                        = PartOp::barrier;
  Group group                      = {};
  DType type                       = DType::u8;
  Reduction reduction              = Reduction::sum;
  Rank root                        = Rank{-1};
  std::vector<TrialMember> members = {};
  int batch                        = -1;  // parts of one batch share an issue position on their rank; -1: none
};

// How the accesses of a part lie in memory. No communication may change the bytes around and between them.
enum class Placement : std::uint8_t {
  tight,    // one after another, nothing around them
  strided,  // rows with gaps
  shuffled  // last access first, with gaps
};

// A graph of all ranks together with the expected memory: the sequential result of what was added, in that order. All
// buffers are persistent, with known content before a step.
class Trial {
 public:
  Trial(std::string name, int num_ranks);

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] const Graph& graph() const noexcept { return graph_; }
  [[nodiscard]] int num_ranks() const noexcept { return graph_.num_ranks(); }

  Group group(const std::vector<int>& ranks);  // the same ranks: the same group

  struct Memory {
    Rank rank;
    std::string name;
    DType type = DType::u8;
    Fill fill  = Fill::bits;
  };
  // Creates a buffer with one access for each of `sizes`, in elements.
  AccessList place(const Memory& memory, const std::vector<int>& sizes, Placement placement = Placement::tight);

  void meet(const Meeting& meeting);
  // Adds one to each byte of the accesses, on the rank's compute lane.
  void touch(const AccessList& list);
  // Adds a node on a lane that throws while `*armed`.
  void fail_on(Lane lane, std::shared_ptr<const std::atomic<bool>> armed);

  using Image = std::vector<std::vector<std::byte>>;  // by buffer
  [[nodiscard]] Image before(std::uint64_t seed) const;
  [[nodiscard]] Image after(Image image) const;

 private:
  struct Touch {
    AccessList list;
  };

  std::string name_;
  Graph graph_;
  std::vector<Fill> fills_;  // by buffer
  std::vector<std::variant<Meeting, Touch>> acts_;
  struct Place {
    int batch          = -1;
    std::int32_t issue = -1;
  };
  std::vector<Place> last_;  // by rank: issue position of its last part
  int num_named_ = 0;
};

}  // namespace stepgraph::testing
