#include "tests/support/conformance/world_conformance.hpp"

#include <algorithm>
#include <cstring>
#include <optional>

#include "engine/base/error.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"
#include "tests/support/conformance/conformance_cases.hpp"

namespace stepgraph::testing {
namespace {

// Runs trials in one world and collects failures.
class Suite {
 public:
  Suite(World& world, const ConformanceOptions& options)
      : world_(world),
        options_(options),
        waiting_lanes_(count_waiting_lanes()),
        executor_({.threads = options.threads, .waiting_lanes = waiting_lanes_, .step_timeout = options.step_timeout}) {
  }

  std::vector<std::string> run() {
    for (const ConformanceCase& each : conformance_cases()) {
      Trial trial(std::string(each.name), world_.num_ranks());
      if (!wanted(trial)) continue;
      each.build(trial, options_);
      run(trial);
    }
    for (int seed = 0; seed < options_.num_random; ++seed) {
      Trial trial(str("random, seed ", seed), world_.num_ranks());
      if (!wanted(trial)) continue;
      add_random(trial, static_cast<std::uint64_t>(seed), 60);
      run(trial);
    }
    for (const int rank : {0, world_.num_ranks() - 1}) {
      Trial trial(str("a step that fails on rank ", rank), world_.num_ranks());
      if (options_.aborted_steps && wanted(trial)) run_failing(trial, Rank{rank});
    }
    if (num_run_ == 0) failures_.push_back(str("no case was run (only = '", options_.only, "')"));
    return std::move(failures_);
  }

 private:
  static constexpr std::size_t max_failures_of_a_step = 4;

  [[nodiscard]] bool wanted(const Trial& trial) const {
    return !stopped_ && trial.name().find(options_.only) != std::string::npos;
  }

  // The number of waiting lanes that the trials use, on all local ranks.
  [[nodiscard]] int count_waiting_lanes() {
    int num_kinds = 0;
    for (std::size_t kind = 0; kind < num_lane_kinds; ++kind) num_kinds += world_.waits(static_cast<LaneKind>(kind));
    return static_cast<int>(world_.local_ranks().size()) * num_kinds;
  }

  void fail(const Trial& trial, const std::string& why) { failures_.push_back(str("'", trial.name(), "': ", why)); }

  // The program of a trial, and its buffer for each buffer of the trial.
  struct Prepared {
    Program program;
    std::vector<std::optional<Buffer>> buffers;  // by buffer of the trial; none: on another process
  };

  std::optional<Prepared> prepare(const Trial& trial) {
    try {
      const Graph graph = slice(trial.graph(), world_.local_ranks());
      verify(trial.graph());
      verify(graph, {.world = &world_, .waiting_lanes = waiting_lanes_});
      std::vector<std::optional<Buffer>> buffers;
      std::uint32_t next = 0;
      for (std::uint32_t i = 0; i < trial.graph().num_buffers(); ++i) {
        const bool local = world_.is_local(trial.graph().spec(Buffer{i}).rank);
        buffers.push_back(local ? std::optional(Buffer{next}) : std::nullopt);
        next += local;
      }
      return Prepared{Program(graph, world_), std::move(buffers)};
    } catch (const std::exception& e) {
      fail(trial, e.what());
      stopped_ = true;
      return std::nullopt;
    }
  }

  void run(const Trial& trial) {
    if (trial.graph().num_nodes() == 0) return;
    ++num_run_;
    const std::optional<Prepared> prepared = prepare(trial);
    for (std::uint64_t step = 1; prepared && step <= 2 && !stopped_; ++step) run_step(trial, *prepared, step);
  }

  // Every step uses other numbers, so that data of the previous step cannot hide errors.
  void run_step(const Trial& trial, const Prepared& prepared, std::uint64_t step) {
    const Trial::Image before = trial.before(step);
    set(prepared, before);
    try {
      executor_.run(prepared.program);
    } catch (const std::exception& e) {
      fail(trial, str("step ", step, " failed: ", e.what()));
      stopped_ = true;
      return;
    }
    compare(trial, prepared, step, trial.after(before));
  }

