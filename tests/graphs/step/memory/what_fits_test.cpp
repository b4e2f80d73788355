#include "graphs/step/memory/what_fits.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <regex>
#include <sstream>

#include "engine/base/error.hpp"
#include "engine/base/text.hpp"
#include "graphs/config/config.hpp"
#include "graphs/step/builder/build_step.hpp"
#include "graphs/step/memory/changes.hpp"
#include "graphs/step/memory/limits.hpp"
#include "graphs/step/training_step.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/variable.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Settings = std::vector<std::string>;

namespace {

// AVX-512 pads each head to 32 elements in the workspaces of attention, so more and shorter heads would need more there.
constexpr const char* small = R"({"model": {"kind": "gpt2", "layers": 2, "width": 32, "heads": 2, "context": 32,
  "vocab": 64}, "data": {"synthetic": 1}, "batch": {"global": 8, "micro": 4, "seq": 32}})";

sg::Model model_of(const sg::Config& config) { return sg::gpt2(std::get<sg::Gpt2Spec>(config.model)); }

sg::StepGraph step_of(const Settings& settings) {
  const sg::Config config = sg::parse_config(small, settings);
  return sg::training_step(model_of(config), config.plan, config.batch);
}

// By space, of the rank that needs most.
sg::PlannedNeed need_of(const Settings& settings) {
  const sg::StepGraph step = step_of(settings);
  const auto reuse         = sg::parse_config(small, settings).plan.reuse;
  return sg::need_of(step.graph, sg::planned_sizes(step.graph, {.reuse = reuse}));
}

std::string refusal(const Settings& settings) {
  try {
    static_cast<void>(step_of(settings));
    return {};
  } catch (const sg::Error& error) {
    CHECK(error.kind() == sg::ErrorKind::config);
    return error.what();
  }
}

Settings operator+(Settings a, const Settings& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// All that a message offers: what is in its last parentheses before "of the tried settings".
std::vector<Settings> offers_of(const std::string& refusal, const std::string& folder) {
  static const std::regex offer(
      R"((?:\(|, |or )([a-z_]+(?:\.[a-z_]+)?=[^ (),]+(?: [a-z_.]+=[^ (),]+)*)(?= needs|\)|;|,|$))");
  std::vector<Settings> out;
  const std::string text = refusal.substr(0, refusal.find("; of the tried settings"));
  for (std::sregex_iterator found(text.begin(), text.end(), offer), end; found != end; ++found) {
    std::istringstream words((*found)[1]);
    out.emplace_back();
    for (std::string word; words >> word;)
      out.back().push_back(word == "offload.disk=FOLDER" ? "offload.disk=" + folder : word);
  }
  return out;
}

std::string bytes(const char* key, double value) { return sg::str(key, "=", static_cast<std::int64_t>(value)); }

}  // namespace

TEST_CASE("a step with every offer of its refusal is accepted", "[graphs][memory][offload]") {
  const sg::testing::TempFolder folder;
  const Settings layout = GENERATE(Settings{}, Settings{"layout.pp=2"});
  if (sg::testing::sanitized() && !layout.empty()) return;
  const auto device = static_cast<double>(need_of(layout).device);
  const Settings classes{"offload.optimizer=true", "offload.grads=true", "offload.activations=true"};
  const auto host     = static_cast<double>(need_of(layout + classes).host);
  const Settings disk = {"offload.disk=" + folder.path().string()};
  // Settings, and the start of the message.
  const std::vector<std::pair<Settings, std::string>> cases{
      {{bytes("memory.limit_bytes", 0.7 * device)}, "memory.limit_bytes: rank "},
      {{bytes("memory.limit_bytes", 0.7 * device), bytes("offload.device_bytes", 0.8 * device)}, "memory.limit_bytes"},
      {{bytes("offload.device_bytes", 0.9 * device)}, "offload.device_bytes: rank "},
      {{bytes("offload.device_bytes", 0.4 * device), "offload.optimizer=true"}, "offload.device_bytes: rank "},
      {{bytes("offload.device_bytes", 0.5 * device), "offload.strategy=conservative"},
       "offload.strategy: conservative"},
      {{bytes("offload.device_bytes", 0.1 * device), "offload.strategy=extreme"}, "offload.strategy: extreme"},
      {{bytes("memory.limit_bytes", 0.45 * device), "recompute=auto"}, "recompute: auto finds no choice that fits"},
      {classes + Settings{bytes("offload.host_bytes", 0.5 * host)}, "offload.host_bytes: rank "},
      {classes + disk + Settings{bytes("offload.host_bytes", 0.5 * host), bytes("offload.disk_bytes", 0.2 * host)},
       "offload.disk_bytes: rank "},
  };
  int num_offers = 0, seen = 0;
  for (const auto& [settings, start] : cases) {
    if (sg::testing::left_out(seen, 2)) continue;
    const std::string text = refusal(layout + settings);
    CAPTURE(layout, settings, text);
    CHECK(text.starts_with(start));
    const auto offers = offers_of(text, folder.path().string());
    CHECK_FALSE(offers.empty());
    for (const Settings& offer : offers) {
      CAPTURE(offer);
      CHECK(refusal(layout + settings + offer) == "");
      ++num_offers;
    }
  }
  if (!sg::testing::sanitized()) CHECK(num_offers >= 15);
}

