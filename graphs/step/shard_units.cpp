#include "graphs/step/shard_units.hpp"

#include <algorithm>
#include <charconv>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"
#include "graphs/models/weights.hpp"

namespace stepgraph {
namespace {

// "a divisor of 4: 2 or 4". A group of one rank would shard nothing.
std::string divisors_text(int number) {
  std::vector<int> divisors;
  for (int i = 2; i <= number; ++i) {
    if (number % i == 0) divisors.push_back(i);
  }
  if (divisors.empty()) return "1";
  std::string text = str("a divisor of ", number, ": ");
  for (std::size_t i = 0; i < divisors.size(); ++i) {
    text += str(i == 0 ? "" : i + 1 == divisors.size() ? " or " : ", ", divisors[i]);
  }
  return text;
}

// Blocks of one stage that are one unit.
struct UnitBlocks {
  std::string name;
  std::vector<std::size_t> blocks;
};

[[noreturn]] void refuse_units(const ShardPlan& plan, const std::string& why) {
  throw Error(ErrorKind::config, str("shard.units: '", plan.units, "' ", why));
}

std::int64_t num_parameters(const Block& block) {
  std::int64_t sum = 0;
  for (const WeightSpec& weight : block.weights) sum += num_elements(weight.shape);
  return sum;
}

std::string joined_name(const Model& model, const std::vector<std::size_t>& blocks) {
  const std::string& first = model.blocks[blocks.front()].name;
  return blocks.size() == 1 ? first : str(first, " to ", model.blocks[blocks.back()].name);
}

std::int64_t least_params(const ShardPlan& plan) {
  const std::string text  = plan.units.substr(7);
  std::int64_t least      = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), least);
  if (error != std::errc() || end != text.data() + text.size() || least < 1)
    refuse_units(plan, "is not params:N with N of at least 1 (for example params:1000000)");
  return least;
}

void check_units_text(const ShardPlan& plan) {
  if (plan.unit_of || plan.units == "layer" || plan.units == "model") return;
  if (plan.units.starts_with("params:")) {
    static_cast<void>(least_params(plan));
  } else if (!plan.units.starts_with("type:") || plan.units.size() == 5) {
    refuse_units(plan, "is unknown (layer, model, params:N or type:NAME)");
  }
}

// A name for each block. Neighbouring blocks with the same name are one unit; an empty name is a unit of its own.
std::vector<std::string> chosen_names(const Model& model, const ShardPlan& plan,
                                      const std::vector<std::size_t>& blocks) {
  std::vector<std::string> names;
  if (plan.unit_of) {
    for (const std::size_t block : blocks) names.push_back(plan.unit_of(model.blocks[block]));
  } else if (plan.units == "layer") {
    names.resize(blocks.size());
  } else if (plan.units == "model") {
    names.assign(blocks.size(), joined_name(model, blocks));
  } else if (plan.units.starts_with("type:")) {
    const std::string_view type = std::string_view(plan.units).substr(5);
    int run                     = 0;
    for (const std::size_t block : blocks) {
      const bool is_type = model.blocks[block].name.starts_with(type);
      run += is_type;
      names.push_back(is_type ? std::string() : str("beside ", type, " ", run));
    }
  } else if (plan.units.starts_with("params:")) {
    const std::int64_t least = least_params(plan);
    std::int64_t sum         = 0;
    int run                  = 0;
    for (const std::size_t block : blocks) {
      names.push_back(str("run ", run));
      sum += num_parameters(model.blocks[block]);
      if (sum < least) continue;
      sum = 0;
      ++run;
    }
  }
  return names;
}

std::vector<UnitBlocks> units_of_stage(const Model& model, const ShardPlan& plan,
                                       const std::vector<std::size_t>& blocks) {
  std::vector<UnitBlocks> units;
  const std::vector<std::string> names = chosen_names(model, plan, blocks);
  std::set<std::string> seen;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const bool goes_on = i > 0 && !names[i].empty() && names[i] == names[i - 1];
    if (!goes_on && !names[i].empty() && !seen.insert(names[i]).second) {
      throw Error(ErrorKind::config, str("shard.units: unit '", names[i], "' has block '", model.blocks[blocks[i]].name,
                                         "', but not the block before it (units of consecutive blocks; nested units "
                                         "are not supported)"));
    }
    if (!goes_on) units.emplace_back();
    units.back().blocks.push_back(blocks[i]);
  }
  for (UnitBlocks& unit : units) unit.name = joined_name(model, unit.blocks);
  return units;
}

