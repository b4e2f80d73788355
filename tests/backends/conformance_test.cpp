#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cstring>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/run/context.hpp"
#include "tests/support/conformance/world_conformance_check.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/worlds/hub_world.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::testing::ConformanceOptions;
using sg::testing::Hub;
using sg::testing::HubWorld;
using Failures = std::vector<std::string>;

namespace {

// A sanitized step on a loaded machine is slow, but not stuck.
std::chrono::milliseconds patience() { return std::chrono::seconds(20) * sg::testing::scale(); }

// The results of the suite in every process of a world.
template <class W = HubWorld>
std::vector<Failures> in_processes(const std::vector<sg::RankSet>& processes, const ConformanceOptions& options) {
  int ranks = 0;
  for (const sg::RankSet& process : processes) ranks += static_cast<int>(process.size());
  Hub hub(ranks);
  return sg::testing::on_every_process(processes, [&](const sg::RankSet& mine) {
    W world(hub, mine);
    return sg::testing::world_conformance(world, options);
  });
}
std::vector<sg::RankSet> one_each(int ranks) {
  std::vector<sg::RankSet> processes;
  for (int rank = 0; rank < ranks; ++rank) processes.emplace_back(sg::Rank{rank});
  return processes;
}

// Loopback with a defect.
class FaultyWorld final : public sg::World {
 public:
  enum class Fault { none, order, element, shards, alias, gap };
  FaultyWorld(int num_ranks, Fault fault) : right_(num_ranks), fault_(fault) {}

  [[nodiscard]] int num_ranks() const override { return right_.num_ranks(); }
  [[nodiscard]] bool waits(sg::LaneKind) const override { return false; }
  [[nodiscard]] sg::IssueOrder issue_order() const override { return sg::IssueOrder::any; }
  void abort(std::string_view) noexcept override {}
  void communicate(const sg::Context& context, const sg::Exchange& exchange) override {
    std::vector<sg::LocalPart> parts(exchange.parts.begin(), exchange.parts.end());
    const sg::PartOp op = exchange.what.op;
    if (fault_ == Fault::order && op == sg::PartOp::all_reduce) std::reverse(parts.begin(), parts.end());
    if (fault_ == Fault::shards && op == sg::PartOp::all_gather && alike(parts)) std::swap(parts[0].in, parts[1].in);
    if (fault_ == Fault::alias && op == sg::PartOp::all_reduce && parts.size() > 1) parts[1].out = parts[0].out;
    std::vector<std::byte> kept;
    const bool drops       = fault_ == Fault::element && op == sg::PartOp::reduce_scatter && !parts[0].out.empty();
    const std::size_t unit = size_bytes(exchange.what.type);
    const auto first       = [&] { return parts[0].out[0]; };
    if (drops && first().region.length > 0) kept.assign(first().data, first().data + unit);
    right_.communicate(context, {exchange.what, exchange.group, exchange.communicator, exchange.turn, parts});
    if (!kept.empty()) std::memcpy(first().data, kept.data(), kept.size());
    if (fault_ != Fault::gap || op != sg::PartOp::broadcast) return;
    for (const sg::Piece& piece : parts[0].out) {
      if (!piece.region.contiguous()) piece.data[piece.region.length] ^= std::byte{1};
    }
  }

 private:
  static bool alike(const std::vector<sg::LocalPart>& parts) {
    const auto whole = [](const sg::LocalPart& part) { return part.in.size() == 1 && part.in[0].region.contiguous(); };
    return parts.size() > 1 && whole(parts[0]) && whole(parts[1]) && parts[0].in[0].region == parts[1].in[0].region;
  }

  sg::LoopbackWorld right_;
  Fault fault_;
};

Failures with_fault(FaultyWorld::Fault fault, const ConformanceOptions& options) {
  FaultyWorld world(3, fault);
  return sg::testing::world_conformance(world, options);
}

std::string joined(const Failures& failures) {
  std::string text;
  for (const std::string& line : failures) text += line + "\n";
  return text;
}

}  // namespace

TEST_CASE("loopback passes the conformance suite, in rank order", "[backends][conformance]") {
  sg::testing::world_conformance([](int ranks) { return sg::LoopbackWorld(ranks); },
                                 {.rank_order   = true,
                                  .large_bytes  = (4 << 20) / sg::testing::scale() / sg::testing::scale(),
                                  .num_random   = sg::testing::cases(4),
                                  .step_timeout = patience()});
}

