#include "graphs/step/memory/what_fits.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "engine/base/size.hpp"
#include "engine/base/text.hpp"
#include "engine/base/words.hpp"
#include "graphs/step/builder/build_step.hpp"
#include "graphs/step/memory/changes.hpp"
#include "graphs/step/memory_limit.hpp"

namespace stepgraph {
namespace {

// The plan without budgets, and without the choices that they drive.
Plan without_budgets(Plan plan) {
  if (plan.offload.strategy != OffloadStrategy::manual) plan.offload = {};
  if (plan.recompute == Recompute::automatic) plan.recompute = Recompute::none;
  plan.memory_limit_bytes = plan.offload.device_bytes = plan.offload.host_bytes = plan.offload.disk_bytes = 0;
  plan.offload.disk                                                                                       = {};
  return plan;
}

bool drive_choices(const Plan& plan, bool trains) {
  return chooses_offload(plan, trains) || plan.offload.host_bytes > 0;
}

constexpr std::string_view host_key = "offload.host_bytes";

std::int64_t need_for(std::string_view key, const PlannedNeed& need) {
  return key == host_key ? need.host : key == "offload.disk_bytes" ? need.disk : need.device;
}

// Tries changes and counts what was built.
class Trials {
 public:
  // `built`: nodes that were built before.
  Trials(const FitSearch& search, std::int64_t num_nodes, std::int64_t built)
      : search_(search), num_nodes_(static_cast<double>(num_nodes)), built_(static_cast<double>(built)) {
    uses_slices_ = search.slices && (!search.has_all || (search.of_a_slice < 1 && num_nodes_ > FitSearch::large));
  }

  // The first change is always tried.
  [[nodiscard]] bool may_try(const Change& change) const { return num_tried_ == 0 || may_build(change); }
  [[nodiscard]] bool may_build(const Change& change) const {
    return num_tried_ < FitSearch::most_tried && built_ + reserved_ + most_of(change) <= FitSearch::most_nodes;
  }
  // Changes that are tried before `release` leave so much that this one can be tried afterwards.
  void reserve_for(const Change& change) { reserved_ = most_of(change); }
  void release() { reserved_ = 0; }

  // Throws DoesNotFit, or Error if the step cannot be built: a schedule can require another number of microbatches.
  PlannedNeed attempt(const Change& change) {
    ++num_tried_;
    return build(change);
  }
  // The same for a question that is no offer.
  PlannedNeed build(const Change& change) {
    if (uses_slices_) {
      built_ += slices_of(change);
      check_need(search_.slices(change.plan, change.batch), change.plan);
    }
    built_ += whole_of(change);
    const PlannedNeed need = search_.whole(change.plan, change.batch);
    check_need(need, change.plan);
    return need;
  }

 private:
  // Nodes as a multiple of those of the step that does not fit. Each microbatch has the same nodes; recomputation adds
  // some. A choice builds the slice of a rank several times.
  [[nodiscard]] double nodes_of(const Change& change, double multiple) const {
    constexpr double recomputed = 1.3, slices_of_choice = 10;
    const double more = chooses_offload(change.plan, search_.trains) ? slices_of_choice * search_.of_a_slice : 0;
    return recomputed * num_nodes_ * search_.batch.micro / std::max(change.batch.micro, 1) * (multiple + more);
  }
  [[nodiscard]] double slices_of(const Change& change) const { return nodes_of(change, search_.of_a_slice); }
  [[nodiscard]] double whole_of(const Change& change) const { return nodes_of(change, 1); }
  // If its slices fit.
  [[nodiscard]] double most_of(const Change& change) const {
    return whole_of(change) + (uses_slices_ ? slices_of(change) : 0);
  }

  const FitSearch& search_;
  double num_nodes_;
  double built_;
  double reserved_  = 0;
  bool uses_slices_ = false;
  int num_tried_    = 0;
};

// What was found so far.
class Offers {
 public:
  explicit Offers(const DoesNotFit& refused) : key_(refused.key()), least_bytes_(refused.needed_bytes()) {}

