// Tests the verifier against an independent oracle: random graphs are sound, and a random change to a graph or its
// edges is reported exactly if brute force over all executions finds it harmful.
#include <algorithm>
#include <array>
#include <catch2/catch_test_macros.hpp>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/verify/verify.hpp"
#include "tests/support/graphs/random_graph.hpp"
#include "tests/support/graphs/rank_sets.hpp"
#include "tests/support/oracle/mutation.hpp"
#include "tests/support/oracle/oracle.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using namespace stepgraph::testing;

namespace {

constexpr sg::VerifyOptions everything{.max_findings = 1000};

std::string messages(const std::vector<sg::Finding>& findings) {
  std::string text;
  for (const sg::Finding& finding : findings) text += finding.message + "\n";
  return text;
}

}  // namespace

// --- the verifier ------------------------------------------------------------------------------------------------

namespace {

RandomGraphOptions shape_of(int seed) {
  return seed % 2 == 0 ? RandomGraphOptions::small() : RandomGraphOptions::dense();
}

}  // namespace

TEST_CASE("the verifier is silent on thousands of random graphs of many ranks", "[engine][verify]") {
  for (int seed = 0; seed < cases(4000); ++seed) {
    CAPTURE(seed);
    const sg::Graph graph = random_graph(static_cast<std::uint64_t>(seed), shape_of(seed));
    const auto findings   = sg::find_flaws(graph, everything);
    if (!findings.empty()) FAIL_CHECK(messages(findings) << dump(graph, graph.edges()));
    for (const sg::RankSet& ranks : sg::testing::rank_sets(graph.num_ranks())) {
      const auto of_the_slice = sg::find_flaws(sg::slice(graph, ranks), everything);
      if (!of_the_slice.empty()) FAIL_CHECK("slice of " << to_string(ranks) << ": " << messages(of_the_slice));
    }
    const Harm harm = find_harm(graph, graph.edges());
    if (harm.any()) FAIL_CHECK("oracle: " << to_string(harm) << "\n" << dump(graph, graph.edges()));
  }
  for (int seed = 0; seed < cases(1500); ++seed) {
    CAPTURE(seed);
    const sg::Graph graph = random_graph(static_cast<std::uint64_t>(seed), RandomGraphOptions::medium());
    const auto findings   = sg::find_flaws(graph, everything);
    if (!findings.empty()) FAIL_CHECK(messages(findings));
  }
}

namespace {

using Flaws = std::set<sg::Flaw>;

// The flaws that the verifier may report. A lane that the next run breaks may be reported as either, and the oracle
// does not look for deadlocks among parts that do not match.
Flaws allowed(const Harm& harm) {
  Flaws flaws;
  if (harm.race) flaws.insert(sg::Flaw::race);
  if (harm.broken_lane || harm.loop_lane) flaws.insert(sg::Flaw::broken_lane);
  if (harm.loop_race || harm.loop_lane) flaws.insert(sg::Flaw::loop_race);
  if (harm.unwritten_read) flaws.insert(sg::Flaw::unwritten_read);
  if (harm.mismatched) flaws.insert(sg::Flaw::mismatched_part);
  if (harm.unmatched) flaws.insert(sg::Flaw::unmatched_part);
  if (harm.bad_overlap) flaws.insert(sg::Flaw::bad_overlap);
  if (harm.deadlock || harm.mismatched || harm.unmatched) flaws.insert(sg::Flaw::deadlock);
  // The verifier's clocks count lane positions. With a broken lane, they are unreliable.
  if (harm.broken_lane) flaws.insert({sg::Flaw::race, sg::Flaw::loop_race});
  return flaws;
}

// The flaws that it must report, so that one does not hide another. Nodes in a cycle have no order to check, and a race
// within a run is also one with the next run.
Flaws required(const Harm& harm, const Flaws& reported) {
  Flaws flaws;
  if (harm.deadlock) flaws.insert(sg::Flaw::deadlock);
  if (harm.mismatched) flaws.insert(sg::Flaw::mismatched_part);
  if (harm.unmatched) flaws.insert(sg::Flaw::unmatched_part);
  if (harm.bad_overlap) flaws.insert(sg::Flaw::bad_overlap);
  if (reported.contains(sg::Flaw::deadlock)) return flaws;
  if (harm.unwritten_read) flaws.insert(sg::Flaw::unwritten_read);
  if (harm.broken_lane) flaws.insert(sg::Flaw::broken_lane);
  if (harm.broken_lane) return flaws;
  if (harm.race) flaws.insert(sg::Flaw::race);
  if ((harm.loop_race || harm.loop_lane) && !harm.race) flaws.insert(sg::Flaw::loop_race);
  return flaws;
}

// Fails if verifier and oracle disagree; returns the oracle's result.
Harm agree_on_harm(const Mutant& mutant) {
  const auto& [graph, edges] = mutant;
  const Harm harm            = find_harm(graph, edges);
  const auto findings        = sg::find_flaws({graph, edges}, everything);
  Flaws reported;
  for (const sg::Finding& finding : findings) reported.insert(finding.flaw);
  const auto contains = [](const Flaws& all, const Flaws& some) {
    return std::includes(all.begin(), all.end(), some.begin(), some.end());
  };
  const bool same_verdict = reported.empty() != harm.any();
  if (!same_verdict || !contains(allowed(harm), reported) || !contains(reported, required(harm, reported))) {
    FAIL_CHECK("oracle: " << to_string(harm) << "\nverifier: " << messages(findings) << dump(graph, edges));
  }
  return harm;
}

struct Counts {
  int harmful = 0, harmless = 0, refused = 0;
};

}  // namespace

