#include <algorithm>
#include <map>
#include <optional>
#include <variant>
#include <vector>

#include "engine/base/dispatch.hpp"
#include "engine/base/error.hpp"
#include "engine/run/packed.hpp"
#include "graphs/files/files.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/files/parallel_tasks.hpp"
#include "graphs/models/huggingface.hpp"
#include "graphs/train/checkpoint.hpp"
#include "graphs/train/checkpoint/checkpoint_parts.hpp"
#include "graphs/train/waiting_gradients.hpp"
#include "ops/tape/number.hpp"

namespace stepgraph {
namespace {

// Elements [begin, end) of a rank's weight, to be set.
struct Target {
  LocalPiece piece   = {};
  Buffer buffer      = {};
  DType type         = DType::f32;
  std::int64_t shift = 0;  // element i of the weight is element i + shift of the buffer
  std::int64_t first = 0;  // elements [first, last) of the piece
  std::int64_t last  = 0;
};
using Targets = std::map<std::pair<std::size_t, StateKind>, std::vector<Target>>;

Targets targets_of(const StepGraph& step, const TensorNumbers& numbers) {
  Targets targets;
  const int tp = step.layout.degree(Axis::tp);
  for (const StepRank& rank : step.ranks) {
    for (const StepWeight& weight : rank.weights) {
      const auto pieces = local_pieces(step.spec(weight), tp, rank.coord.tp, numbers);
      const auto add    = [&](const StoredRange& stored, StateKind state) {
        if (stored.empty() || stored.buffer == Buffer{}) return;
        for (const LocalPiece& piece : pieces) {
          Target target{.piece  = piece,
                           .buffer = stored.buffer,
                           .type   = step.element_type(stored.buffer),
                           .shift  = stored.offset - stored.begin,
                           .first  = piece.before(stored.begin),
                           .last   = piece.before(stored.end)};
          if (target.first < target.last) targets[{piece.tensor, state}].push_back(target);
        }
      };
      add(weight.value, StateKind::weight);
      add(weight.master, StateKind::weight);
      add(weight.first, StateKind::first_moment);
      add(weight.second, StateKind::second_moment);
    }
  }
  return targets;
}

// The settings of a model, with defaults for those that a config.json does not have. None: it is of no known kind.
std::optional<ModelConfig> known_settings(const std::string& config) {
  try {
    ModelConfig settings = parse_model_config(config, "config.json");
    // The shapes of tensors are compared, and dropout may change.
    std::visit(
        [](auto& spec) {
          spec.inner = 0;
          if constexpr (requires { spec.dropout; }) spec.dropout = 0;
        },
        settings.spec);
    return settings;
  } catch (const Error&) {
    return std::nullopt;
  }
}

// Settings of a model that have no shape, such as its heads, are compared too.
void check_config(const std::string& saved, const std::string& own, const auto& refuse) {
  if (saved.empty() || own.empty()) return;
  const auto saved_settings = known_settings(saved), own_settings = known_settings(own);
  const bool known = saved_settings || own_settings;
  if (saved_settings && own_settings && saved_settings->spec == own_settings->spec) return;
  const JsonValue before = parse_json(saved, "config.json of the checkpoint"), now = parse_json(own, "config.json");
  const auto matters = [](std::string_view name) {
    for (const std::string_view free : {"drop", "dtype", "_version", "_name_or_path", "architectures"})
      if (name.find(free) != name.npos) return false;
    return true;
  };
  const auto compare = [&](const std::string& key) {
    const JsonValue *const a = before.find(key), *const b = now.find(key);
    if (!matters(key) || (a != nullptr && b != nullptr && *a == *b)) return;
    if (a != nullptr && b != nullptr) refuse(str("its model has ", key, " ", excerpt(*a), ", not ", excerpt(*b)));
    const JsonValue& only = a != nullptr ? *a : *b;
    if (known && !only.is_null() && !(only == JsonValue(false)))
      refuse(str(a != nullptr ? "its model has " : "only the model of the run has ", key, " ", excerpt(only)));
  };
  // Differences of two values say most.
  for (std::size_t i = 0; i < now.size(); ++i)
    if (before.find(now.key[i]) != nullptr) compare(now.key[i]);
  for (const JsonValue* const each : {&before, &now})
    for (std::size_t i = 0; i < each->size(); ++i) compare(each->key[i]);
  if (known) refuse("its model has other settings");
}

// The checkpoint is of this model and optimizer.
void check_fits(const CheckpointReader& reader, const StepGraph& step, const TensorNumbers& numbers) {
  const CheckpointManifest& manifest = reader.manifest();
  const auto refuse                  = [&](const std::string& why) {
    throw Error(ErrorKind::config, str(reader.folder().string(), ": does not fit this run: ", why));
  };
  for (const CheckpointTensor& tensor : numbers.tensors()) {
    const auto found = std::ranges::find(manifest.tensors, tensor.name, &CheckpointTensor::name);
    if (found == manifest.tensors.end()) refuse(str("it has no tensor '", tensor.name, "' (the same model)"));
    if (found->shape != tensor.shape)
      refuse(str("'", tensor.name, "' has shape ", to_string(found->shape), " (", to_string(tensor.shape),
                 " in the model)"));
  }
  for (const CheckpointTensor& tensor : manifest.tensors)
    if (std::ranges::find(numbers.tensors(), tensor.name, &CheckpointTensor::name) == numbers.tensors().end())
      refuse(str("it has a tensor '", tensor.name, "' that the model does not have"));
  check_config(manifest.model_config, step.model.config, refuse);
  if (manifest.optimizer != to_string(step.optimizer))
    refuse(str("it is of optimizer ", manifest.optimizer, ", the run's is ", to_string(step.optimizer)));
  for (const StateKind state : {StateKind::first_moment, StateKind::second_moment})
    if ((state == StateKind::first_moment || step.optimizer == OptimizerKind::adamw) && !manifest.has(state))
      refuse(str("it has no ", to_string(state)));
}

template <class From, class To>
void write_converted(StoredValues& stored, Buffer buffer, std::int64_t at, std::span<const From> values) {
  if constexpr (std::is_same_v<From, To>) {
    stored.write(buffer, values, at);
  } else {
    std::vector<To> made(values.size());
    std::transform(values.begin(), values.end(), made.begin(),
                   [](From value) { return narrow<To>(static_cast<Wide<To>>(value)); });
    stored.write(buffer, std::span<const To>(made), at);
  }
}

// Elements of a target, from element `i` of its piece on.
template <class From>
void set_elements(StoredValues& stored, const Target& target, std::int64_t i, std::span<const From> values) {
  const LocalPiece& piece = target.piece;
  dispatch_float(target.type, [&]<class To>(To) {
    while (!values.empty()) {
      const std::int64_t row_left = piece.box.row() - i % piece.box.row();
      const auto now = piece.contiguous() ? values.size() : std::min(values.size(), static_cast<std::size_t>(row_left));
      write_converted<From, To>(stored, target.buffer, piece.local(i) + target.shift, values.first(now));
      values = values.subspan(now);
      i += static_cast<std::int64_t>(now);
    }
  });
}

class Loading {
 public:
  Loading(const CheckpointReader& reader, StepRun& run, const TensorNumbers& numbers)
      : reader_(reader), stored_(run.values()), targets_(targets_of(run.step(), numbers)), numbers_(numbers) {
    const CheckpointManifest& manifest = reader.manifest();
    for (const CheckpointTensor& tensor : manifest.tensors) number_of_.push_back(numbers.at(tensor.name));
    for (std::size_t file = 0; file < manifest.files.size(); ++file)
      for (const CheckpointPart& part : manifest.files[file].parts)
        if (part.state != StateKind::waiting && targets_.contains({number_of_[part.tensor], part.state}))
          for (std::int64_t first = 0; first < num_blocks(part); first += checkpoint_blocks_at_once)
            tasks_.push_back({file, &part, first});
  }

