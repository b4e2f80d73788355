#include "graphs/predict/offload_report.hpp"

#include <algorithm>

#include "engine/base/text.hpp"
#include "engine/look/analysis.hpp"
#include "engine/look/least_time.hpp"
#include "engine/run/packed.hpp"
#include "engine/run/streams.hpp"
#include "engine/simulate/simulate.hpp"

namespace stepgraph {

TransferBytes transfer_bytes(const Graph& graph) {
  TransferBytes sum;
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    const Node node{i};
    if (!is_transfer(graph, node)) continue;
    std::optional<Space> from, to;
    std::int64_t bytes = 0;
    for (std::size_t k = 0; k < graph.num_accesses(node); ++k) {
      const auto access        = graph.access(node, k);
      const BufferSpec& buffer = graph.spec(access.buffer);
      if (buffer.token) continue;
      if (writes(access.mode)) {
        to = buffer.space;
        bytes += access.region.num_bytes();
      } else {
        from = buffer.space;
      }
    }
    if (!from || !to) continue;
    if (from == Space::pinned && to == Space::device) sum.h2d += bytes;
    if (from == Space::device && to == Space::pinned) sum.d2h += bytes;
    if (from == Space::disk && to == Space::pinned) sum.disk_read += bytes;
    if (from == Space::pinned && to == Space::disk) sum.disk_write += bytes;
  }
  return sum;
}

bool rounds_weights(std::span<const OffloadedUnit> units) {
  return std::ranges::any_of(units, [](const OffloadedUnit& unit) {
    return unit.of == OffloadClass::params && unit.compression != Compression::none &&
           unit.compression != Compression::lossless;
  });
}

OffloadFigures offload_figures(const StepGraph& step, const MemoryPlan& plan, const Timeline& timeline) {
  OffloadFigures out{.moved = transfer_bytes(step.graph), .units = step.offload.units};
  for (const HomeFormat& home : step.homes) {
    out.raw_bytes += home.elements * static_cast<std::int64_t>(size_bytes(home.type));
    out.stored_bytes += step.graph.spec(home.home).size_bytes;
    out.lossy |= is_lossy(home.compression, home.type);
  }
  for (const HiddenTransfers& rank : hidden_transfers(step.graph, timeline)) {
    out.transfer_s += rank.transfer_s;
    out.exposed_s += rank.exposed_s();
  }
  for (const ArenaPlan& arena : plan.arenas) {
    if (arena.space == Space::pinned) out.host_bytes += arena.size_bytes;
    if (arena.space == Space::disk) out.disk_bytes += arena.size_bytes;
  }
  return out;
}

namespace {

// What lossless compression has saved in the homes of a run, in host memory and on disk.
std::int64_t saved_bytes(const StepRun& run) {
  std::int64_t saved = 0;
  std::vector<std::byte> packed;
  for (const HomeFormat& home : run.step().homes) {
    const BufferSpec& spec = run.step().graph.spec(home.home);
    if (home.compression != Compression::lossless || spec.lifetime != Lifetime::persistent) continue;
    saved += spec.size_bytes;
    for (const HomeChunk& chunk : chunks_of(home)) {
      packed.resize(static_cast<std::size_t>(chunk.bytes));
      run.memory().read(home.home, std::span<std::byte>(packed), chunk.offset);
      saved -= used_bytes(home.compression, home.type, chunk.elements, packed);
    }
  }
  return saved;
}

}  // namespace

OffloadFigures offload_figures(const StepRun& run, const Timeline& timeline) {
  OffloadFigures mine = offload_figures(run.step(), run.plan(), timeline);
  mine.stored_bytes -= saved_bytes(run);
  if (run.peers() == nullptr) return mine;
  Packer sent;
  sent.add(mine.moved).add(mine.transfer_s).add(mine.exposed_s).add(mine.host_bytes).add(mine.disk_bytes);
  sent.add(mine.raw_bytes).add(mine.stored_bytes).add(mine.lossy);
  for (const OffloadedUnit& unit : mine.units) {
    sent.add(unit.rank).add(unit.of).add_text(unit.unit).add(unit.space).add(unit.compression);
    sent.add(unit.bytes).add(unit.update);
  }
  OffloadFigures all;
  for (const Bytes& bytes : run.peers()->gather("transfers of a step", sent.take())) {
    Unpacker received(bytes);
    const auto moved = received.get<TransferBytes>();
    all.moved.h2d += moved.h2d;
    all.moved.d2h += moved.d2h;
    all.moved.disk_read += moved.disk_read;
    all.moved.disk_write += moved.disk_write;
    all.transfer_s += received.get<double>();
    all.exposed_s += received.get<double>();
    all.host_bytes += received.get<std::int64_t>();
    all.disk_bytes += received.get<std::int64_t>();
    all.raw_bytes += received.get<std::int64_t>();
    all.stored_bytes += received.get<std::int64_t>();
    all.lossy |= received.get<bool>();
    while (!received.empty()) {
      OffloadedUnit& unit = all.units.emplace_back();
      unit.rank           = received.get<Rank>();
      unit.of             = received.get<OffloadClass>();
      unit.unit           = received.get_text();
      unit.space          = received.get<Space>();
      unit.compression    = received.get<Compression>();
      unit.bytes          = received.get<std::int64_t>();
      unit.update         = received.get<UpdateMode>();
    }
  }
  return run.is_first() ? all : mine;
}

namespace {

std::string_view name_of(std::optional<LaneKind> lane) {
  if (!lane || *lane == LaneKind::compute) return "compute";
  const bool transfers =
      *lane == LaneKind::h2d || *lane == LaneKind::d2h || *lane == LaneKind::host || *lane == LaneKind::disk;
  return transfers ? to_string(*lane) : "communication";
}

}  // namespace

PredictedStep predicted_step(const Graph& graph, const Timeline& simulated) {
  constexpr double named = 0.05;  // the least share of a phase that decides how long the step takes
  const LeastTime least  = least_time(graph, simulated);
  PredictedStep out{.seconds = simulated.makespan_s, .bound = {}, .bound_s = least.seconds};
  std::string_view last;
  for (const LeastTime::Phase& phase : least.phases) {
    const std::string_view name = name_of(phase.lane);
    if (phase.busy_s < named * least.seconds || name == last) continue;
    out.bound += str(out.bound.empty() ? "" : ", then ", name);
    last = name;
  }
  return out;
}

PredictedStep predicted_step(const Graph& graph, const MemoryPlan& plan, const Machine& device) {
  const Edges edges = stream_edges(graph, plan);
  return predicted_step(graph, simulate({graph, edges}, device));
}

}  // namespace stepgraph
