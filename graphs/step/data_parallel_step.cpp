#include "graphs/step/data_parallel_step.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "engine/base/error.hpp"
#include "graphs/step/builder/part_node.hpp"
#include "ops/transfers/collectives.hpp"
#include "ops/transfers/reduce.hpp"

namespace stepgraph {
namespace {

constexpr Rank root = data_parallel_root;

std::size_t at(Rank rank) { return static_cast<std::size_t>(index(rank)); }

Plan plan_of(const DataParallelOptions& options) {
  const auto refuse = [](const std::string& why) { throw Error(ErrorKind::config, "data_parallel: " + why); };
  if (options.devices < 1) refuse(str(options.devices, " devices (at least 1)"));
  if (options.global < 1 || options.global % options.devices != 0) {
    refuse(str("a batch of ", options.global, " sequences does not divide over ", options.devices,
               " devices (a multiple of ", options.devices, ")"));
  }
  const int share = options.global / options.devices;
  if (options.micro < 0 || (options.micro > 0 && share % options.micro != 0)) {
    refuse(str("micro ", options.micro, " does not divide the ", share,
               " sequences of a device (a divisor, or 0: all at once)"));
  }
  if (options.precision.param == DType::f64) refuse("precision.param f64 (f32 or bf16: results are floats)");
  if (options.precision.scales())
    refuse("precision: f16 and loss_scale are not supported (f32 or bf16; a Trainer supports loss scaling)");
  if (options.update.mode == UpdateWhen::asynchronous)
    refuse("update.mode asynchronous: the root broadcasts its weights in each step (synchronous or stale)");
  if (options.update.delays() && !options.optimizer)
    refuse(str("update.mode stale with max_staleness ", options.update.max_staleness,
               " without an optimizer (an optimizer, or max_staleness 0)"));
  return {.layout    = {.dp = options.devices},
          .shard     = {.bucket_mb = 1e-9},  // one bucket for each gradient: only the root keeps gradients
          .precision = options.precision,
          .optimizer = options.optimizer.value_or(OptimizerPlan{}),
          .update    = options.update,
          .recompute = options.recompute,
          .reuse     = options.reuse};
}

BatchSpec batch_of(const DataParallelOptions& options) {
  return {.global = options.global,
          .micro  = options.micro > 0 ? options.micro : options.global / options.devices,
          .seq    = options.seq};
}

// A pass: removes nodes with results that only other ranks than the root would use, and adds the communication that
// distributes inputs from the root and collects results there.
class Rooted {
 public:
  Rooted(const StepGraph& from, bool updates) : from_(from), old_(from.graph), updates_(updates), made_{.step = from} {
    made_.step.graph = Graph(old_.num_ranks());
    find_live();
    find_reductions();
  }

  DataParallelStep build() {
    copy_buffers();
    for (std::uint32_t i = 0; i < old_.num_groups(); ++i) (void)graph().group(old_.spec(Group{i}));
    ranks_  = from_.layout.group_of(root, Axis::dp);
    inputs_ = add_group(graph(), ranks_, "inputs");
    send_out();
    for (std::uint32_t i = 0; i < old_.num_nodes(); ++i) {
      if (live_[i]) add(Node{i});
    }
    gather_logits();
    return std::move(made_);
  }

 private:
  [[nodiscard]] Graph& graph() { return made_.step.graph; }
  [[nodiscard]] bool wants(Rank rank, Buffer buffer) const {
    const StepRank& has = from_.ranks[at(rank)];
    if (std::find(has.logits.begin(), has.logits.end(), buffer) != has.logits.end()) return true;
    if (waits(rank, buffer)) return true;
    if (rank != root) return false;
    if (buffer == has.loss || (updates_ && buffer == has.grad_norm)) return true;
    return std::any_of(has.weights.begin(), has.weights.end(), [&](const StepWeight& weight) {
      return buffer == weight.gradient.buffer ||
             (updates_ && (buffer == weight.value.buffer || buffer == weight.master.buffer ||
                           buffer == weight.first.buffer || buffer == weight.second.buffer));
    });
  }

