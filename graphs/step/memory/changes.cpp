#include "graphs/step/memory/changes.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/base/text.hpp"
#include "engine/base/words.hpp"

namespace stepgraph {
namespace {

struct ClassKey {
  std::string_view name;
  bool OffloadPlan::*field;
  bool only_trains = true;  // forward steps have none
};
// In the order of fewest transfers for each byte.
constexpr std::array class_keys{ClassKey{"optimizer", &OffloadPlan::optimizer}, ClassKey{"grads", &OffloadPlan::grads},
                                ClassKey{"params", &OffloadPlan::params, false},
                                ClassKey{"activations", &OffloadPlan::activations}};

class ChangeList {
 public:
  ChangeList(const Plan& plan, const BatchSpec& batch, bool trains)
      : plan_(plan), trains_(trains), from_{.settings = {}, .plan = plan, .batch = batch} {}

  std::vector<Change> for_device(bool offload_first) {
    if (plan_.offload.host_bytes > 0) add_disk();  // host memory may be why more stays on the device
    add_strategies();
    const std::vector<Change> offloaded = more_offload();
    if (offload_first) append(offloaded);
    if (plan_.reuse != Reuse::tight) {
      from_ = from_.with("memory.reuse=tight", [](Change& change) { change.plan.reuse = Reuse::tight; });
      out_.push_back(from_);
    }
    for (const Recompute kind : {Recompute::selective, Recompute::full}) {
      if (may_recompute(kind)) out_.push_back(with_recompute(from_, kind));
    }
    add_shards();
    append(smaller_microbatches(from_));
    if (may_recompute(Recompute::full)) append(smaller_microbatches(with_recompute(from_, Recompute::full)));
    if (!offload_first) append(offloaded);
    if (shards()) add_all(with_shard(from_, Shard::full, ReduceWhen::each));
    if (!offloaded.empty()) add_all(offloaded.back());
    return std::move(out_);
  }

  std::vector<Change> for_homes(bool is_host) {
    if (is_host) add_disk();
    if (may_recompute(Recompute::full)) out_.push_back(with_recompute(from_, Recompute::full));
    for (auto of = class_keys.rbegin(); of != class_keys.rend(); ++of) {
      if (!(plan_.offload.*(of->field))) continue;
      out_.push_back(from_.with(str("offload.", of->name, "=false"),
                                [&](Change& change) { change.plan.offload.*(of->field) = false; }));
    }
    append(smaller_microbatches(from_));
    return std::move(out_);
  }

 private:
  void append(const std::vector<Change>& more) { out_.insert(out_.end(), more.begin(), more.end()); }

  [[nodiscard]] bool may_recompute(Recompute kind) const { return trains_ && plan_.recompute < kind; }
  [[nodiscard]] static Change with_recompute(const Change& of, Recompute kind) {
    return of.with(str("recompute=", kind), [&](Change& change) { change.plan.recompute = kind; });
  }

  void add_disk() {
    if (!plan_.offload.disk.empty() || !may_use_disk(plan_.offload.strategy) || !plan_.offload.moves_something())
      return;
    // Any name: nothing is written before a run.
    out_.push_back(from_.with("offload.disk=FOLDER", [](Change& change) { change.plan.offload.disk = "."; }));
  }

  void add_strategies() {
    if (plan_.offload.strategy == OffloadStrategy::manual) return;
    for (const OffloadStrategy stronger : all_offload_strategies) {
      if (stronger <= plan_.offload.strategy) continue;
      out_.push_back(from_.with(str("offload.strategy=", stronger),
                                [&](Change& change) { change.plan.offload.strategy = stronger; }));
    }
  }

  // Classes of offload, one after another.
  [[nodiscard]] std::vector<Change> more_offload() const {
    std::vector<Change> out;
    Change from = from_;
    for (const ClassKey& of : class_keys) {
      if (plan_.offload.may_move(plan_.offload.*of.field) || (of.only_trains && !trains_)) continue;
      from =
          from.with(str("offload.", of.name, "=true"), [&](Change& change) { change.plan.offload.*of.field = true; });
      out.push_back(from);
    }
    return out;
  }