// Tensor-parallel ranks that hold the same elements sum their gradients. They must then keep the same shards.
bool is_joint(const WeightSpec& weight, const LayoutSpec& layout) {
  if (layout.tp == 1) return false;
  if (!weight.cut) return layout.sequence_parallel;
  const auto pieces = tp_pieces(weight, layout.tp, 0);
  return std::any_of(pieces.begin(), pieces.end(), [](const TpPiece& piece) { return piece.num_holders > 1; });
}

// Blocks of whole rows.
std::int64_t rows_block(const TensorShape& shape, int members) {
  if (shape[0] == 0) return 0;
  return (shape[0] + members - 1) / members * (num_elements(shape) / shape[0]);
}

}  // namespace

IndexRange ShardedWeight::range(int member) const noexcept {
  const std::int64_t begin = std::clamp(member * block_elements - lead, std::int64_t{0}, elements);
  return {begin, std::clamp((member + 1) * block_elements - lead, begin, elements)};
}

bool ShardedWeight::is_even() const noexcept {
  if (num_members == 1 || elements == 0) return true;
  return lead == 0 && block_elements * num_members == elements;
}

ShardGroup shard_group(const Plan& plan, int dp_index) {
  if (plan.shard.strategy == Shard::none) return {.replica = dp_index};
  const int size = plan.shard.strategy == Shard::hybrid ? plan.shard.group : plan.layout.dp;
  return {.size = size, .member = dp_index % size, .replica = dp_index / size};
}

std::vector<ShardUnit> shard_units(const Model& model, const Plan& plan,
                                   const std::vector<std::vector<std::size_t>>& blocks_of_stage, int tp_index) {
  std::vector<ShardUnit> units;
  const int members = shard_group(plan, 0).size, tp = plan.layout.tp;
  if (members == 1) return units;
  std::map<std::string, std::pair<std::int64_t, std::int64_t>> cut_of;  // by name, of weights that are not tied
  const auto spec_of = [&](const ShardedWeight& weight) -> const WeightSpec& {
    return model.blocks[weight.block].weights[weight.number];
  };
  for (std::size_t stage = 0; stage < blocks_of_stage.size(); ++stage) {
    for (const UnitBlocks& blocks : units_of_stage(model, plan.shard, blocks_of_stage[stage])) {
      ShardUnit unit{.name = blocks.name, .stage = Stage{static_cast<int>(stage)}};
      if (blocks.blocks.size() == 1) unit.layer = model.blocks[blocks.blocks.front()].layer;
      for (const std::size_t block : blocks.blocks) {
        const auto& specs = model.blocks[block].weights;
        for (std::size_t number = 0; number < specs.size(); ++number) {
          if (num_elements(specs[number].shape) < plan.shard.min_params) continue;
          if (specs[number].norm && plan.precision.norm_type() != plan.precision.param) continue;
          const std::int64_t elements = num_elements(local_shape(specs[number], tp, tp_index));
          const bool flat = plan.shard.flat && specs[number].tied_to.empty() && !is_joint(specs[number], plan.layout);
          unit.weights.push_back(
              {.block = block, .number = number, .elements = elements, .flat = flat, .num_members = members});
        }
      }
      if (unit.weights.empty()) continue;
      for (ShardedWeight& weight : unit.weights) {
        if (!weight.flat) continue;
        weight.offset = unit.elements;
        unit.elements += weight.elements;
      }
      if (unit.elements > 0) {
        unit.flat     = FlatShards(unit.elements, members);
        unit.elements = unit.flat->padded_elements();
      }
      for (ShardedWeight& weight : unit.weights) {
        const WeightSpec& spec = spec_of(weight);
        if (weight.flat) {
          weight.block_elements = unit.flat->shard_elements();
          weight.lead           = weight.offset;
        } else {
          weight.offset = unit.elements;
          unit.elements += weight.elements;
          if (spec.tied_to.empty()) weight.block_elements = rows_block(local_shape(spec, tp, tp_index), members);
        }
        if (spec.tied_to.empty()) cut_of[spec.name] = {weight.block_elements, weight.lead};
      }
      units.push_back(std::move(unit));
    }
  }
  for (ShardUnit& unit : units) {
    for (ShardedWeight& weight : unit.weights) {
      if (!spec_of(weight).tied_to.empty())
        std::tie(weight.block_elements, weight.lead) = cut_of.at(spec_of(weight).tied_to);
    }
  }
  return units;
}

