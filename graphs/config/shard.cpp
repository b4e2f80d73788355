#include <limits>

#include "graphs/config/reader.hpp"
#include "graphs/config/sections.hpp"
#include "graphs/step/shard_units.hpp"

namespace stepgraph {
namespace {

constexpr int max_int = std::numeric_limits<int>::max();

// What DeepSpeed, PyTorch and Megatron call them.
constexpr ConfigReader::OtherName strategies_elsewhere[] = {
    {"ddp", "\"none\""},        {"zero0", "\"none\""},
    {"noshard", "\"none\""},    {"replicate", "\"none\""},
    {"zero1", "\"zero1\""},     {"distributedoptimizer", "\"zero1\""},
    {"optimizer", "\"zero1\""}, {"zero2", "\"grad_op\""},
    {"sdp", "\"grad_op\""},     {"shardgradop", "\"full\" with shard.reshard_after_forward false"},
    {"zero3", "\"full\""},      {"fsdp", "\"full\""},
    {"fsdp2", "\"full\""},      {"fullshard", "\"full\""},
    {"hsdp", "\"hybrid\""},     {"hybridshard", "\"hybrid\""},
};

}  // namespace

void read_shard(const ConfigReader& root, ShardPlan& shard) {
  const ConfigReader section = root.section("shard", {"strategy",
                                                      "reduce",
                                                      "prefetch",
                                                      "forward_prefetch",
                                                      "slots",
                                                      "grad_slots",
                                                      "bucket_mb",
                                                      "first_bucket_mb",
                                                      "bucket_views",
                                                      "delay_all_reduce",
                                                      "find_unused_parameters",
                                                      "static_graph",
                                                      "reduction",
                                                      "units",
                                                      "min_params",
                                                      "flat",
                                                      "group",
                                                      "reshard_after_forward",
                                                      "reshard_group",
                                                      "keep_between_microbatches"});
  const Shard preset         = shard.strategy;
  shard.strategy             = read_enum(section, "strategy", preset, Shard::hybrid, strategies_elsewhere);
  if (shard.strategy != preset)
    shard = {.strategy = shard.strategy};  // the other choices of a preset are for its own strategy
  shard.reduce   = read_enum(section, "reduce", shard.reduce, ReduceWhen::each);
  shard.prefetch = read_enum(section, "prefetch", shard.prefetch, Prefetch::none);
  section.boolean("forward_prefetch", shard.forward_prefetch);
  section.integer("slots", shard.slots, 1, max_int);
  section.integer("grad_slots", shard.grad_slots, 1, max_int);
  section.text("units", shard.units);
  section.integer("min_params", shard.min_params, 0, std::numeric_limits<std::int64_t>::max());
  section.boolean("flat", shard.flat);
  section.integer("group", shard.group, 0, max_int);
  section.boolean("reshard_after_forward", shard.reshard_after_forward);
  section.integer("reshard_group", shard.reshard_group, 0, max_int);
  section.boolean("keep_between_microbatches", shard.keep_between_microbatches);
  section.real("bucket_mb", shard.bucket_mb, positive);
  section.real("first_bucket_mb", shard.first_bucket_mb, not_negative);
  section.boolean("bucket_views", shard.bucket_views);
  section.boolean("delay_all_reduce", shard.delay_all_reduce);
  section.boolean("find_unused_parameters", shard.find_unused_parameters);
  section.boolean("static_graph", shard.static_graph);
  // A key may have changed the mode; then the slots that the preset chose for its own mode do not apply.
  if (shard.reduce == ReduceWhen::last && !section.has("grad_slots")) shard.grad_slots = ShardPlan{}.grad_slots;
  if (keeps_gathered(shard) && !section.has("slots")) shard.slots = ShardPlan{}.slots;
  shard.reduction = section.choice("reduction", 0, {"average", "sum"}) == 0 ? Reduction::average : Reduction::sum;
}

}  // namespace stepgraph
