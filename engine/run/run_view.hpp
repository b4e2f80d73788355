#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/graph/graph.hpp"

namespace stepgraph {

struct Pool;  // engine/run/program/running_program.hpp

// A run as other threads can watch it: how far it has come, and which nodes run. For the heartbeats and the flight
// recorder of a world. Any thread may use it, during the run and after it, until the executor runs another program. No
// function waits for a node.
class RunView {
 public:
  RunView(Graph graph, std::shared_ptr<Pool> pool);  // by the engine
  ~RunView();
  RunView(const RunView&)            = delete;
  RunView& operator=(const RunView&) = delete;

  struct Running {
    Node node                     = {};
    std::optional<Rank> waits_for = {};  // the rank that it has told Context::waiting_for
    std::string waiting_for       = {};  // the text that it has told Context::waiting_for
  };
  struct Ended {
    Node node    = {};
    double ago_s = 0;
  };

  [[nodiscard]] const Graph& graph() const noexcept { return graph_; }  // of the ranks of this process
  // Tasks that have ended in this run: a node, or the parts of one communication. On a device: nodes that were issued
  // and nodes that the device has done.
  [[nodiscard]] std::uint64_t nodes_done() const noexcept;

  // The rest is only known in worlds that have peers().
  [[nodiscard]] int num_computing() const noexcept;  // nodes that run and do not wait; locks nothing
  [[nodiscard]] std::vector<Running> running() const;
  [[nodiscard]] std::vector<Ended> last_nodes() const;  // the last of every thread, 255 or fewer; the oldest first

 private:
  Graph graph_;
  std::shared_ptr<Pool> pool_;
};

}  // namespace stepgraph