  // Another value of a key that is offered already, or more settings than are needed, is not worth a line.
  [[nodiscard]] bool is_like_another(const Change& change) const {
    return std::any_of(change.settings.begin(), change.settings.end(), [&](const std::string& setting) {
      return keys_.contains(setting.substr(0, setting.find('=')));
    });
  }
  void add(const Change& change, const PlannedNeed& need) {
    for (const std::string& setting : change.settings) keys_.insert(setting.substr(0, setting.find('=')));
    const std::int64_t needed = need_for(key_, need);
    texts_.push_back(needed > 0 ? str(settings_text(change), " needs ", bytes_and_text(needed))
                                : settings_text(change));
  }
  void add_larger_budget(const Change& change) { texts_.push_back(settings_text(change)); }
  void add_too_large(const Change& change, const DoesNotFit& error) {
    if (error.key() != key_ || error.needed_bytes() >= least_bytes_) return;
    least_bytes_ = error.needed_bytes();
    least_       = settings_text(change);
  }
  [[nodiscard]] std::size_t size() const { return texts_.size(); }
  [[nodiscard]] std::string least() const {
    return least_.empty() ? std::string("no tried setting needs less")
                          : str("of the tried settings ", least_, " needs the least, ", bytes_and_text(least_bytes_));
  }
  [[nodiscard]] std::string text() const {
    std::string out;
    for (std::size_t i = 0; i < texts_.size(); ++i)
      out += str(i == 0 ? "" : i + 1 == texts_.size() ? ", or " : ", ", texts_[i]);
    return out;
  }

