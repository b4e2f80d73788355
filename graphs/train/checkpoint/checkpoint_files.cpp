#include "graphs/train/checkpoint/checkpoint_files.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <span>
#include <utility>

#include "engine/base/direct_file.hpp"
#include "engine/base/error.hpp"
#include "engine/run/context.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/files/parallel_tasks.hpp"
#include "graphs/train/step_run.hpp"
#include "ops/transfers/hash.hpp"

namespace stepgraph {
namespace {

namespace fs = std::filesystem;
using Clock  = std::chrono::steady_clock;

constexpr int most_lanes = 8;  // files that are written at the same time

// The world of the graph that writes: its ranks are disk lanes, which wait, and they never communicate.
class DiskWorld final : public World {
 public:
  explicit DiskWorld(int lanes) : lanes_(lanes) {}
  [[nodiscard]] int num_ranks() const override { return lanes_; }
  [[nodiscard]] bool waits(LaneKind kind) const override { return kind == LaneKind::disk; }
  [[nodiscard]] IssueOrder issue_order() const override { return IssueOrder::any; }
  void communicate(const Context&, const Exchange&) override {
    throw Error(ErrorKind::graph, "checkpoint: the graph that writes has a communication");
  }
  void abort(std::string_view) noexcept override {}

 private:
  int lanes_;
};

// The file of a rank, while it is written.
struct OpenFile {
  RankFile plan                                  = {};
  std::vector<std::vector<std::uint64_t>> hashes = {};  // by part
  std::unique_ptr<DirectFile> file               = {};
  double written_s                               = 0;  // since the writing began
};

// Appends a part: read(first byte, block) gives the bytes of each block. Blocks that fit into the buffer of the file
// are read and hashed there, on idle threads.
template <class Read>
void append_part(OpenFile& open, std::size_t part, const Context& context, const Read& read) {
  constexpr auto block_bytes = static_cast<std::size_t>(checkpoint_block_bytes);
  std::vector<std::byte> between;  // for a block that does not fit
  auto left       = static_cast<std::size_t>(open.plan.parts[part].part.num_bytes());
  std::int64_t at = 0;
  while (left > 0 && !context.stopping()) {
    std::vector<std::uint64_t>& hashes = open.hashes[part];
    const std::size_t before           = hashes.size();
    const auto room                    = open.file->room();
    const bool is_within               = std::min(left, block_bytes) <= room.size();
    if (!is_within) between.resize(std::min(left, block_bytes));
    const std::size_t most       = room.size() / block_bytes * block_bytes;  // whole blocks, unless the end fits too
    const auto bytes             = !is_within ? std::span(between) : room.first(left <= room.size() ? left : most);
    const std::size_t num_blocks = (bytes.size() + block_bytes - 1) / block_bytes;
    hashes.resize(before + num_blocks);
    context.parallel_for(static_cast<std::int64_t>(num_blocks), [&](std::int64_t i) {
      const std::size_t begin = static_cast<std::size_t>(i) * block_bytes;
      const auto block        = bytes.subspan(begin, std::min(block_bytes, bytes.size() - begin));
      read(at + static_cast<std::int64_t>(begin), block);
      hashes[before + static_cast<std::size_t>(i)] = hash_bytes(block);
    });
    is_within ? open.file->filled(bytes.size()) : open.file->append(bytes);
    at += static_cast<std::int64_t>(bytes.size());
    left -= bytes.size();
  }
}

}  // namespace

// Data that node bodies use; set only between runs.
struct CheckpointFiles::State {
  std::unique_ptr<DiskWorld> world = {};
  std::vector<OpenFile> of_ranks   = {};
  std::string folder               = {};
  const StoredValues* values       = nullptr;
  Clock::time_point start          = {};
};

CheckpointFiles::CheckpointFiles(const StepRun& run, const TensorNumbers& numbers)
    : state_(std::make_shared<State>()), threads_(run.threads()) {
  const StepGraph& step = run.step();
  for (const Rank rank : step.ranks.ranks()) {
    OpenFile& open = state_->of_ranks.emplace_back();
    open.plan      = rank_file(step, rank, numbers);
    open.hashes.resize(open.plan.parts.size());
  }
  state_->values = &run.values();
}

CheckpointFiles::~CheckpointFiles() = default;

std::vector<Rank> CheckpointFiles::ranks() const {
  std::vector<Rank> out;
  for (const OpenFile& open : state_->of_ranks) out.push_back(open.plan.rank);
  return out;
}

std::vector<std::int64_t> CheckpointFiles::rank_bytes() const {
  std::vector<std::int64_t> out;
  for (const OpenFile& open : state_->of_ranks) out.push_back(open.plan.num_bytes);
  return out;
}

Graph CheckpointFiles::write_graph(bool async) {
  const int lanes = std::clamp(static_cast<int>(state_->of_ranks.size()), 1, most_lanes);
  state_->world   = std::make_unique<DiskWorld>(lanes);
  Graph graph(lanes);
  for (std::size_t r = 0; r < state_->of_ranks.size(); ++r)
    add_rank(graph, r, Rank{static_cast<int>(r) % lanes}, async);
  return graph;
}

void CheckpointFiles::add_rank(Graph& graph, std::size_t r, Rank lane_rank, bool async) {
  const RankFile& plan   = state_->of_ranks[r].plan;
  const std::string rank = str(" rank ", index(plan.rank));
  const Lane lane        = graph.lane(lane_rank, LaneKind::disk);
  const Buffer file      = graph.token(lane_rank, "file of" + rank);
  const auto data_begin  = std::ssize(plan.header);
  const auto data_bytes  = plan.num_bytes - data_begin;
  Buffer staged          = {};
  if (async && data_bytes > 0) {
    staged = graph.buffer(
        {.name = "states of" + rank, .rank = lane_rank, .size_bytes = data_bytes, .lifetime = Lifetime::persistent});
  }
  staging_.push_back(staged);
  // Bodies share ownership of the files: a body blocked in a disk call can outlive the writer.
  const std::shared_ptr<State> all = state_;
  graph.add({.name = "open" + rank, .lane = lane, .writes = {file}, .kind = NodeKind::host}, [all, r] {
    OpenFile& open = all->of_ranks[r];
    for (auto& hashes : open.hashes) hashes.clear();
    open.file = std::make_unique<DirectFile>((fs::path(all->folder) / open.plan.name).string(), open.plan.num_bytes);
    open.file->append(std::as_bytes(std::span(open.plan.header)));
  });
  for (std::size_t p = 0; p < plan.parts.size(); ++p) {
    const CheckpointPart& part = plan.parts[p].part;
    NodeSpec node{.name   = str("write ", plan.parts[p].name, rank),
                  .lane   = lane,
                  .writes = {file},
                  .kind   = NodeKind::copy,
                  .cost   = {.bytes_moved = static_cast<double>(part.num_bytes())}};
    node.parallel = true;
    if (async) {
      node.reads = {staged.range(part.offset - data_begin, part.num_bytes())};
      graph.add(node, [all, r, p](const Context& context) {
        const auto bytes = context.read<std::byte>();
        append_part(all->of_ranks[r], p, context, [&](std::int64_t at, std::span<std::byte> block) {
          std::memcpy(block.data(), bytes.data() + at, block.size());
        });
      });
    } else {
      graph.add(node, [all, r, p](const Context& context) {
        const SavedPart& saved = all->of_ranks[r].plan.parts[p];
        const auto size        = static_cast<std::int64_t>(size_bytes(saved.part.type));
        append_part(all->of_ranks[r], p, context, [&](std::int64_t at, std::span<std::byte> block) {
          read_part(*all->values, saved, at / size, block);
        });
      });
    }
  }
  graph.add({.name = "sync" + rank, .lane = lane, .writes = {file}, .kind = NodeKind::host}, [all, r] {
    OpenFile& open = all->of_ranks[r];
    open.file->finish();
    open.file.reset();
    open.written_s = std::chrono::duration<double>(Clock::now() - all->start).count();
  });
}

void CheckpointFiles::build(bool async) {
  staging_.clear();
  const Graph graph = write_graph(async);
  const RunnableGraph runnable(graph, *state_->world);
  verify(runnable);
  auto made = std::make_unique<Program>(runnable, *state_->world);
  executor_ = std::make_unique<Executor>(
      ExecutorOptions{.threads       = async ? 1 : threads_,  // the step computes meanwhile, or waits
                      .waiting_lanes = static_cast<int>(made->num_waiting_lanes())});
  program_ = std::move(made);
}

void CheckpointFiles::stage() {
  struct Task {
    std::size_t rank, part;
    std::int64_t at;
  };
  std::vector<Task> tasks;
  constexpr std::int64_t most = std::int64_t{16} << 20;
  for (std::size_t r = 0; r < state_->of_ranks.size(); ++r)
    for (std::size_t p = 0; p < state_->of_ranks[r].plan.parts.size(); ++p)
      for (std::int64_t at = 0; at < state_->of_ranks[r].plan.parts[p].part.num_bytes(); at += most)
        tasks.push_back({r, p, at});
  for_tasks(tasks.size(), std::min(threads_, most_lanes), [&](std::size_t i) {
    const auto [r, p, at]  = tasks[i];
    const RankFile& plan   = state_->of_ranks[r].plan;
    const SavedPart& saved = plan.parts[p];
    const auto begin       = static_cast<std::size_t>(saved.part.offset - std::ssize(plan.header) + at);
    const auto bytes       = static_cast<std::size_t>(std::min(most, saved.part.num_bytes() - at));
    read_part(*state_->values, saved, at / static_cast<std::int64_t>(size_bytes(saved.part.type)),
              program_->memory().bytes(staging_[r]).subspan(begin, bytes));
  });
}

Run CheckpointFiles::start(const std::string& folder) {
  state_->folder = folder;
  state_->start  = Clock::now();
  for (OpenFile& open : state_->of_ranks) open.written_s = 0;
  return executor_->start(*program_);
}

void CheckpointFiles::close() {
  for (OpenFile& open : state_->of_ranks) open.file.reset();
}

double CheckpointFiles::written_s() const {
  double most = 0;
  for (const OpenFile& open : state_->of_ranks) most = std::max(most, open.written_s);
  return most;
}

std::vector<CheckpointFile> CheckpointFiles::entries() const {
  std::vector<CheckpointFile> out;
  for (const OpenFile& open : state_->of_ranks) {
    CheckpointFile& file =
        out.emplace_back(CheckpointFile{.name         = open.plan.name,
                                        .num_bytes    = open.plan.num_bytes,
                                        .header_bytes = std::ssize(open.plan.header),
                                        .header_hash  = hash_bytes(std::as_bytes(std::span(open.plan.header)))});
    for (std::size_t p = 0; p < open.plan.parts.size(); ++p) {
      file.parts.push_back(open.plan.parts[p].part);
      file.parts.back().hashes = open.hashes[p];
    }
  }
  return out;
}

}  // namespace stepgraph
