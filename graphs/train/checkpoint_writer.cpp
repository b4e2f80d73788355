#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "engine/base/direct_file.hpp"
#include "engine/base/error.hpp"
#include "engine/base/output_file.hpp"
#include "engine/base/partial.hpp"
#include "engine/run/context.hpp"
#include "engine/run/packed.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/files/parallel_tasks.hpp"
#include "graphs/train/checkpoint.hpp"
#include "graphs/train/checkpoint_folder.hpp"
#include "graphs/train/checkpoint_parts.hpp"
#include "graphs/train/waiting_gradients.hpp"
#include "ops/hash.hpp"

namespace stepgraph {
namespace {

namespace fs = std::filesystem;
using Clock  = std::chrono::steady_clock;

constexpr int most_lanes = 8;  // files that are written at the same time

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

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

// Data that node bodies use; set only between runs.
struct Files {
  std::unique_ptr<DiskWorld> world = {};
  std::vector<OpenFile> of_ranks   = {};
  std::string folder               = {};
  const StoredValues* states       = nullptr;
  Clock::time_point start          = {};
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

// The most bytes that can be allocated, as far as the system tells.
std::int64_t available_bytes() {
  std::int64_t available = INT64_MAX;
  std::ifstream memory("/proc/meminfo");
  for (std::string word; memory >> word;) {
    if (std::int64_t kib = 0; word == "MemAvailable:" && memory >> kib) available = kib * 1024;
  }
  std::int64_t most = 0, current = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> most && std::ifstream("/sys/fs/cgroup/memory.current") >> current)
    available = std::min(available, most - current);
  return available;
}

Error as_error(std::string_view subject) {
  try {
    throw;
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return {ErrorKind::run, str(subject, ": ", error.what())};
  }
}

}  // namespace

std::int64_t CheckpointFigures::num_bytes() const noexcept {
  std::int64_t sum = 0;
  for (const std::int64_t bytes : rank_bytes) sum += bytes;
  return sum;
}

struct CheckpointWriter::Impl {
  Trainer& trainer;
  CheckpointOptions options;
  TensorNumbers numbers;
  std::shared_ptr<Files> files = {};
  int num_replaced             = 0;   // Trainer::num_replaced when the files were planned
  std::vector<Buffer> staging  = {};  // by local rank, with `async`
  std::unique_ptr<Program> program;   // made by the first save
  std::unique_ptr<Executor> executor;
  CheckpointFigures figures = {};
  int num_processes_here    = 1;  // processes on this machine, which share its memory

  // Of the save that is under way.
  bool under_way             = false;
  std::optional<Run> run     = {};
  std::optional<Error> error = {};  // of this process
  Partial folder             = {};  // process 0: the temporary folder
  std::string path           = {};
  CheckpointState state      = {};

  // In process 0.
  std::int64_t steps_at_start;
  bool continues             = false;  // the loaded checkpoint is in the folder
  std::set<std::int64_t> own = {};     // steps of the whole checkpoints in the folder that belong to this run
  bool committed             = false;
  std::jthread removing      = {};  // may take long: a checkpoint is large

  Impl(Trainer& of, CheckpointOptions wanted)
      : trainer(of), options(std::move(wanted)), numbers(of.run().step().model), steps_at_start(of.num_steps()) {
    plan_files();
    if (peers() != nullptr) num_processes_here = num_on_machine(*peers());
    if (!trainer.run().is_first()) return;
    continues = is_in_folder(options.loaded, options.folder);
    remove_all_leftovers(options.folder);
  }

  ~Impl() { remove_folder(); }

  // The files of this process: other ones when the trainer has another run.
  void plan_files() {
    files                 = std::make_shared<Files>();
    program               = nullptr;
    figures               = {};
    num_replaced          = trainer.num_replaced();
    const StepGraph& step = trainer.run().step();
    for (const Rank rank : step.ranks.ranks()) {
      OpenFile& open = files->of_ranks.emplace_back();
      open.plan      = rank_file(step, rank, numbers);
      open.hashes.resize(open.plan.parts.size());
      figures.ranks.push_back(open.plan.rank);
      figures.rank_bytes.push_back(open.plan.num_bytes);
    }
    files->states = &trainer.run().values();
  }