  void run(int threads) {
    for_tasks(tasks_.size(), threads, [this](std::size_t i) { load(tasks_[i]); });
    stored_.flush();
  }

 private:
  struct Task {
    std::size_t file;
    const CheckpointPart* part;
    std::int64_t first;
  };

  void load(const Task& task) {
    const CheckpointPart& part         = *task.part;
    const std::vector<Target>& targets = targets_.at({number_of_[part.tensor], part.state});
    const std::int64_t end             = std::min(task.first + checkpoint_blocks_at_once, num_blocks(part));
    // Blocks that are needed, as many neighbours as there are in one read.
    for (std::int64_t begin = task.first; begin < end;) {
      if (!is_needed(part, targets, begin)) {
        ++begin;
        continue;
      }
      std::int64_t next = begin + 1;
      while (next < end && is_needed(part, targets, next)) ++next;
      part.type == DType::f64 ? copy<double>(task, targets, begin, next) : copy<float>(task, targets, begin, next);
      begin = next;
    }
  }

  // Calls use(target, element of the part's piece, element of the target's piece, count).
  template <class Use>
  void for_target_runs(const CheckpointPart& part, const std::vector<Target>& targets, std::int64_t first,
                       std::int64_t last, const Use& use) const {
    const TensorShape& shape = numbers_.tensors()[number_of_[part.tensor]].shape;
    for (const Target& target : targets) {
      // A part of all indices can be cut along any dim.
      const bool whole = shape.empty() || part.size == shape[static_cast<std::size_t>(part.dim)];
      if (!whole && part.dim != target.piece.dim)
        throw Error(ErrorKind::config,
                    str(reader_.folder().string(), ": '", numbers_.tensors()[target.piece.tensor].name,
                        "' is cut along dim ", part.dim, ", not ", target.piece.dim));
      const int dim           = target.piece.dim;
      const std::int64_t size = shape.empty() ? 1 : shape[static_cast<std::size_t>(dim)];
      const TensorBox from    = whole ? box_of(shape, dim, 0, size) : box_of(shape, dim, part.begin, part.size);
      for_runs(from, first, last, target.piece.box, [&](std::int64_t a, std::int64_t b, std::int64_t n) {
        const std::int64_t low = std::max(b, target.first), high = std::min(b + n, target.last);
        return low >= high || use(target, a + (low - b), low, high - low);
      });
    }
  }