TEST_CASE("the verifier reports a mutation exactly if the oracle finds it harmful", "[engine][verify]") {
  std::array<Counts, num_mutations> counts;
  std::map<std::string, int> kinds;
  for (int seed = 0; seed < cases(4000); ++seed) {
    const sg::Graph graph = random_graph(static_cast<std::uint64_t>(seed), shape_of(seed));
    Random random(static_cast<std::uint64_t>(seed));
    for (std::size_t m = 0; m < num_mutations; ++m) {
      const auto mutation   = static_cast<Mutation>(m);
      const sg::Edges edges = random.chance(60) ? with_implied_edges(graph, graph.edges(), random) : graph.edges();
      CAPTURE(seed, to_string(mutation));
      try {
        const auto mutant = mutate(graph, edges, mutation, random);
        if (!mutant) continue;
        const Harm harm = agree_on_harm(*mutant);
        ++(harm.any() ? counts[m].harmful : counts[m].harmless);
        ++kinds[to_string(harm)];
      } catch (const sg::Error& error) {
        if (error.kind() != sg::ErrorKind::config) throw;
        ++counts[m].refused;
      }
    }
  }
  std::string table;
  Counts all;
  for (std::size_t m = 0; m < num_mutations; ++m) {
    const auto& [harmful, harmless, refused] = counts[m];
    all.harmful += harmful, all.harmless += harmless, all.refused += refused;
    table += sg::str(to_string(static_cast<Mutation>(m)), ": ", harmful, " harmful, ", harmless, " harmless, ", refused,
                     " refused\n");
  }
  table += sg::str("all: ", all.harmful, " harmful, ", all.harmless, " harmless, ", all.refused, " refused\n");
  for (const auto& [kind, count] : kinds) table += sg::str(count, " x ", kind, "\n");
  INFO(table);
  CHECK(all.harmful >= at_least(20000));
  CHECK(all.harmless >= at_least(20000));
  // Every kind of change must have occurred with and without harm, and every kind of harm alone, so that a verifier
  // that misses one is caught.
  for (std::size_t m = 0; m < num_mutations; ++m) {
    CAPTURE(to_string(static_cast<Mutation>(m)));
    if (static_cast<Mutation>(m) != Mutation::add_loop_edge) CHECK(counts[m].harmful >= at_least(40));
    CHECK(counts[m].harmless >= at_least(40));
  }
  for (const Harm& harm : {Harm{.race = true}, Harm{.broken_lane = true}, Harm{.loop_race = true},
                           Harm{.loop_lane = true}, Harm{.unwritten_read = true}, Harm{.mismatched = true},
                           Harm{.unmatched = true}, Harm{.bad_overlap = true}, Harm{.deadlock = true}}) {
    CAPTURE(to_string(harm));
    CHECK(kinds[to_string(harm)] >= at_least(40));
  }
}

TEST_CASE("the verifier agrees with the oracle on several mutations at once", "[engine][verify]") {
  Counts counts;
  for (int seed = 0; seed < cases(2000); ++seed) {
    CAPTURE(seed);
    const sg::Graph graph = random_graph(static_cast<std::uint64_t>(seed), shape_of(seed));
    Random random(static_cast<std::uint64_t>(seed) + 1000000);
    for (int repeat = 0; repeat < 5; ++repeat) {
      Mutant mutant{graph, with_implied_edges(graph, graph.edges(), random)};
      std::string changes;
      try {
        for (std::int64_t n = random.between(2, 4); n > 0; --n) {
          const auto mutation = static_cast<Mutation>(random.below(num_mutations));
          if (auto next = mutate(mutant.graph, mutant.edges, mutation, random)) mutant = std::move(*next);
          changes += sg::str(to_string(mutation), " ");
        }
        CAPTURE(repeat, changes);
        ++(agree_on_harm(mutant).any() ? counts.harmful : counts.harmless);
      } catch (const sg::Error& error) {
        if (error.kind() != sg::ErrorKind::config) throw;
        ++counts.refused;
      }
    }
  }
  CAPTURE(counts.harmful, counts.harmless, counts.refused);
  CHECK(counts.harmful >= at_least(2000));
  CHECK(counts.harmless >= at_least(500));
}