  // The next run reads it: gradients that were accumulated here; on the root all that belongs to gradients that wait.
  [[nodiscard]] bool waits(Rank rank, Buffer buffer) const {
    const std::vector<GradientSet>& sets = from_.ranks[at(rank)].sets;
    for (std::size_t age = 1; age < sets.size(); ++age) {
      const auto& gradients = sets[age].gradients;
      if (rank == root && (buffer == sets[age].scale || buffer == sets[age].factor)) return true;
      if ((rank == root || age == 1) && std::find(gradients.begin(), gradients.end(), buffer) != gradients.end())
        return true;
    }
    return rank == root && !sets.empty() && buffer == from_.ranks[at(rank)].num_updates;
  }

  // From the last node to the first: a node stays if a later node or the caller uses what it writes. Every part stays,
  // because another rank may use its result.
  void find_live() {
    live_.assign(old_.num_nodes(), false);
    used_.assign(old_.num_nodes(), false);
    std::vector<char> wanted(old_.num_buffers());
    for (std::uint32_t i = 0; i < old_.num_buffers(); ++i) wanted[i] = wants(old_.spec(Buffer{i}).rank, Buffer{i});
    for (std::uint32_t i = old_.num_nodes(); i-- > 0;) {
      for (std::size_t a = 0; a < old_.num_accesses(Node{i}); ++a) {
        const auto access = old_.access(Node{i}, a);
        used_[i]          = used_[i] || (writes(access.mode) && wanted[access.buffer.id]);
      }
      live_[i] = used_[i] || old_.has_part(Node{i});
      if (!live_[i]) continue;
      // Gradients that wait are written as a whole at the end: what they were before is not wanted.
      if (old_.labels(Node{i}).phase == shift_phase)
        wanted[old_.access(Node{i}, written_by(Node{i})).buffer.id] = false;
      for (std::size_t a = 0; a < old_.num_accesses(Node{i}); ++a) {
        const auto access = old_.access(Node{i}, a);
        if (reads(access.mode)) wanted[access.buffer.id] = true;
      }
    }
  }

  [[nodiscard]] std::size_t written_by(Node node) const {
    std::size_t i = 0;
    while (!writes(old_.access(node, i).mode)) ++i;
    return i;
  }

  // An all-reduce becomes a reduce where only the root uses the result.
  void find_reductions() {
    for (std::uint32_t i = 0; i < old_.num_nodes(); ++i) {
      if (!old_.has_part(Node{i}) || old_.part(Node{i}).op != PartOp::all_reduce) continue;
      if (used_[i] && old_.rank(Node{i}) != root) shared_.insert(key(Node{i}));
    }
  }
  using Key = std::pair<std::uint32_t, std::string>;
  [[nodiscard]] Key key(Node node) const {
    const auto part = old_.part(node);
    return {part.group.id, std::string(part.message)};
  }

  void copy_buffers() {
    std::vector<char> touched(old_.num_buffers(), false);
    for (std::uint32_t i = 0; i < old_.num_nodes(); ++i) {
      for (std::size_t a = 0; live_[i] && a < old_.num_accesses(Node{i}); ++a) {
        touched[old_.access(Node{i}, a).buffer.id] = true;
      }
    }
    std::set<std::uint32_t> passing;  // not used after they are sent
    for (std::size_t rank = 0; rank < from_.ranks.size(); ++rank) {
      for (const Buffer logits : from_.ranks[rank].logits) passing.insert(logits.id);
      for (const StepWeight& weight : from_.ranks[rank].weights) {
        if (rank != at(root) && from_.ranks[rank].sets.empty()) passing.insert(weight.gradient.buffer.id);
      }
    }
    moved_.resize(old_.num_buffers());
    for (std::uint32_t i = 0; i < old_.num_buffers(); ++i) {
      if (!touched[i]) continue;
      BufferSpec spec = old_.spec(Buffer{i});
      if (passing.contains(i)) spec.lifetime = Lifetime::step;
      moved_[i] = graph().buffer(spec);
    }
    for (StepRank& rank : made_.step.ranks) {
      for (auto* list : {&rank.tokens, &rank.targets, &rank.logits}) {
        for (Buffer& buffer : *list) move(buffer);
      }
      for (Buffer* buffer :
           {&rank.loss, &rank.num_ignored, &rank.grad_norm, &rank.step_number, &rank.num_updates, &rank.rate})
        move(*buffer);
      for (GradientSet& set : rank.sets) {
        move(set.scale);
        move(set.factor);
        for (Buffer& gradients : set.gradients) move(gradients);
        std::erase(set.gradients, Buffer{});
      }
      for (StepWeight& weight : rank.weights) {
        for (StoredRange* part : {&weight.value, &weight.gradient, &weight.first, &weight.second, &weight.master}) {
          move(part->buffer);
          if (part->buffer == Buffer{}) *part = {};
        }
      }
    }
  }
  void move(Buffer& buffer) const {
    if (buffer != Buffer{}) buffer = moved_[buffer.id];
  }

