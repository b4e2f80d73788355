#include "graphs/step/memory/what_fits.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <regex>
#include <sstream>

#include "engine/base/error.hpp"
#include "engine/base/text.hpp"
#include "graphs/config/config.hpp"
#include "graphs/step/memory/changes.hpp"
#include "graphs/step/memory_limit.hpp"
#include "graphs/step/training_step.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Settings = std::vector<std::string>;

namespace {

constexpr const char* small = R"({"model": {"kind": "gpt2", "layers": 2, "width": 32, "heads": 4, "context": 32,
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
      R"((?:\(|, |or )([a-z_]+(?:\.[a-z_]+)?=[^ ()]+(?: [a-z_.]+=[^ ()]+)*)(?: needs|\)|;|$))");
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
  const Settings layout = GENERATE(Settings{}, Settings{"layout.pp=2"}, Settings{"layout.dp=2", "layout.tp=2"});
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
  int num_offers = 0;
  for (const auto& [settings, start] : cases) {
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
  CHECK(num_offers >= 15);
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