  // The temporary folder of a checkpoint that did not get its name.
  void remove_folder() noexcept {
    std::error_code ignored;
    if (!folder.name.empty()) fs::remove_all(folder.name, ignored);
    folder = {};
  }

  [[nodiscard]] Peers* peers() const { return trainer.run().peers(); }

  Graph write_graph() {
    const int lanes = std::clamp(static_cast<int>(files->of_ranks.size()), 1, most_lanes);
    files->world    = std::make_unique<DiskWorld>(lanes);
    Graph graph(lanes);
    for (std::size_t r = 0; r < files->of_ranks.size(); ++r) add_rank(graph, r, Rank{static_cast<int>(r) % lanes});
    return graph;
  }

  void add_rank(Graph& graph, std::size_t r, Rank lane_rank) {
    const RankFile& plan   = files->of_ranks[r].plan;
    const std::string rank = str(" rank ", index(plan.rank));
    const Lane lane        = graph.lane(lane_rank, LaneKind::disk);
    const Buffer file      = graph.token(lane_rank, "file of" + rank);
    const auto data_begin  = std::ssize(plan.header);
    const auto data_bytes  = plan.num_bytes - data_begin;
    Buffer staged          = {};
    if (figures.async && data_bytes > 0) {
      staged = graph.buffer(
          {.name = "states of" + rank, .rank = lane_rank, .size_bytes = data_bytes, .lifetime = Lifetime::persistent});
    }
    staging.push_back(staged);
    // Bodies share ownership of the files: a body blocked in a disk call can outlive the writer.
    const std::shared_ptr<Files> all = files;
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
      if (figures.async) {
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
            read_part(*all->states, saved, at / size, block);
          });
        });
      }
    }
    graph.add({.name = "sync" + rank, .lane = lane, .writes = {file}, .kind = NodeKind::host}, [all, r] {
      OpenFile& open = all->of_ranks[r];
      open.file->finish();
      open.file.reset();
      open.written_s = seconds_since(all->start);
    });
  }

  void prepare() {
    if (program) return;
    // A copy that does not fit would end the process: it is better to wait for the disk.
    figures.async = options.async && figures.num_bytes() < available_bytes() / num_processes_here / 10 * 9;
    try {
      build();
    } catch (const std::exception&) {  // such as no memory for the copy
      if (!std::exchange(figures.async, false)) throw;
      build();
    }
  }

  void build() {
    staging.clear();
    const Graph graph = write_graph();
    const RunnableGraph runnable(graph, *files->world);
    verify(runnable);
    auto made = std::make_unique<Program>(runnable, *files->world);
    executor  = std::make_unique<Executor>(ExecutorOptions{
         .threads       = figures.async ? 1 : trainer.run().threads(),  // the step computes meanwhile, or waits
         .waiting_lanes = static_cast<int>(made->num_waiting_lanes())});
    program   = std::move(made);
  }

  // Process 0 makes the temporary folder, and tells its name.
  void make_folder() {
    in_first(peers(), "the folder of a checkpoint", [&] {
      create_folder(options.folder);
      if (removing.joinable()) removing.join();
      remove_all_leftovers(options.folder);
      if (!options.replace && is_whole_checkpoint(path))
        throw Error(ErrorKind::config, str(path, ": a checkpoint of this step exists (another folder, or resume)"));
      folder = make_partial(path, true);
      if (const int reason = errno; !folder.descriptor.is_open())
        throw Error(ErrorKind::backend, str(path, ": cannot be created: ", system_reason(reason)));
    });
    files->folder = folder.name;
    if (peers() != nullptr)
      files->folder = to_text(peers()->broadcast("the folder of a checkpoint", to_bytes(files->folder)));
  }

  // Copies the states to host memory.
  void stage() {
    struct Task {
      std::size_t rank, part;
      std::int64_t at;
    };
    std::vector<Task> tasks;
    constexpr std::int64_t most = std::int64_t{16} << 20;
    for (std::size_t r = 0; r < files->of_ranks.size(); ++r)
      for (std::size_t p = 0; p < files->of_ranks[r].plan.parts.size(); ++p)
        for (std::int64_t at = 0; at < files->of_ranks[r].plan.parts[p].part.num_bytes(); at += most)
          tasks.push_back({r, p, at});
    const int threads = std::min(trainer.run().threads(), most_lanes);
    for_tasks(tasks.size(), threads, [&](std::size_t i) {
      const auto [r, p, at]  = tasks[i];
      const RankFile& plan   = files->of_ranks[r].plan;
      const SavedPart& saved = plan.parts[p];
      const auto begin       = static_cast<std::size_t>(saved.part.offset - std::ssize(plan.header) + at);
      const auto bytes       = static_cast<std::size_t>(std::min(most, saved.part.num_bytes() - at));
      read_part(*files->states, saved, at / static_cast<std::int64_t>(size_bytes(saved.part.type)),
                program->memory().bytes(staging[r]).subspan(begin, bytes));
    });
  }

  [[nodiscard]] CheckpointState state_of_trainer(std::int64_t position, std::string config) const {
    const StepRun& step_run = trainer.run();
    const StepRank& rank    = step_run.step().ranks.front();
    CheckpointState made{.steps    = trainer.num_steps(),
                         .updates  = trainer.num_updates(),
                         .position = position,
                         .seq      = step_run.step().batch.seq,
                         .seed     = trainer.seed(),
                         .config   = std::move(config)};
    const Memory& memory = step_run.memory();
    if (rank.loss_scale != Buffer{})
      made.loss_scale = {.scale      = memory.first<double>(rank.loss_scale),
                         .good_steps = rank.good_steps == Buffer{} ? 0 : memory.first<std::int64_t>(rank.good_steps)};
    made.waiting = waiting_state(trainer, step_run);
    return made;
  }

  void save(std::int64_t position, std::string config) {
    const auto start = Clock::now();
    if (!trainer.run().has_weights()) set_fresh_weights(trainer.run(), trainer.seed());
    trainer.flush();
    if (num_replaced != trainer.num_replaced()) plan_files();
    state = state_of_trainer(position, std::move(config));
    path  = (fs::path(options.folder) / checkpoint_folder_name(state.steps)).string();
    make_folder();
    under_way = true;
    try {
      prepare();
      if (figures.async) stage();
      files->start = Clock::now();
      for (OpenFile& open : files->of_ranks) open.written_s = 0;
      run = executor->start(*program);
      if (!figures.async) run->get(), run.reset();
    } catch (...) {
      run.reset();
      error = as_error("checkpoint");
    }
    figures.staged_s = seconds_since(start);
  }

  void wait() {
    if (!run) return;
    try {
      run->get();
    } catch (...) {
      error = as_error("checkpoint");
    }
    run.reset();
  }

  // Gives the files of all processes to process 0. In it, `manifest` then has all files.
  void collect(CheckpointManifest& manifest) {
    Packer mine;
    pack(mine, error);
    if (!error) {
      for (const OpenFile& open : files->of_ranks) {
        CheckpointFile file{.name         = open.plan.name,
                            .num_bytes    = open.plan.num_bytes,
                            .header_bytes = std::ssize(open.plan.header),
                            .header_hash  = hash_bytes(std::as_bytes(std::span(open.plan.header)))};
        for (std::size_t p = 0; p < open.plan.parts.size(); ++p) {
          file.parts.push_back(open.plan.parts[p].part);
          file.parts.back().hashes = open.hashes[p];
        }
        pack(mine, file);
      }
    }
    std::vector<Bytes> all;
    if (peers() != nullptr) {
      all = peers()->gather("the files of a checkpoint", mine.take());
    } else {
      all.push_back(mine.take());
    }
    for (std::size_t process = 0; process < all.size(); ++process) {
      Unpacker received(all[process]);
      if (received.get<bool>()) {
        const auto kind = received.get<ErrorKind>();
        throw Error(kind, str(peers() == nullptr ? "" : str("process ", process, ": "), received.get_text()));
      }
      while (!received.empty()) manifest.files.push_back(unpack_checkpoint_file(received));
    }
  }

  void commit(CheckpointManifest& manifest) {
    const Model& model    = trainer.run().step().model;
    manifest.state        = state;
    manifest.optimizer    = to_string(trainer.run().step().optimizer);
    manifest.model_config = model.config.empty() ? str("{\"model_type\": \"", model.kind, "\"}") : model.config;
    manifest.tensors      = numbers.tensors();
    std::ranges::sort(manifest.files, {}, &CheckpointFile::name);
    check_coverage(manifest, path);
    for (const CheckpointFile& file : manifest.files) {
      std::error_code missing;
      const fs::path there = fs::path(folder.name) / file.name;
      if (const auto size = fs::file_size(there, missing); missing || std::cmp_not_equal(size, file.num_bytes))
        throw Error(ErrorKind::config,
                    str(there.string(), ": is missing or has another size than the process that wrote it says (",
                        "a folder that all processes share)"));
    }
    write_text((fs::path(folder.name) / "manifest.json").string(), to_json(manifest));
    sync_folder(folder.name);
    put_others_aside();
    put_in_place(folder.name, path);
    folder    = {};
    committed = true;
    sync_folder(options.folder);
    own.insert(state.steps);
    remove_old();
  }

  // Before the first checkpoint of this run gets its name: all that do not belong to it lose theirs.
  void put_others_aside() {
    if (committed) {
      figures.put_aside.clear();
      return;
    }
    own.clear();
    for (const CheckpointEntry& entry : list_checkpoints(options.folder)) {
      if (!continues || entry.steps > steps_at_start) {
        figures.put_aside.push_back(put_aside_checkpoint(entry.path));
      } else if (entry.problem.empty()) {
        own.insert(entry.steps);
      }
    }
  }

  // Removes all that are older than the newest `keep` of this run. Others are not in the folder any more.
  void remove_old() {
    const auto keep = static_cast<std::size_t>(options.keep);
    if (keep == 0 || own.size() < keep) return;
    while (own.size() > keep) own.erase(own.begin());
    std::vector<std::string> gone = detach_older(options.folder, *own.begin());
    if (gone.empty()) return;
    if (removing.joinable()) removing.join();
    removing = std::jthread([gone = std::move(gone)] {
      std::error_code failed;
      for (const std::string& each : gone) fs::remove_all(each, failed);
    });
  }

  std::optional<std::string> finish() {
    if (!under_way) return std::nullopt;
    wait();
    for (OpenFile& open : files->of_ranks) open.file.reset();
    under_way         = false;
    figures.written_s = 0;
    for (const OpenFile& open : files->of_ranks) figures.written_s = std::max(figures.written_s, open.written_s);
    std::optional<Error> failed;
    try {
      // The folder of process 0 may be on another machine.
      if (!error && !trainer.run().is_first()) sync_folder(files->folder);
    } catch (...) {
      error = as_error(path);
    }
    try {
      CheckpointManifest manifest;
      collect(manifest);
      if (trainer.run().is_first()) commit(manifest);
    } catch (...) {
      failed = as_error(path);
    }
    remove_folder();
    error.reset();
    if (peers() != nullptr) peers()->require_success("a checkpoint", failed);
    if (failed) throw *failed;
    return path;
  }
};

CheckpointWriter::CheckpointWriter(Trainer& trainer, CheckpointOptions options) {
  if (options.folder.empty()) throw Error(ErrorKind::config, "checkpoint: the folder is empty (a folder name)");
  if (options.keep < 0) throw Error(ErrorKind::config, str("checkpoint: keep ", options.keep, " (0 or more)"));
  if (trainer.run().step().ranks.front().grad_norm == Buffer{})
    throw Error(ErrorKind::config, "checkpoint: the step does not train");
  impl_ = std::make_unique<Impl>(trainer, std::move(options));
}

CheckpointWriter::~CheckpointWriter() {
  if (!impl_->run) return;
  impl_->run->cancel("the checkpoint was not finished");
  impl_->wait();
}

void CheckpointWriter::save(std::int64_t position, std::string config) {
  finish();
  impl_->save(position, std::move(config));
}

bool CheckpointWriter::is_written() const noexcept {
  try {
    return !impl_->run || impl_->run->done();
  } catch (...) {  // finish() reports it
    return true;
  }
}

std::optional<std::string> CheckpointWriter::finish() { return impl_->finish(); }
const CheckpointFigures& CheckpointWriter::figures() const noexcept { return impl_->figures; }

}  // namespace stepgraph