  [[nodiscard]] Buffer on_root(std::string name, std::int64_t elements, DType type) {
    return graph().buffer({.name       = std::move(name),
                           .rank       = root,
                           .size_bytes = elements * static_cast<std::int64_t>(size_bytes(type)),
                           .type       = type,
                           .lifetime   = Lifetime::persistent});
  }

  // Tokens first: they are few. Then weights, in the order of the forward pass, which can begin before the last
  // arrives.
  void send_out() {
    const std::int64_t tokens = std::int64_t{from_.batch.global} * from_.batch.seq;
    const auto scatter_all    = [&](const std::string& what, Buffer& batch, std::vector<Buffer> StepRank::*shares) {
      if ((made_.step.ranks[at(root)].*shares).empty()) return;
      batch = on_root("batch of " + what, tokens, DType::i32);
      scatter(graph(), {.name   = "scatter " + what,
                           .group  = inputs_,
                           .lane   = LaneKind::gather,
                           .in     = [&](Rank) { return batch; },
                           .out    = [&](Rank rank) { return made_.step.ranks[at(rank)].*shares; },
                           .root   = root,
                           .labels = {.phase = "scatter"}});
    };
    scatter_all("tokens", made_.tokens, &StepRank::tokens);
    scatter_all("targets", made_.targets, &StepRank::targets);
    std::set<std::uint32_t> sent;
    const std::vector<StepWeight>& weights = made_.step.ranks[at(root)].weights;
    for (std::size_t i = 0; i < weights.size() && ranks_.size() > 1; ++i) {
      // Tied weights share one value. A weight that no node reads has no buffer.
      if (weights[i].value.empty() || !sent.insert(weights[i].value.buffer.id).second) continue;
      broadcast(graph(), {.name   = "broadcast " + from_.spec(weights[i]).name,
                          .group  = inputs_,
                          .lane   = LaneKind::gather,
                          .out    = [&](Rank rank) { return made_.step.ranks[at(rank)].weights[i].value.buffer; },
                          .root   = root,
                          .labels = {.phase = "broadcast"}});
    }
  }

  void add(Node node) {
    keep_logits(node);
    NodeSpec spec = old_.spec(node);
    spec.reads = spec.writes = spec.accumulates = {};
    const bool reduced = spec.part && spec.part->op == PartOp::all_reduce && !shared_.contains(key(node));
    const bool sends   = reduced && old_.rank(node) != root;  // and receives nothing
    for (std::size_t i = 0; i < old_.num_accesses(node); ++i) {
      const auto view = old_.access(node, i);
      if (sends && !reads(view.mode)) continue;
      AccessList& list = view.mode == AccessMode::read || sends ? spec.reads
                         : view.mode == AccessMode::write       ? spec.writes
                                                                : spec.accumulates;
      list.push_back({moved_[view.buffer.id], view.region});
    }
    if (spec.part) spec.part->issue = -1;  // parts are issued in the order of nodes, as before
    if (reduced) {
      spec.part->op   = PartOp::reduce;
      spec.part->root = root;
      spec.op         = "reduce";
      spec.cost       = part_cost(PartOp::reduce, old_.part(node).bytes_read, ranks_.size(), !sends);
    }
    graph().add(spec, old_.body(node));
  }

