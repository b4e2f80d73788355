// The gradient norm of the last step where its update is delayed: the nodes that compute it in the next step, as a
// graph of their own that works on copies.
#include <cmath>
#include <map>
#include <set>

#include "graphs/train/trainer.hpp"
#include "ops/transfers/reduce.hpp"

namespace stepgraph {
namespace {

struct NormGraph {
  Graph graph;
  std::vector<SameBytes> same = {};
  Buffer norm                 = {};  // of the first rank
};

class NormBuilder {
 public:
  explicit NormBuilder(const StepGraph& step)
      : step_(step), old_(step.graph), made_{.graph = Graph(old_.num_ranks(), old_.ranks())} {}

  NormGraph build() {
    find_live();
    copy_buffers();
    for (std::uint32_t i = 0; i < old_.num_groups(); ++i) static_cast<void>(made_.graph.group(old_.spec(Group{i})));
    for (const auto& [from, to] : copies_) {
      copy(made_.graph, {.name   = str("copy ", made_.graph.spec(from).name),
                         .lane   = std::nullopt,
                         .to     = to,
                         .from   = from,
                         .labels = {.phase = "copy"}});
    }
    for (std::uint32_t i = 0; i < old_.num_nodes(); ++i) {
      if (live_[i]) add(Node{i});
    }
    made_.norm = moved_.at(step_.ranks.front().grad_norm.id);
    return std::move(made_);
  }

 private:
  // From the last node to the first: nodes that lead to the norm. All parts of the reduction, because another rank may
  // need them.
  void find_live() {
    live_.assign(old_.num_nodes(), false);
    std::vector<char> wanted(old_.num_buffers(), false);
    std::set<Rank> begun;  // ranks whose norm was met
    for (std::uint32_t i = old_.num_nodes(); i-- > 0;) {
      const Rank rank    = old_.rank(Node{i});
      const Buffer norm  = step_.ranks.at(rank).grad_norm;
      const auto& labels = old_.labels(Node{i});
      bool live          = begun.contains(rank) && old_.has_part(Node{i}) && labels.microbatch < 0 &&
                  (labels.phase == "reduce" || labels.phase == "norm");
      for (std::size_t a = 0; a < old_.num_accesses(Node{i}); ++a) {
        const auto access = old_.access(Node{i}, a);
        if (writes(access.mode) && access.buffer == norm) begun.insert(rank);
        live = live || (writes(access.mode) && (access.buffer == norm || wanted[access.buffer.id]));
      }
      live_[i] = live;
      for (std::size_t a = 0; live && a < old_.num_accesses(Node{i}); ++a) {
        const auto access = old_.access(Node{i}, a);
        if (reads(access.mode)) wanted[access.buffer.id] = true;
      }
    }
  }

  // Persistent buffers that are read have the step's bytes. Those that are also written are copied before.
  void copy_buffers() {
    std::map<std::uint32_t, std::pair<bool, bool>> uses;  // by buffer: it is read, and written
    for (std::uint32_t i = 0; i < old_.num_nodes(); ++i) {
      for (std::size_t a = 0; live_[i] && a < old_.num_accesses(Node{i}); ++a) {
        const auto access = old_.access(Node{i}, a);
        auto& use         = uses[access.buffer.id];
        use.first |= reads(access.mode);
        use.second |= writes(access.mode);
      }
    }
    for (const auto& [id, use] : uses) {
      BufferSpec spec       = old_.spec(Buffer{id});
      const bool persistent = spec.lifetime == Lifetime::persistent;
      if (spec.token) {
        moved_[id] = made_.graph.token(spec.rank, spec.name);
        continue;
      }
      if (!use.first && use.second) {  // a result
        moved_[id] = made_.graph.buffer(spec);
        continue;
      }
      Buffer shared = {};
      if (persistent) {
        shared = made_.graph.buffer(spec);
        made_.same.push_back({.here = shared, .of_step = Buffer{id}});
      }
      if (persistent && !use.second) {
        moved_[id] = shared;
        continue;
      }
      spec.lifetime = Lifetime::step;
      moved_[id]    = made_.graph.buffer(spec);
      if (persistent) copies_.emplace_back(shared, moved_[id]);
    }
  }

  void add(Node node) {
    NodeSpec spec = old_.spec(node);
    spec.reads = spec.writes = spec.accumulates = {};
    for (std::size_t i = 0; i < old_.num_accesses(node); ++i) {
      const auto view  = old_.access(node, i);
      AccessList& list = view.mode == AccessMode::read    ? spec.reads
                         : view.mode == AccessMode::write ? spec.writes
                                                          : spec.accumulates;
      list.push_back({moved_.at(view.buffer.id), view.region});
    }
    if (spec.part) spec.part->issue = -1;  // parts are issued in the order of nodes, as before
    made_.graph.add(spec, old_.body(node));
  }

  const StepGraph& step_;
  const Graph& old_;
  NormGraph made_;
  std::vector<char> live_;  // by node
  std::map<std::uint32_t, Buffer> moved_;
  std::vector<std::pair<Buffer, Buffer>> copies_;  // from, to
};

}  // namespace

struct Trainer::LastNorm {
  Buffer norm;
  Program program;
};

void Trainer::DeleteLastNorm::operator()(LastNorm* of) const noexcept { delete of; }

double Trainer::last_grad_norm() {
  // Without gradients that wait the last step was done with another UpdatePlan, or there was none.
  if (!plan_.update.delays() || run_->num_waiting() == 0) return grad_norm_;
  if (!last_norm_) {
    const NormGraph norm = NormBuilder(run_->step()).build();
    last_norm_.reset(new LastNorm{norm.norm, run_->beside(norm.graph, norm.same)});
  }
  run_->run(last_norm_->program);
  return last_norm_->program.memory().first<double>(last_norm_->norm);
}

}  // namespace stepgraph
