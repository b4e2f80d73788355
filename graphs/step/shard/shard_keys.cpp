// Checks that fields of a sharding plan have an effect.
#include <string>

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"
#include "graphs/step/shard_units.hpp"

namespace stepgraph {
namespace {

std::string shown(int value) { return str(value); }
std::string shown(std::int64_t value) { return str(value); }
std::string shown(double value) { return str(value); }
std::string shown(bool value) { return value ? "true" : "false"; }
std::string shown(Prefetch value) { return std::string(to_string(value)); }
std::string shown(const std::string& value) { return str("'", value, "'"); }

// Compares fields with their defaults.
class Keys {
 public:
  explicit Keys(const ShardPlan& plan) : plan_(plan) {}

  // Throws if `idle`, which means that `field` has no effect, and `field` is not the default. `because` follows "has no
  // effect " in the message: the reason, and in parentheses what would be right.
  template <class T>
  void check(std::string_view key, T ShardPlan::*field, bool idle, const std::string& because) const {
    if (!idle || plan_.*field == usual_.*field) return;
    throw Error(ErrorKind::config, str("shard.", key, ": ", shown(plan_.*field), " has no effect ", because));
  }

 private:
  const ShardPlan& plan_;
  ShardPlan usual_ = {};
};

}  // namespace

bool keeps_gathered(const ShardPlan& plan) { return !plan.reshard_after_forward || plan.keep_between_microbatches; }

void check_shard_keys(const ShardPlan& plan) {
  const Keys keys(plan);
  const bool cuts = plan.strategy != Shard::none, cuts_values = shards_weights(plan.strategy);
  const std::string with = str("with strategy ", to_string(plan.strategy), ", which ");

  const std::string none_cut = with + "shards nothing (strategy zero1, grad_op, full or hybrid)";
  keys.check("units", &ShardPlan::units, !cuts, none_cut);
  keys.check("min_params", &ShardPlan::min_params, !cuts, none_cut);
  keys.check("flat", &ShardPlan::flat, !cuts, none_cut);

  const std::string none_gathered = with + "gathers no weights in forward or backward (strategy full or hybrid)";
  keys.check("slots", &ShardPlan::slots, !cuts_values, none_gathered);
  keys.check("prefetch", &ShardPlan::prefetch, !cuts_values, none_gathered);
  keys.check("forward_prefetch", &ShardPlan::forward_prefetch, !cuts_values, none_gathered);
  keys.check("slots", &ShardPlan::slots, keeps_gathered(plan),
             str("with ", plan.reshard_after_forward ? "keep_between_microbatches true" : "reshard_after_forward false",
                 ", which keeps every unit gathered in its own buffer (reshard_after_forward true, "
                 "keep_between_microbatches false)"));
  keys.check("prefetch", &ShardPlan::prefetch, !plan.reshard_after_forward,
             "with reshard_after_forward false, because backward gathers no weights (reshard_after_forward true)");
  keys.check("grad_slots", &ShardPlan::grad_slots, plan.reduce == ReduceWhen::last,
             "with reduce last, which keeps the whole gradients of all units until the last microbatch (reduce each)");

  keys.check("delay_all_reduce", &ShardPlan::delay_all_reduce, cuts,
             with + "reduces gradients unit by unit (strategy none, which reduces buckets)");
  const std::string no_buckets =
      str("with strategy ", to_string(plan.strategy),
          " and min_params 0, which shard all weights and leave no buckets (strategy none, or min_params above 0)");
  const bool has_none = cuts && plan.min_params == 0;
  keys.check("bucket_mb", &ShardPlan::bucket_mb, has_none, no_buckets);
  keys.check("first_bucket_mb", &ShardPlan::first_bucket_mb, has_none, no_buckets);
  keys.check("bucket_views", &ShardPlan::bucket_views, has_none, no_buckets);
  const std::string one_bucket =
      "with delay_all_reduce true, which puts all gradients of a stage in one bucket (delay_all_reduce false)";
  keys.check("bucket_mb", &ShardPlan::bucket_mb, plan.delay_all_reduce, one_bucket);
  keys.check("first_bucket_mb", &ShardPlan::first_bucket_mb, plan.delay_all_reduce, one_bucket);
}

}  // namespace stepgraph
