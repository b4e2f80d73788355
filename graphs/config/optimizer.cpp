#include <limits>

#include "engine/base/error.hpp"
#include "graphs/config/sections.hpp"

namespace stepgraph {
namespace {

using Names = ConfigReader::Names;

// What other libraries call them.
constexpr ConfigReader::OtherName optimizers_elsewhere[] = {{"adam", "\"adamw\" with optimizer.weight_decay 0"}};
constexpr ConfigReader::OtherName schedules_elsewhere[]  = {
     {"warmupstabledecay", "\"wsd\""},
     {"constantwithwarmup", "\"constant\" with optimizer.schedule.warmup"},
     {"cosinewithminlr", "\"cosine\""},
     {"none", "\"constant\""},
};

void read_schedule(const ConfigReader& optimizer, RateSchedule& schedule) {
  constexpr auto most        = std::numeric_limits<std::int64_t>::max() / 4;
  const ConfigReader section = optimizer.section("schedule", {"kind", "warmup", "decay", "steps", "min"});
  schedule.kind              = read_enum(section, "kind", RateKind::constant, RateKind::wsd, schedules_elsewhere);
  section.integer("warmup", schedule.warmup, 0, most);
  section.integer("decay", schedule.decay, 0, most);
  section.integer("steps", schedule.steps, 0, most);
  section.real("min", schedule.min, not_negative);
  check_rate_schedule(schedule);
}

void read_groups(const ConfigReader& optimizer, const JsonValue* value, std::vector<OptimizerGroup>& groups) {
  constexpr std::string_view example = R"([{"match": "*.bias", "weight_decay": 0}])";
  const JsonValue* list              = value ? value->find("groups") : nullptr;
  if (!list) return;
  if (!list->is_list()) optimizer.refuse("groups", str(excerpt(*list), " is not a list (", example, ")"));
  for (std::size_t i = 0; i < list->size(); ++i) {
    const ConfigReader section(&(*list)[i], str(optimizer.path("groups"), "[", i, "]"),
                               {"match", "lr", "weight_decay"});
    OptimizerGroup group;
    section.required("match", "a pattern of names of tensors: \"*.bias\"");
    section.text("match", group.match);
    if (section.has("lr")) section.real("lr", group.lr.emplace(), not_negative);
    if (section.has("weight_decay")) section.real("weight_decay", group.weight_decay.emplace(), not_negative);
    if (!group.lr && !group.weight_decay)
      section.refuse("match", str("'", group.match, "' has neither lr nor weight_decay (at least one of them)"));
    groups.push_back(std::move(group));
  }
}

}  // namespace

void read_optimizer(const ConfigReader& root, const JsonValue* value, OptimizerPlan& optimizer) {
  const Names common{"kind", "lr", "weight_decay", "clip", "schedule", "groups"}, adamw{"beta1", "beta2", "eps"},
      sgd{"momentum"};
  Names known = common;
  known.insert(known.end(), adamw.begin(), adamw.end());
  known.insert(known.end(), sgd.begin(), sgd.end());
  const ConfigReader section = root.section("optimizer", known);
  const bool is_sgd          = section.choice("kind", 0, {"adamw", "sgd"}, {}, optimizers_elsewhere) == 1;
  optimizer.kind             = is_sgd ? OptimizerKind::sgd : OptimizerKind::adamw;
  Names own                  = common;
  own.insert(own.end(), is_sgd ? sgd.begin() : adamw.begin(), is_sgd ? sgd.end() : adamw.end());
  for (const std::string_view other : is_sgd ? adamw : sgd) {
    if (value && value->find(other))
      section.refuse(other, str("not a key of ", is_sgd ? "sgd" : "adamw", " (", list_names(own), ")"));
  }
  section.real("lr", optimizer.lr, not_negative);
  section.real("beta1", optimizer.beta1, share);
  section.real("beta2", optimizer.beta2, share);
  section.real("eps", optimizer.eps, positive);
  section.real("momentum", optimizer.momentum, share);
  section.real("weight_decay", optimizer.weight_decay, not_negative);
  section.real("clip", optimizer.clip, not_negative);
  read_schedule(section, optimizer.schedule);
  read_groups(section, value, optimizer.groups);
}

}  // namespace stepgraph