TEST_CASE("a refusal says what the step needs without budgets", "[graphs][memory][offload]") {
  const std::int64_t whole = need_of({}).device;
  const std::string text   = sg::str("; without budgets it needs ", sg::bytes_and_text(whole), " (");
  const auto less = [&](double share) { return bytes("offload.device_bytes", share * static_cast<double>(whole)); };
  CHECK_THAT(refusal({"offload.strategy=conservative", less(0.5)}), ContainsSubstring(text));
  CHECK_THAT(refusal({"offload.strategy=extreme", less(0.1)}), ContainsSubstring(text));
  CHECK_THAT(refusal({"recompute=auto", less(0.3)}), ContainsSubstring(text));
  // Nothing is chosen: the message has these bytes already.
  CHECK_THAT(refusal({less(0.5)}), ContainsSubstring(sg::str(" needs ", sg::bytes_and_text(whole), ": parameters ")) &&
                                       !ContainsSubstring("without budgets"));
  const Settings moves{"offload.optimizer=true"};
  const std::int64_t host = need_of(moves).host;
  CHECK_THAT(refusal(moves + Settings{"offload.host_bytes=64KiB"}),
             ContainsSubstring(sg::str("without budgets it needs ", sg::bytes_and_text(host))));
}

TEST_CASE("a refusal offers host memory where more of it would help", "[graphs][memory][offload]") {
  const sg::testing::TempFolder folder;
  const auto device = static_cast<double>(need_of({}).device);
  const Settings disk{"offload.disk=" + folder.path().string()};
  // Settings, and what the message says beside its offers.
  const std::vector<std::pair<Settings, std::string>> cases{
      {{"offload.activations=true", "offload.optimizer=true", bytes("offload.device_bytes", 0.85 * device),
        "offload.host_bytes=64KiB"},
       "offload.host_bytes: rank 0 needs at least "},
      {{"offload.strategy=aggressive", bytes("offload.device_bytes", 0.8 * device), "offload.host_bytes=32KiB"},
       "aggressive moves at most 0.8 of what may be offloaded, and offload.host_bytes 32768 (32 KiB) has room for less "
       "of it: rank 0 then needs "},
      {{"offload.strategy=extreme", bytes("offload.device_bytes", 0.8 * device), "offload.host_bytes=32KiB"},
       "extreme can move all of what may be offloaded, and offload.host_bytes 32768 (32 KiB) has room for less of "
       "it: rank 0 then needs "},
      {disk + Settings{"offload.optimizer=true", "offload.host_bytes=64KiB", "offload.disk_bytes=1KiB"},
       "offload.disk_bytes: rank 0 needs "},
  };
  int seen = 0;
  for (const auto& [settings, start] : cases) {
    if (seen++ == 1 && sg::testing::sanitized()) continue;  // aggressive: the same code as the next
    const std::string text = refusal(settings);
    CAPTURE(settings, text);
    CHECK_THAT(text, ContainsSubstring(start) && !ContainsSubstring("needs 0 (0 B)"));
    int num_host = 0;
    for (const Settings& offer : offers_of(text, folder.path().string())) {
      CAPTURE(offer);
      CHECK(refusal(settings + offer) == "");
      num_host += std::ranges::any_of(offer, [](const auto& each) { return each.starts_with("offload.host_bytes="); });
    }
    CHECK(num_host == 1);
  }
  if (sg::testing::sanitized()) return;
  CHECK_THAT(
      refusal({"offload.strategy=extreme", bytes("offload.device_bytes", 0.95 * device), "offload.host_bytes=32KiB"}),
      ContainsSubstring("offload.disk=FOLDER"));
}