  // Copies a training step's logits before the loss, which may overwrite them with the gradient. With a copy no device
  // waits for another device's forward pass.
  void keep_logits(Node node) {
    const Rank rank      = old_.rank(node);
    StepRank& here       = made_.step.ranks[at(rank)];
    const std::size_t mb = here.logits.size();
    const auto& targets  = from_.ranks[at(rank)].targets;
    if (mb >= targets.size() || !touches(node, [&](const auto& access) { return access.buffer == targets[mb]; }))
      return;
    const std::int64_t size = std::int64_t{from_.batch.micro} * from_.batch.seq * from_.model.vocab *
                              static_cast<std::int64_t>(size_bytes(from_.type));
    Access logits;
    if (!touches(node, [&](const auto& access) {
          const bool found = old_.spec(access.buffer).type == from_.type && access.region.num_bytes() == size;
          if (found) logits = {moved_[access.buffer.id], access.region};
          return found;
        })) {
      throw Error(ErrorKind::graph, str("data_parallel: ", old_.describe(node), " reads targets, but no logits"));
    }
    here.logits.push_back(
        graph().buffer({.name = str("logits mb", mb), .rank = rank, .size_bytes = size, .type = from_.type}));
    copy(graph(), {.name   = str("keep logits mb", mb),
                   .to     = here.logits.back(),
                   .from   = logits,
                   .labels = {.stage = 0, .microbatch = static_cast<int>(mb), .phase = "forward"}});
  }
  template <class Matches>
  [[nodiscard]] bool touches(Node node, const Matches& matches) const {
    for (std::size_t i = 0; i < old_.num_accesses(node); ++i) {
      if (matches(old_.access(node, i))) return true;
    }
    return false;
  }

  // Device k has the sequences from k * share + m * micro on of microbatch m.
  void gather_logits() {
    const std::int64_t row =
        std::int64_t{from_.batch.seq} * from_.model.vocab * static_cast<std::int64_t>(size_bytes(from_.type));
    const std::int64_t share = from_.batch.global / ranks_.size(), size = from_.batch.micro * row;
    made_.logits =
        on_root("logits", std::int64_t{from_.batch.global} * from_.batch.seq * from_.model.vocab, from_.type);
    const Group outputs = add_group(graph(), ranks_, "outputs");
    for (int mb = 0; mb < from_.num_microbatches; ++mb) {
      gather(graph(), {.name  = str("gather logits mb", mb),
                       .group = outputs,
                       .lane  = LaneKind::gather,
                       .in = [&](Rank rank) { return made_.step.ranks[at(rank)].logits[static_cast<std::size_t>(mb)]; },
                       .out =
                           [&](Rank) {
                             AccessList shares;
                             for (int k = 0; k < ranks_.size(); ++k) {
                               shares.push_back(made_.logits.range((k * share + mb * from_.batch.micro) * row, size));
                             }
                             return shares;
                           },
                       .root   = root,
                       .labels = {.microbatch = mb, .phase = "gather"}});
    }
  }

  const StepGraph& from_;
  const Graph& old_;
  bool updates_;
  DataParallelStep made_;
  std::vector<char> live_, used_;  // by node: it stays; its own rank uses what it writes
  std::set<Key> shared_;           // all-reduces with results that other ranks than the root use
  std::vector<Buffer> moved_;      // by buffer: its new number
  RankGroup ranks_;
  Group inputs_;
};

}  // namespace

DataParallelStep data_parallel_step(const Model& model, const DataParallelOptions& options) {
  const Plan plan = plan_of(options);  // checks the options, which batch_of trusts
  const StepGraph step =
      training_step(model, plan, batch_of(options),
                    {.keep_gradients = !options.update.delays(), .seed = options.seed, .share_norm = false});
  return Rooted(step, options.optimizer.has_value()).build();
}

DataParallelStep data_parallel_forward(const Model& model, const DataParallelOptions& options) {
  const Plan plan      = plan_of(options);  // checks the options, which batch_of trusts
  const StepGraph step = forward_step(model, plan, batch_of(options), ForwardResult::logits);
  return Rooted(step, false).build();
}

}  // namespace stepgraph
