#pragma once
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "engine/base/error.hpp"
#include "engine/run/world.hpp"
#include "graphs/config/config.hpp"

// What the processes of a command do together. With one process (peers() is null) nothing of it waits or fails.
namespace stepgraph::cli {

[[nodiscard]] bool is_first(World& world);  // process 0, which prints and writes files

// Calls `work` in process 0. Its error is thrown in every process.
void in_first(World& world, std::string_view subject, const std::function<void()>& work);

// Throws Error(config) in every process if two of them have different configs, versions, models, data, machine files or
// options of the command. Keys that may differ are left out: threads and world. Of files, the sizes and hashes of
// sampled blocks are compared; of the folder of a loaded model, only config.json unless `with_weights` is set.
void require_same_job(World& world, const Config& config, std::string_view options = {}, bool with_weights = true);

// An option of a command, for require_same_job: " --steps 3", or nothing if it is not set.
template <class T>
[[nodiscard]] std::string option_text(std::string_view name, const std::optional<T>& value) {
  return value ? str(" ", name, " ", *value) : std::string();
}

// The compute threads of this process: `asked`, or for 0 the cores of this machine, shared with the other processes on
// it. A process that is bound to some of the cores, as by mpirun, uses those. Collective.
[[nodiscard]] int threads_here(World& world, int asked);

// Why a process cannot go on, if so.
struct Stop {
  int signal                   = 0;  // it has received a signal
  bool output_closed           = false;
  std::optional<Error> failure = {};
  [[nodiscard]] bool wanted() const noexcept { return signal != 0 || output_closed || failure.has_value(); }
};
// All processes stop after the same step: the reason of the first process that has one is that of all.
[[nodiscard]] Stop agree(World& world, const Stop& mine);

// What a process says before a step, and what all have agreed on.
struct Boundary {
  Stop stop    = {};
  bool save    = false;  // a checkpoint is due: if one process says so
  bool written = false;  // a checkpoint is under way, and its files are written: if all processes say so
};
[[nodiscard]] Boundary agree(World& world, const Boundary& mine);

// A value that process 0 has computed, for all processes; other processes give nothing. An error of process 0 is thrown
// in all.
[[nodiscard]] std::string from_first(World& world, std::string_view subject, const std::function<std::string()>& work);

// The size of a file and the hashes of some of its blocks, as text. "missing" if it cannot be read.
[[nodiscard]] std::string sample_file(const std::string& path);

}  // namespace stepgraph::cli