TEST_CASE("budgets are enlarged together where one would still be too small", "[graphs][memory]") {
  sg::Change both{.settings = {}, .plan = {.memory_limit_bytes = 10}, .batch = {}};
  both.plan.offload.device_bytes = 20;
  sg::Change one                 = both;
  CHECK(sg::enlarge_budget(both, "memory.limit_bytes", 30));
  CHECK(both.settings == Settings{"memory.limit_bytes=30", "offload.device_bytes=30"});
  CHECK(sg::device_limit(both.plan).bytes == 30);
  CHECK(sg::enlarge_budget(both, "offload.device_bytes", 40));
  CHECK(both.settings == Settings{"memory.limit_bytes=40", "offload.device_bytes=40"});
  CHECK(sg::enlarge_budget(one, "memory.limit_bytes", 15));
  CHECK(one.settings == Settings{"memory.limit_bytes=15"});
  CHECK_FALSE(sg::enlarge_budget(one, "the memory of the device", 15));
}

TEST_CASE("amounts that were chosen for one plan are not used for the changes", "[graphs][memory][offload]") {
  const std::int64_t whole = need_of({}).device;
  const Settings settings{"offload.strategy=conservative",
                          bytes("offload.device_bytes", 0.8 * static_cast<double>(whole))};
  const sg::Config config = sg::parse_config(small, settings);
  // As if another process had chosen that nothing moves.
  const sg::StepOptions chosen{.offload_of = {{sg::Rank{0}, {}}}};
  std::string text;
  try {
    static_cast<void>(sg::training_step(model_of(config), config.plan, config.batch, chosen));
  } catch (const sg::Error& error) {
    text = error.what();
  }
  CHECK_THAT(text, ContainsSubstring("(offload.strategy=balanced needs "));
}

TEST_CASE("a disk is offered also without a folder for temporary files", "[graphs][memory][offload]") {
  const Settings moves{"offload.optimizer=true", "offload.grads=true"};
  const auto host = static_cast<double>(need_of(moves).host);
  const sg::testing::Variable none("TMPDIR", "/there/is/no/such/folder");
  CHECK_THAT(refusal(moves + Settings{bytes("offload.host_bytes", 0.5 * host)}),
             ContainsSubstring("(offload.disk=FOLDER needs "));
}