 private:
  std::string key_;
  std::int64_t least_bytes_;
  std::string least_;
  std::set<std::string> keys_;  // of settings that are offered
  std::vector<std::string> texts_;
};

// The step was built, and the budgets of the device change nothing in it.
bool is_known(const DoesNotFit& refused, const FitSearch& search) {
  return refused.key() != "offload.host_bytes" && refused.key() != "offload.disk_bytes" && search.has_all &&
         !drive_choices(search.plan, search.trains);
}

// The host memory that a change uses if there is enough of it; none: it does not fit other budgets. These are enlarged
// so many times.
std::optional<std::int64_t> roomy_host(Change change, Trials& trials, int num_enlarged = 0) {
  change.plan.offload.host_bytes = 0;
  for (; num_enlarged >= 0 && trials.may_build(change); --num_enlarged) {
    try {
      return trials.build(change).host;
    } catch (const DoesNotFit& error) {
      if (!enlarge_budget(change, error.key(), error.needed_bytes())) return std::nullopt;
    } catch (const Error&) {
      return std::nullopt;
    }
  }
  return std::nullopt;
}

// The budgets with which the step fits as it is, from those of `change` on. Slices can need less than the whole step,
// and other ranks more than the rank that was refused. What a step needs of the host can grow with offload.host_bytes:
// with more of it more data is moved, or more updates run there.
std::optional<Change> larger_budget(Change change, const DoesNotFit& refused, Trials& trials) {
  constexpr int most_attempts = 5;
  std::map<std::string, std::int64_t> tried{{refused.key(), refused.needed_bytes()}};
  bool is_roomy = false;
  for (int attempt = 0; attempt < most_attempts; ++attempt) {
    if (attempt > 0 && !trials.may_try(change)) return std::nullopt;
    try {
      static_cast<void>(trials.attempt(change));
      return change;
    } catch (const DoesNotFit& error) {
      std::int64_t& bytes = tried[error.key()];
      bytes               = std::max(error.needed_bytes(), bytes + bytes / 64);
      if (error.key() == host_key && !is_roomy && change.plan.offload.disk.empty()) {
        bytes    = std::max(bytes, roomy_host(change, trials, 2).value_or(0));
        is_roomy = true;
      }
      if (!enlarge_budget(change, error.key(), bytes)) return std::nullopt;
    } catch (const Error&) {
      return std::nullopt;
    }
  }
  return std::nullopt;
}

// A larger offload.host_bytes, where another budget is too small because the host has too little room: more data stays
// on the device, or lies on disk.
std::optional<Change> more_host(const DoesNotFit& refused, const FitSearch& search, Trials& trials) {
  const OffloadPlan& offload = search.plan.offload;
  if (refused.key() == host_key || offload.host_bytes == 0 || !offload.moves_something()) return std::nullopt;
  Change change{.settings = {}, .plan = search.plan, .batch = search.batch};
  const std::optional<std::int64_t> host = roomy_host(change, trials);
  if (!host || *host <= offload.host_bytes || !enlarge_budget(change, host_key, *host)) return std::nullopt;
  return change;
}

// Tries the changes in their order. Returns which were left out.
std::string try_changes(const std::vector<Change>& all, Trials& trials, Offers& offers) {
  int after = 0;
  for (std::size_t i = 0; i < all.size() && after <= FitSearch::most_after; ++i) {
    if (offers.size() >= FitSearch::most_offers) break;
    if (offers.is_like_another(all[i])) continue;
    if (!trials.may_try(all[i])) {
      if (offers.size() > 0) break;
      const std::size_t left = all.size() - i;
      return str("; ", left, left == 1 ? " more setting, " : " more settings, from ", settings_text(all[i]),
                 left == 1 ? "," : " on,", " would take too long to try");
    }
    try {
      offers.add(all[i], trials.attempt(all[i]));
    } catch (const DoesNotFit& error) {
      offers.add_too_large(all[i], error);
    } catch (const Error&) {  // it cannot be built
    }
    after += offers.size() > 0;
  }
  return {};
}

// Without budgets; none: it cannot be built.
std::optional<PlannedNeed> need_without_budgets(const FitSearch& search) {
  try {
    return search.whole(without_budgets(search.plan), search.batch);
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::string what_fits(const DoesNotFit& refused, const FitSearch& search, Trials& trials) {
  Offers offers(refused);
  std::optional<Change> larger = Change{.settings = {}, .plan = search.plan, .batch = search.batch};
  if (!enlarge_budget(*larger, refused.key(), refused.needed_bytes())) larger.reset();
  const bool tries_larger = larger && !is_known(refused, search);
  if (tries_larger) trials.reserve_for(*larger);
  std::vector<Change> changes = changes_for(refused.key(), search.plan, search.batch, search.trains);
  if (const auto roomier = more_host(refused, search, trials)) changes.insert(changes.begin(), *roomier);
  const std::string left_out = try_changes(changes, trials, offers);
  trials.release();
  const bool fits = offers.size() > 0;
  if (tries_larger) larger = larger_budget(*larger, refused, trials);
  if (larger) offers.add_larger_budget(*larger);
  if (fits) return offers.text();
  return str(offers.size() > 0 ? str(offers.text(), "; ") : "", offers.least(), left_out,
             "; other ways: a larger layout.tp or layout.pp, a shorter batch.seq, a smaller model");
}

}  // namespace

PlannedNeed need_of(const Graph& graph, const PlannedSizes& sizes) {
  PlannedNeed need{.rank = graph.ranks()[0], .num_nodes = graph.num_nodes()};
  for (const Rank rank : graph.ranks()) {
    const std::int64_t device = sizes.device_bytes(rank);
    if (device > need.device) need.rank = rank;
    need.device = std::max(need.device, device);
    need.host   = std::max(need.host, sizes.arena(rank, Space::pinned));
    need.disk   = std::max(need.disk, sizes.arena(rank, Space::disk));
  }
  return need;
}

PlannedNeed need_of(std::span<const MemoryRequirement> requirements) {
  PlannedNeed need{.rank = largest(requirements).rank, .device = largest(requirements).peak_bytes};
  for (const MemoryRequirement& row : requirements) {
    need.host = std::max(need.host, row.host_bytes);
    need.disk = std::max(need.disk, row.disk_bytes);
    need.num_nodes += row.num_nodes;
  }
  return need;
}

void check_need(const PlannedNeed& need, const Plan& plan) {
  const auto check = [](std::string_view key, std::int64_t needed, std::int64_t budget, std::string_view where) {
    if (budget == 0 || needed <= budget) return;
    throw DoesNotFit(
        std::string(key), needed,
        str(key, ": a rank needs ", bytes_and_text(needed), " ", where, "; the budget is ", limit_and_text(budget)));
  };
  check("offload.host_bytes", need.host, plan.offload.host_bytes, "of host memory");
  check("offload.disk_bytes", need.disk, plan.offload.disk_bytes, "on disk");
  check(device_limit(plan).key, need.device, device_limit(plan).bytes, "of the device");
}

Error explained(const DoesNotFit& refused, const FitSearch& search) {
  std::int64_t num_nodes = search.num_nodes;
  std::int64_t built     = 0;
  std::string whole;
  if (num_nodes == 0 || drive_choices(search.plan, search.trains)) {
    const auto plain = need_without_budgets(search);
    if (plain) built = plain->num_nodes;
    if (num_nodes == 0) num_nodes = built;
    const std::int64_t bytes = plain ? need_for(refused.key(), *plain) : refused.needed_bytes();
    if (bytes != refused.needed_bytes() && bytes > 0) whole = str("; without budgets it needs ", bytes_and_text(bytes));
  }
  Trials trials(search, num_nodes, built);
  return {ErrorKind::config, str(refused.what(), whole, " (", what_fits(refused, search, trials), ")")};
}

}  // namespace stepgraph
