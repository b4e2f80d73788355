#pragma once
#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/base/error.hpp"

namespace stepgraph {

using Bytes = std::vector<std::byte>;

// Host data between the processes of a world, outside runs: results of a step, tensors that are saved, traces. Process
// 0 has rank 0.
//
// Collective: every process calls the same functions in the same order, on one thread at a time. `subject` says what
// the call is about. If processes differ in it, Error(config) names both subjects; then the object cannot be used any
// more. Error(backend): a process is gone, or has sent nothing for too long.
class Peers {
 public:
  virtual ~Peers() = default;

  [[nodiscard]] virtual int process() const noexcept       = 0;
  [[nodiscard]] virtual int num_processes() const noexcept = 0;

  // Process 0 gets the bytes of all processes, by process. The other processes get nothing and do not wait for process
  // 0: an error of this call can reach them in the next one.
  [[nodiscard]] virtual std::vector<Bytes> gather(std::string_view subject, Bytes mine) = 0;

  // All processes get the bytes of process 0. The other processes pass nothing.
  [[nodiscard]] virtual Bytes broadcast(std::string_view subject, Bytes of_first) = 0;

  // Returns when all processes have called it.
  void barrier(std::string_view subject);

  // Error(config) on every process if the text of one differs from that of process 0. The message has both texts, from
  // a little before their first difference on.
  void require_same(std::string_view subject, std::string_view text);

  // Process 0 has done something for all: if it has failed, its error is thrown in every process. The other processes
  // pass none.
  void require_success(std::string_view subject, const std::optional<Error>& of_first);
};

// Calls `work` in process 0. Its error is thrown in every process; other exceptions become Error(run). Collective.
// Without peers: calls it.
void in_first(Peers* peers, std::string_view subject, const std::function<void()>& work);

// Calls `work` in all processes. If it fails in some, the error of the first of them is thrown in all; other exceptions
// become Error(run). Collective. Without peers: calls it.
void in_all(Peers* peers, std::string_view subject, const std::function<void()>& work);

// What to add to this process's steady clock to get that of process 0. Nothing on the same machine; else it is
// measured, to about the time that two messages take. Collective.
[[nodiscard]] std::chrono::nanoseconds clock_offset(Peers& peers);

// How many processes run on the machine of this one, itself included. Collective.
[[nodiscard]] int num_on_machine(Peers& peers);

[[nodiscard]] Bytes to_bytes(std::string_view text);
[[nodiscard]] std::string to_text(const Bytes& bytes);

}  // namespace stepgraph