namespace {

// A refusal, and what was built to find what would fit.
struct Search {
  std::string refusal = {};
  double built        = 0;  // nodes
  int steps           = 0;
};
Search search_of(const Settings& settings) {
  const sg::Config config      = sg::parse_config(small, settings);
  const sg::Model model        = model_of(config);
  sg::Plan unlimited           = config.plan;
  unlimited.memory_limit_bytes = 0;
  Search search;
  const auto build = [&](const sg::Plan& plan, const sg::BatchSpec& batch) {
    sg::StepGraph step = sg::training_step(model, plan, batch);
    search.built += step.graph.num_nodes();
    return step;
  };
  const sg::StepGraph step = sg::training_step(model, unlimited, config.batch);
  try {
    sg::check_memory_limit(step, config.plan, build);
  } catch (const sg::Error& error) {
    search.refusal = error.what();
  }
  return search;
}

// Of steps that never fit, though the slices of their ranks do. 5040 has 60 divisors: as many sizes of a microbatch, of
// which the small ones make large steps.
Search search_in_vain(sg::FitSearch search) {
  Search out;
  search.batch      = {.global = 5040, .micro = 2520, .seq = 1};
  const auto builds = [&](double multiple) {
    return [&out, &search, multiple](const sg::Plan& plan, const sg::BatchSpec& batch) {
      const bool chooses = sg::chooses_offload(plan, true);
      const double nodes = static_cast<double>(search.num_nodes) * search.batch.micro / batch.micro *
                           (multiple + (chooses ? 10 * search.of_a_slice : 0));
      out.built += nodes;
      ++out.steps;
      const std::int64_t limit = sg::device_limit(plan).bytes;
      if (search.num_nodes == 0 && limit == 0) throw sg::Error(sg::ErrorKind::config, "it cannot be built");
      return sg::PlannedNeed{.device = multiple == 1 ? limit + 1 : 0, .num_nodes = static_cast<std::int64_t>(nodes)};
    };
  };
  search.whole = builds(1);
  if (search.of_a_slice != 1) search.slices = builds(search.of_a_slice);
  const sg::DoesNotFit refused(std::string(sg::device_limit(search.plan).key), 2000, "refused");
  out.refusal = sg::explained(refused, search).what();
  return out;
}

}  // namespace

TEST_CASE("the search for a change that fits is bounded, and the message names the rest", "[graphs][memory]") {
  const Search search = search_of({"batch.global=5040", "batch.micro=2520", "batch.seq=1", "memory.limit_bytes=1000"});
  CHECK_THAT(search.refusal, ContainsSubstring(" more settings, from ") &&
                                 ContainsSubstring(" on, would take too long to try; other ways: a larger layout.tp"));
  CHECK(search.built > sg::FitSearch::most_nodes / 3);
  CHECK(search.built <= 1.1 * sg::FitSearch::most_nodes);
}

TEST_CASE("the search counts larger budgets, slices and choices", "[graphs][memory][offload]") {
  const auto strategy = GENERATE(sg::OffloadStrategy::manual, sg::OffloadStrategy::conservative);
  const bool has_all  = GENERATE(true, false);
  CAPTURE(strategy, has_all);
  const sg::Plan plan{.offload = {.strategy = strategy, .device_bytes = 1000}};
  const Search search = search_in_vain(
      {.plan = plan, .has_all = has_all, .of_a_slice = has_all ? 0.25 : 2, .num_nodes = has_all ? 4000 : 1000});
  CHECK_THAT(search.refusal, ContainsSubstring(" would take too long to try"));
  CHECK(search.built > sg::FitSearch::most_nodes / 3);
  CHECK(search.built <= 1.1 * sg::FitSearch::most_nodes);
}

TEST_CASE("the search ends also if the number of nodes is not known", "[graphs][memory]") {
  const Search search = search_in_vain({.plan = {.memory_limit_bytes = 1000}});
  CHECK_THAT(search.refusal, ContainsSubstring(" would take too long to try"));
  CHECK(search.steps == 1 + sg::FitSearch::most_tried);  // and the step without budgets
}

TEST_CASE("one change that would take too long is not tried", "[graphs][memory]") {
  // 10007 is prime: after microbatches of 10007 sequences come those of 2.
  const Search search =
      search_of({"batch.global=20014", "batch.micro=10007", "batch.seq=1", "memory.limit_bytes=1000"});
  CHECK_THAT(search.refusal, ContainsSubstring(" more settings, from batch.micro=2 on, would take too long to try"));
  CHECK(search.built < 10'000);
}

TEST_CASE("slices are weighed against the ranks of this process", "[graphs][memory]") {
  const sg::Config config = sg::parse_config(small, Settings{"layout.dp=2", "layout.tp=2", "layout.pp=2"});
  const auto with         = [&](int num_own) {
    return sg::search_with(model_of(config), config.plan, config.batch, {}, {}, num_own);
  };
  CHECK(with(8).has_all);
  CHECK(with(8).of_a_slice == 0.25);
  CHECK_FALSE(with(1).has_all);
  CHECK(with(1).of_a_slice == 2);
}