  static void set(const Prepared& prepared, const Trial::Image& image) {
    for (std::size_t i = 0; i < image.size(); ++i) {
      if (prepared.buffers[i])
        prepared.program.memory().write(*prepared.buffers[i], std::span<const std::byte>(image[i]));
    }
  }

  void compare(const Trial& trial, const Prepared& prepared, std::uint64_t step, const Trial::Image& expected) {
    std::size_t num_wrong = 0;
    for (std::uint32_t i = 0; i < expected.size(); ++i) {
      if (!prepared.buffers[i]) continue;
      std::vector<std::byte> found(expected[i].size());
      prepared.program.memory().read(*prepared.buffers[i], std::span(found));
      if (found.empty() || std::memcmp(found.data(), expected[i].data(), found.size()) == 0) continue;
      if (++num_wrong > max_failures_of_a_step) continue;
      fail(trial, str("step ", step, ": ", difference(trial.graph().spec(Buffer{i}), found, expected[i])));
    }
    if (num_wrong > max_failures_of_a_step)
      fail(trial, str("step ", step, ": ", num_wrong - max_failures_of_a_step, " more buffers are wrong"));
  }

  static std::string difference(const BufferSpec& spec, std::span<const std::byte> found,
                                std::span<const std::byte> expected) {
    const std::size_t unit = size_bytes(spec.type), count = found.size() / unit;
    std::size_t first = count, num_wrong = 0;
    for (std::size_t i = 0; i < count; ++i) {
      if (std::memcmp(found.data() + i * unit, expected.data() + i * unit, unit) == 0) continue;
      first = std::min(first, i);
      ++num_wrong;
    }
    return str("rank ", spec.rank, " buffer '", spec.name, "': ", num_wrong, " of ", count,
               " elements differ; element ", first, " is ", decode(spec.type, found.data() + first * unit), " (",
               decode(spec.type, expected.data() + first * unit), " expected)");
  }

  // A rank fails before it receives a message that was sent to it, and before an operation in which all others wait.
  void run_failing(Trial& trial, Rank rank) {
    ++num_run_;
    const int n      = world_.num_ranks();
    const auto armed = std::make_shared<std::atomic<bool>>(true);
    trial.fail_on(trial.graph().lane(rank, LaneKind::pp_recv), armed);
    const Group group = trial.group(everyone(trial));
    Meeting sum{.name = "all_reduce of what came", .op = PartOp::all_reduce, .group = group};
    for (int to = 0; to < n; ++to) {
      const AccessList came = trial.place({Rank{to}, "came"}, {5});
      const int from        = (to + n - 1) % n;
      if (from != to) {
        trial.meet({.name    = "message to the next",
                    .op      = PartOp::send,
                    .group   = group,
                    .members = {{.rank = Rank{from}, .reads = trial.place({Rank{from}, "sent"}, {5}), .peer = Rank{to}},
                                {.rank = Rank{to}, .writes = came, .peer = Rank{from}}},
                    .batch   = 0});
      }
      sum.members.push_back({.rank = Rank{to}, .both = came});
    }
    trial.meet(sum);
    const std::optional<Prepared> prepared = prepare(trial);
    if (!prepared) return;
    set(*prepared, trial.before(0));
    try {
      executor_.run(prepared->program);
      fail(trial, "the step that fails did not fail here");
    } catch (const std::exception& e) {
      const std::string_view why = e.what();
      if (world_.is_local(rank) && why.find("planned failure") == std::string_view::npos)
        fail(trial, str("the step failed for another reason: ", why));
      if (why.find("ran out of time") != std::string_view::npos) fail(trial, str("nobody was told: ", why));
    }
    armed->store(false);
    for (std::uint64_t step = 1; step <= 3 && !stopped_; ++step) run_step(trial, *prepared, step);
  }

  World& world_;
  const ConformanceOptions& options_;
  int waiting_lanes_;
  Executor executor_;
  int num_run_  = 0;
  bool stopped_ = false;  // a step failed: later results would be meaningless
  std::vector<std::string> failures_;
};

}  // namespace

std::vector<std::string> world_conformance(World& world, const ConformanceOptions& options) {
  try {
    return Suite(world, options).run();
  } catch (const std::exception& e) {
    return {str("the suite itself failed: ", e.what())};
  }
}

}  // namespace stepgraph::testing