  [[nodiscard]] static std::int64_t elements_of_block(const CheckpointPart& part) {
    return checkpoint_block_bytes / static_cast<std::int64_t>(size_bytes(part.type));
  }

  [[nodiscard]] bool is_needed(const CheckpointPart& part, const std::vector<Target>& targets,
                               std::int64_t block) const {
    const std::int64_t each = elements_of_block(part), first = part.first + block * each;
    bool found = false;
    for_target_runs(part, targets, first, std::min(first + each, part.last),
                    [&](const Target&, std::int64_t, std::int64_t, std::int64_t) {
                      found = true;
                      return false;
                    });
    return found;
  }

  template <class T>
  void copy(const Task& task, const std::vector<Target>& targets, std::int64_t begin, std::int64_t end) {
    const CheckpointPart& part = *task.part;
    const std::int64_t each = elements_of_block(part), first = part.first + begin * each;
    const std::int64_t last = std::min(part.first + end * each, part.last);
    thread_local AlignedBytes room;
    const auto bytes = reader_.read_blocks(task.file, part, begin, end - begin, room);
    const std::span<const T> values(reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T));
    for_target_runs(part, targets, first, last,
                    [&](const Target& target, std::int64_t a, std::int64_t b, std::int64_t n) {
                      set_elements<T>(stored_, target, b,
                                      values.subspan(static_cast<std::size_t>(a - first), static_cast<std::size_t>(n)));
                      return true;
                    });
  }

  const CheckpointReader& reader_;
  StoredValues& stored_;
  Targets targets_;
  const TensorNumbers& numbers_;
  std::vector<std::size_t> number_of_;  // by tensor of the manifest: its number in the model
  std::vector<Task> tasks_;
};

void set_state(Trainer& trainer, const CheckpointState& state) {
  const Memory& memory = trainer.run().memory();
  const bool dynamic   = trainer.run().step().precision.scaling() == Scaling::dynamic;
  for (const StepRank& rank : trainer.run().step().ranks) {
    // A fixed scale is that of the plan.
    if (rank.loss_scale == Buffer{} || !state.loss_scale || !dynamic) continue;
    memory.set_first(rank.loss_scale, state.loss_scale->scale);
    if (rank.good_steps != Buffer{}) memory.set_first(rank.good_steps, state.loss_scale->good_steps);
  }
  trainer.set_num_updates(state.updates);
  trainer.set_num_steps(state.steps);
  trainer.run().set_has_weights();
}

// Why a checkpoint cannot be loaded. Of several causes the last one counts.
enum class Cause { damage, does_not_fit, other };
struct Refusal {
  Cause cause      = Cause::damage;
  ErrorKind kind   = ErrorKind::config;
  std::string text = {};