TEST_CASE("a process world outside the library passes the suite, each rank with its slice", "[backends][conformance]") {
  const int ranks = GENERATE(2, 3, 5, 8);
  static int seen = 3;
  if (sg::testing::left_out(seen, 4)) return;  // sanitized: 3
  CAPTURE(ranks);
  const auto failures = in_processes(one_each(ranks), {.rank_order   = true,
                                                       .large_bytes  = 800'000 / sg::testing::scale(),
                                                       .num_random   = sg::testing::cases(4),
                                                       .threads      = 1,
                                                       .step_timeout = patience()});
  CHECK(failures == std::vector<Failures>(static_cast<std::size_t>(ranks)));
}

TEST_CASE("processes with several ranks pass the suite", "[backends][conformance]") {
  const auto set       = [](std::vector<sg::Rank> ranks) { return sg::RankSet(std::move(ranks)); };
  const auto processes = GENERATE_COPY(
      std::vector{set({sg::Rank{0}, sg::Rank{1}}), set({sg::Rank{2}, sg::Rank{3}})},
      std::vector{set({sg::Rank{1}, sg::Rank{4}}), set({sg::Rank{0}}), set({sg::Rank{2}, sg::Rank{3}, sg::Rank{5}})});
  static int seen = 0;
  if (sg::testing::left_out(seen, 2)) return;  // sanitized: the first
  CAPTURE(processes.size());
  const auto failures = in_processes(processes, {.rank_order   = true,
                                                 .large_bytes  = 80'000 / sg::testing::scale(),
                                                 .num_random   = sg::testing::cases(4),
                                                 .threads      = 1,
                                                 .step_timeout = patience()});
  CHECK(failures == std::vector<Failures>(processes.size()));
}

TEST_CASE("the suite reports a faulty world and names the faulty case", "[backends][conformance]") {
  using Fault = FaultyWorld::Fault;
  const ConformanceOptions quick{.large_bytes = 1000, .num_random = 1};
  CHECK(joined(with_fault(Fault::none, quick)).empty());
  CHECK_THAT(joined(with_fault(Fault::none, {.only = "no such case"})), ContainsSubstring("no case was run"));
  CHECK_THAT(joined(with_fault(Fault::element, quick)),
             ContainsSubstring("reduce_scatter") && ContainsSubstring(" out': 1 of "));
  CHECK_THAT(joined(with_fault(Fault::shards, quick)), ContainsSubstring("all_gather"));
  CHECK_THAT(joined(with_fault(Fault::alias, quick)), ContainsSubstring("rank 1 buffer 'all_reduce"));
  CHECK_THAT(joined(with_fault(Fault::gap, quick)), ContainsSubstring("broadcast"));
}

TEST_CASE("only numbers that round reveal the order of a reduction", "[backends][conformance]") {
  using Fault = FaultyWorld::Fault;
  const ConformanceOptions any{.large_bytes = 1000, .num_random = 1}, ordered{.rank_order = true, .only = "rank order"};
  CHECK(joined(with_fault(Fault::order, any)).empty());
  CHECK_THAT(joined(with_fault(Fault::order, ordered)), ContainsSubstring("all_reduce f32 sum"));
  CHECK(joined(with_fault(Fault::none, ordered)).empty());
}

namespace {

// Does not separate steps: data of a failed step stays.
class ForgetfulWorld final : public HubWorld {
 public:
  using HubWorld::HubWorld;
  void begin_step(std::shared_ptr<const sg::RunView>) override {}
};

// Does not tell other ranks that it failed.
class SilentWorld final : public HubWorld {
 public:
  using HubWorld::HubWorld;
  void abort(std::string_view why) noexcept override {
    if (!is_local(sg::Rank{0})) HubWorld::abort(why);
  }
};

}  // namespace

TEST_CASE("the suite reports data of a failed step that survives, and a failure that no rank is told of",
          "[backends][conformance]") {
  const auto forgetful = in_processes<ForgetfulWorld>(one_each(3), {.only = "a step that fails"});
  for (const Failures& failures : forgetful) CHECK_THAT(joined(failures), ContainsSubstring("step 1 failed"));
  const auto silent = in_processes<SilentWorld>(
      one_each(3),
      {.step_timeout = std::chrono::milliseconds(300 * sg::testing::scale()), .only = "a step that fails on rank 0"});
  CHECK_THAT(joined(silent[1]) + joined(silent[2]), ContainsSubstring("nobody was told"));
}