  // Other strategies than hybrid do not have its groups, and cannot delay the reduction.
  [[nodiscard]] bool shards() const {
    return trains_ && plan_.layout.dp > 1 && plan_.shard.strategy != Shard::hybrid && !plan_.shard.delay_all_reduce &&
           (plan_.shard.strategy != Shard::full || plan_.shard.reduce != ReduceWhen::each);
  }
  [[nodiscard]] static Change with_shard(const Change& of, Shard strategy, ReduceWhen reduce) {
    const auto set = [&](Change& change) {
      change.plan.shard.strategy = strategy;
      change.plan.shard.reduce   = reduce;
    };
    Change made = of.with(str("shard.strategy=", to_string(strategy)), set);
    if (reduce == ReduceWhen::each) made.settings.emplace_back("shard.reduce=each");
    return made;
  }
  void add_shards() {
    if (!shards()) return;
    for (const Shard strategy : {Shard::zero1, Shard::grad_op, Shard::full}) {
      if (plan_.shard.strategy < strategy) out_.push_back(with_shard(from_, strategy, plan_.shard.reduce));
    }
    if (plan_.shard.reduce != ReduceWhen::each) out_.push_back(with_shard(from_, Shard::full, ReduceWhen::each));
  }

  // The largest first.
  [[nodiscard]] static std::vector<Change> smaller_microbatches(const Change& from) {
    std::vector<Change> out;
    const int sequences = from.batch.global / from.plan.layout.dp;
    for (int micro = from.batch.micro - 1; micro >= 1; --micro) {
      if (sequences % micro != 0) continue;
      out.push_back(from.with(str("batch.micro=", micro), [&](Change& change) { change.batch.micro = micro; }));
    }
    return out;
  }

  void add_all(Change from) {
    if (may_recompute(Recompute::full)) from = with_recompute(from, Recompute::full);
    const auto is_same = [&](const Change& change) { return change.settings == from.settings; };
    if (std::none_of(out_.begin(), out_.end(), is_same)) out_.push_back(from);
    append(smaller_microbatches(from));
  }

  const Plan& plan_;
  bool trains_;
  Change from_;
  std::vector<Change> out_;
};

}  // namespace

std::string settings_text(const Change& change) {
  return join_text(change.settings, " ", [](const std::string& setting) { return setting; });
}

std::vector<Change> changes_for(std::string_view key, const Plan& plan, const BatchSpec& batch, bool trains) {
  ChangeList list(plan, batch, trains);
  if (key == "offload.host_bytes") return list.for_homes(true);
  if (key == "offload.disk_bytes") return list.for_homes(false);
  return list.for_device(key == "offload.device_bytes" || plan.recompute == Recompute::automatic);
}

bool enlarge_budget(Change& change, std::string_view key, std::int64_t bytes) {
  const auto set = [&](std::string_view name, std::int64_t& field) {
    field                 = bytes;
    const auto is_of_name = [&](const std::string& setting) { return setting.starts_with(str(name, "=")); };
    std::erase_if(change.settings, is_of_name);
    change.settings.push_back(str(name, "=", bytes));
  };
  OffloadPlan& offload = change.plan.offload;
  if (key == "offload.host_bytes") {
    set(key, offload.host_bytes);
  } else if (key == "offload.disk_bytes") {
    set(key, offload.disk_bytes);
  } else if (key == "offload.device_bytes" || key == "memory.limit_bytes") {
    std::int64_t& limit = change.plan.memory_limit_bytes;
    if (limit > 0 && limit < bytes) set("memory.limit_bytes", limit);
    if (offload.device_bytes > 0 && offload.device_bytes < bytes) set("offload.device_bytes", offload.device_bytes);
  } else {
    return false;
  }
  return true;
}

}  // namespace stepgraph