void check_units(const Model& model, const ShardPlan& plan) {
  if (!plan.units.starts_with("type:") || plan.unit_of) return;
  const std::string_view type = std::string_view(plan.units).substr(5);
  const auto& blocks          = model.blocks;
  if (std::any_of(blocks.begin(), blocks.end(), [&](const Block& block) { return block.name.starts_with(type); }))
    return;
  refuse_units(plan, str("matches no block (blocks are ",
                         join_text(blocks, ", ", [](const Block& block) { return block.name; }), ")"));
}

void check_shard_plan(const Plan& plan) {
  const ShardPlan& shard = plan.shard;
  const auto refuse      = [](const std::string& why) { throw Error(ErrorKind::config, "shard." + why); };
  const bool cuts_values = shards_weights(shard.strategy);
  check_units_text(shard);
  if (shard.slots < 1) refuse(str("slots: ", shard.slots, " (at least 1)"));
  if (shard.grad_slots < 1) refuse(str("grad_slots: ", shard.grad_slots, " (at least 1)"));
  if (shard.min_params < 0) refuse(str("min_params: ", shard.min_params, " (at least 0)"));
  if (!(shard.bucket_mb > 0)) refuse(str("bucket_mb: ", shard.bucket_mb, " (more than 0)"));
  if (!(shard.first_bucket_mb >= 0)) refuse(str("first_bucket_mb: ", shard.first_bucket_mb, " (at least 0)"));
  if (shard.reduction != Reduction::average && shard.reduction != Reduction::sum) {
    refuse(str("reduction: ", to_string(shard.reduction), " (average or sum)"));
  }
  if (shard.strategy == Shard::hybrid) {
    if (shard.group == 0) {
      refuse(str("group: missing with strategy hybrid (number of ranks that share one copy of the weights; ",
                 divisors_text(plan.layout.dp), ")"));
    }
    if (shard.group < 0 || plan.layout.dp % shard.group != 0) {
      refuse(str("group: ", shard.group, " ranks do not divide layout.dp, ", plan.layout.dp, " (",
                 divisors_text(plan.layout.dp), ")"));
    }
    if (shard.group == 1 && plan.layout.dp > 1) {
      refuse(
          str("group: 1 with strategy hybrid shards nothing (", divisors_text(plan.layout.dp), "; or strategy none)"));
    }
  } else if (shard.group != 0) {
    refuse(str("group: ", shard.group, " has no effect with strategy ", to_string(shard.strategy),
               " (0, or strategy hybrid)"));
  }
  if (shard.reduce == ReduceWhen::each && (shard.strategy == Shard::none || shard.strategy == Shard::zero1)) {
    refuse(str("reduce: each with strategy ", to_string(shard.strategy),
               ", which does not shard gradients (reduce last, or strategy grad_op, full or hybrid)"));
  }
  const auto needs_cut_values = [&](const char* key, bool given) {
    if (given && !cuts_values) {
      refuse(str(key, ": has no effect with strategy ", to_string(shard.strategy),
                 ", which does not shard weights (strategy full or hybrid)"));
    }
  };
  needs_cut_values("reshard_after_forward", !shard.reshard_after_forward);
  needs_cut_values("reshard_group", shard.reshard_group != 0);
  needs_cut_values("keep_between_microbatches", shard.keep_between_microbatches);
  if (shard.keep_between_microbatches && !shard.reshard_after_forward) {
    refuse("keep_between_microbatches: true has no effect with reshard_after_forward false (change only one of them)");
  }
  const int members = shard_group(plan, 0).size;
  if (shard.reshard_group != 0 && (shard.reshard_group < 2 || members % shard.reshard_group != 0)) {
    refuse(str("reshard_group: ", shard.reshard_group, " ranks do not divide a shard group of ", members,
               " (0, or a divisor of at least 2)"));
  }
  if (shard.reshard_group != 0 && (!shard.reshard_after_forward || shard.keep_between_microbatches)) {
    refuse(str("reshard_group: ", shard.reshard_group,
               " has no effect while weights stay gathered (0, or reshard_after_forward true and "
               "keep_between_microbatches false)"));
  }
}

}  // namespace stepgraph