  [[nodiscard]] Error error() const { return {kind, text}; }
};

// The refusal of the first process that has one with the last cause, in all processes.
std::optional<Refusal> shared(Peers* peers, const std::optional<Refusal>& mine) {
  if (peers == nullptr) return mine;
  const auto pack_refusal = [](const std::optional<Refusal>& refusal) {
    return refusal ? Packer().add(refusal->cause).add(refusal->kind).add_text(refusal->text).take() : Bytes();
  };
  const auto unpack_refusal = [](const Bytes& bytes) -> std::optional<Refusal> {
    if (bytes.empty()) return std::nullopt;
    Unpacker received(bytes);
    Refusal refusal{.cause = received.get<Cause>()};
    refusal.kind = received.get<ErrorKind>();
    refusal.text = received.get_text();
    return refusal;
  };
  std::optional<Refusal> chosen;
  for (const Bytes& each : peers->gather("a loaded checkpoint", pack_refusal(mine)))
    if (const auto refusal = unpack_refusal(each); refusal && (!chosen || refusal->cause > chosen->cause))
      chosen = refusal;
  return unpack_refusal(peers->broadcast("a loaded checkpoint", pack_refusal(chosen)));
}

std::optional<Refusal> try_load(Trainer& trainer, const std::string& path, CheckpointState& state) {
  StepRun& run = trainer.run();
  run.prepare_to_set();
  std::optional<Refusal> refusal;
  bool fits = false;
  try {
    const TensorNumbers numbers(run.step().model);
    const CheckpointReader reader(path);
    fits = true;
    check_fits(reader, run.step(), numbers);
    check_waiting(reader, trainer);
    fits = false;
    // Headers are needed by no process: each checks some.
    const auto processes = static_cast<std::size_t>(run.peers() == nullptr ? 1 : run.peers()->num_processes());
    const auto process   = static_cast<std::size_t>(run.peers() == nullptr ? 0 : run.peers()->process());
    for (std::size_t file = process; file < reader.manifest().files.size(); file += processes)
      reader.check_header(file);
    Loading(reader, run, numbers).run(3 * run.threads());  // most of them wait for the disk
    load_waiting(reader, run);
    state = reader.manifest().state;
  } catch (const Error& error) {
    const Cause cause = error.kind() != ErrorKind::config ? Cause::other : fits ? Cause::does_not_fit : Cause::damage;
    refusal           = Refusal{cause, error.kind(), error.what()};
  } catch (const std::exception& error) {
    refusal = Refusal{Cause::other, ErrorKind::run, str(path, ": ", error.what())};
  }
  refusal = shared(trainer.run().peers(), refusal);
  if (refusal) return refusal;
  set_state(trainer, state);
  const std::int64_t seq = trainer.run().step().batch.seq;
  if (state.seq != seq && seq > 0) {
    state.position = state.position * state.seq / seq;
    state.seq      = seq;
  }
  return std::nullopt;
}

}  // namespace

CheckpointState load_checkpoint(Trainer& trainer, const std::string& path) {
  CheckpointState state;
  if (const auto refusal = try_load(trainer, path, state)) throw refusal->error();
  return state;
}

std::optional<Resumed> resume_newest(Trainer& trainer, const std::string& folder) {
  Peers* const peers = trainer.run().peers();
  std::vector<CheckpointEntry> entries;
  in_first(peers, "checkpoints of a folder", [&] { entries = list_checkpoints(folder); });
  if (peers != nullptr) {
    Packer packed;
    for (const CheckpointEntry& entry : entries)
      packed.add_text(entry.path).add(entry.steps).add_text(entry.problem).add(entry.damaged);
    const Bytes told = peers->broadcast("checkpoints of a folder", packed.take());
    entries.clear();
    for (Unpacker received(told); !received.empty();) {
      CheckpointEntry entry{.path = received.get_text()};
      entry.steps   = received.get<std::int64_t>();
      entry.problem = received.get_text();
      entry.damaged = received.get<bool>();
      entries.push_back(std::move(entry));
    }
  }
  if (entries.empty()) return std::nullopt;
  Resumed resumed;
  for (const CheckpointEntry& entry : entries) {
    if (!entry.problem.empty()) {
      if (!entry.damaged) throw Error(ErrorKind::backend, entry.problem);
      resumed.refused.push_back(entry.problem);
      continue;
    }
    const auto refusal = try_load(trainer, entry.path, resumed.state);
    if (!refusal) {
      resumed.path = entry.path;
      return resumed;
    }
    if (refusal->cause != Cause::damage) throw refusal->error();
    resumed.refused.push_back(refusal->text);
  }
  std::string all;
  for (const std::string& text : resumed.refused) all += str(all.empty() ? "" : "; ", text);
  throw Error(ErrorKind::config, str(folder, ": none of ", entries.size(), " checkpoints is whole: ", all));
}

}  // namespace stepgraph
