#include "graphs/files/batches.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "engine/base/error.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
using Catch::Matchers::Message;
using stepgraph::testing::TempFolder;
using Tokens = std::vector<std::int32_t>;

namespace {

// A text of the tokens 0, 1, 2, ... so that a token is its position.
std::string counted(int size) {
  std::string text;
  for (int i = 0; i < size; ++i) text += static_cast<char>(i);
  return text;
}

// The numbers of the sequences of a batch, in data of counted tokens.
std::vector<int> sequences_of(const sg::Batch& batch, int seq) {
  std::vector<int> numbers;
  for (std::size_t i = 0; i < batch.inputs.size(); i += static_cast<std::size_t>(seq)) {
    REQUIRE(batch.inputs[i] % seq == 0);
    numbers.push_back(batch.inputs[i] / seq);
  }
  return numbers;
}

std::vector<int> sequences_from(const sg::Batches& batches, std::int64_t first, int count, int seq) {
  std::vector<int> numbers;
  for (std::int64_t at = first; std::ssize(numbers) < count;) {
    const std::vector<int> next = sequences_of(batches.read(at), seq);
    numbers.insert(numbers.end(), next.begin(), next.end());
    at += std::ssize(next);
  }
  return numbers;
}

}  // namespace

TEST_CASE("without settings a batch has the tokens of its step in file order", "[graphs][batches]") {
  const TempFolder folder;
  const auto path = folder.put("x.txt", counted(50));
  const sg::Batches batches({.source = sg::TextFiles{{path}}}, 256, {.global = 3, .seq = 4});
  CHECK(batches.num_sequences() == 12);
  CHECK(batches.num_steps() == 4);
  CHECK(batches.tokens_per_step() == 12);
  for (int step = 0; step < 4; ++step) {
    const sg::Batch batch = batches.read(3 * step);
    Tokens inputs, targets;
    for (int i = 0; i < 12; ++i) {
      inputs.push_back(12 * step + i);
      targets.push_back(12 * step + i + 1);
    }
    CHECK(batch.inputs == inputs);
    CHECK(batch.targets == targets);
    CHECK(batch.num_counted == 12);
  }
  CHECK(sequences_of(batches.read(1), 4) == std::vector{1, 2, 3});  // any sequence can be the first
  CHECK_THROWS_MATCHES(batches.read(10), sg::Error,
                       Message(path.string() + ": 3 sequences were requested from sequence 10 on, but there are 12"));
  CHECK_THROWS_AS(batches.read(-1), sg::Error);
}

TEST_CASE("epochs follow each other, and a batch may be in two of them", "[graphs][batches]") {
  const TempFolder folder;
  const sg::TextFiles files{{folder.put("x.txt", counted(21))}};  // 5 sequences of 4
  const sg::Batches batches({.source = files, .epochs = 3}, 256, {.global = 2, .seq = 4});
  CHECK(batches.num_steps() == 7);
  CHECK(batches.num_steps(6) == 4);
  CHECK(batches.num_steps(14) == 0);
  CHECK(batches.num_steps(99) == 0);
  CHECK(sequences_from(batches, 0, 14, 4) == std::vector{0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3});
  const sg::Batches endless({.source = files, .epochs = 0}, 256, {.global = 7, .seq = 4});  // more than an epoch
  CHECK_FALSE(endless.num_steps().has_value());
  CHECK(sequences_of(endless.read(5'000'000'000'003), 4) == std::vector{3, 4, 0, 1, 2, 3, 4});
}

TEST_CASE("a shuffle is a permutation of each epoch, by the seed, whatever the batch", "[graphs][batches]") {
  const TempFolder folder;
  const sg::DataSpec spec{
      .source = sg::TextFiles{{folder.put("x.txt", counted(241))}}, .epochs = 4, .shuffle = true};  // 60 sequences
  const auto order = [&](std::uint64_t seed, int global, std::int64_t first, int count) {
    return sequences_from(sg::Batches(spec, 256, {.global = global, .seq = 4, .seed = seed}), first, count, 4);
  };
  const std::vector<int> all = order(1, 1, 0, 240);
  std::set<std::vector<int>> epochs;
  for (int epoch = 0; epoch < 4; ++epoch) {
    std::vector<int> one(all.begin() + 60 * epoch, all.begin() + 60 * (epoch + 1));
    epochs.insert(one);
    CHECK_FALSE(std::ranges::is_sorted(one));
    std::ranges::sort(one);
    for (int i = 0; i < 60; ++i) CHECK(one[static_cast<std::size_t>(i)] == i);
  }
  CHECK(epochs.size() == 4);
  CHECK(order(2, 1, 0, 60) != order(1, 1, 0, 60));
  for (const int global : {2, 5, 8, 60, 240}) CHECK(order(1, global, 0, 240) == all);
  // A run that goes on, with another batch, has the sequences that follow.
  CHECK(order(1, 6, 77, 60) == std::vector(all.begin() + 77, all.begin() + 137));
}

TEST_CASE("a shuffled index is a permutation for every number of items", "[graphs][batches]") {
  for (std::int64_t count = 1; count < 70; ++count) {
    std::set<std::int64_t> seen;
    for (std::int64_t i = 0; i < count; ++i) seen.insert(sg::shuffled_index(i, count, 5));
    REQUIRE(std::ssize(seen) == count);
    REQUIRE(*seen.begin() == 0);
    REQUIRE(*seen.rbegin() == count - 1);
  }
  constexpr std::int64_t many = 100'003;
  std::vector<bool> seen(many, false);
  double moved = 0;
  for (std::int64_t i = 0; i < many; ++i) {
    const std::int64_t to = sg::shuffled_index(i, many, 9);
    REQUIRE_FALSE(seen[static_cast<std::size_t>(to)]);
    seen[static_cast<std::size_t>(to)] = true;
    moved += std::abs(static_cast<double>(to - i));
  }
  CHECK(std::abs(moved / many / many - 1.0 / 3) < 0.01);  // as far as in a random order
  constexpr auto most = std::numeric_limits<std::int64_t>::max();
  CHECK(sg::shuffled_index(most - 1, most, 3) < most);
}

TEST_CASE("the validation share is at the end and is never trained on", "[graphs][batches]") {
  const TempFolder folder;
  const sg::DataSpec spec{.source     = sg::TextFiles{{folder.put("x.txt", counted(81))}},
                          .epochs     = 2,
                          .shuffle    = true,
                          .validation = 0.25};  // 20 sequences
  const sg::Batches training(spec, 256, {.global = 3, .seq = 4});
  CHECK(training.num_sequences() == 15);
  CHECK(training.num_steps() == 10);
  for (const int sequence : sequences_from(training, 0, 30, 4)) CHECK(sequence < 15);
  const sg::BatchesOptions options{.global = 3, .seq = 4, .part = sg::DataPart::validation};
  const sg::Batches validation(spec, 256, options);
  CHECK(validation.num_sequences() == 5);
  CHECK(validation.num_steps() == 1);
  CHECK(sequences_of(validation.read(0), 4) == std::vector{15, 16, 17});
  CHECK_THROWS_AS(validation.read(3), sg::Error);
  // With padding the last batch has fewer sequences, and the others do not count.
  sg::BatchesOptions pads = options;
  pads.pads               = true;
  const sg::Batches padded(spec, 256, pads);
  CHECK(padded.num_steps() == 2);
  const sg::Batch last = padded.read(3);
  CHECK(last.num_counted == 8);
  CHECK(last.inputs == Tokens{72, 73, 74, 75, 76, 77, 78, 79, 0, 0, 0, 0});
  CHECK(last.targets == Tokens{73, 74, 75, 76, 77, 78, 79, 80, -1, -1, -1, -1});
  CHECK_THROWS_AS(padded.read(5), sg::Error);
  // One sequence at least.
  CHECK(sg::Batches({.source = spec.source, .validation = 1e-9}, 256, pads).num_sequences() == 1);
}

TEST_CASE("targets with the ignored token do not count", "[graphs][batches]") {
  const TempFolder folder;
  const sg::DataSpec spec{.source = sg::TextFiles{{folder.put("x.txt", "abcbabb")}}, .ignore = 'b'};
  const sg::Batch batch = sg::Batches(spec, 256, {.global = 2, .seq = 3}).read(0);
  CHECK(batch.inputs == Tokens{'a', 'b', 'c', 'b', 'a', 'b'});
  CHECK(batch.targets == Tokens{-1, 'c', -1, 'a', -1, -1});
  CHECK(batch.num_counted == 2);
}

TEST_CASE("synthetic data has batches without end", "[graphs][batches]") {
  const sg::Batches batches({.source = sg::SyntheticTokens{3}}, 64, {.global = 2, .seq = 5});
  CHECK_FALSE(batches.num_steps().has_value());
  CHECK_FALSE(batches.num_sequences().has_value());
  Tokens tokens(11);
  batches.data().read(70, tokens);
  const sg::Batch batch = batches.read(14);
  CHECK(std::equal(batch.inputs.begin(), batch.inputs.end(), tokens.begin()));
  CHECK(std::equal(batch.targets.begin(), batch.targets.end(), tokens.begin() + 1));
}

TEST_CASE("data that is too short, and settings without effect, are refused by name", "[graphs][batches][refuses]") {
  const TempFolder folder;
  const auto path    = folder.put("x.txt", "0123456789");
  const auto refuses = [&](sg::DataSpec spec, const sg::BatchesOptions& options, const std::string& what) {
    CHECK_THROWS_MATCHES(sg::Batches(std::move(spec), 256, options), sg::Error, Message(what));
  };
  const sg::DataSpec text{.source = sg::TextFiles{{path}}};
  CHECK(sg::Batches(text, 256, {.global = 3, .seq = 3}).num_steps() == 1);
  refuses(text, {.global = 2, .seq = 5},
          path.string() +
              ": has 10 tokens, but one step needs 10 and one more as the last target (a longer file, or a smaller "
              "batch)");
  refuses({.source = text.source, .epochs = 0}, {.global = 1, .seq = 10},
          path.string() +
              ": has 10 tokens, but one step needs 10 and one more as the last target (a longer file, or a smaller "
              "batch)");
  CHECK(sg::Batches({.source = text.source, .epochs = 2}, 256, {.global = 2, .seq = 5}).num_steps() == 1);
  refuses({.source = text.source, .validation = 0.5}, {.global = 4, .seq = 2},
          path.string() +
              ": has 2 sequences for training (data.validation 0.5), but one step needs 4 (a longer file, or a smaller "
              "batch)");
  refuses(text, {.global = 0, .seq = 2}, "data: batches of 0 sequences of 2 tokens (1 or more of both)");
  refuses(text, {.part = sg::DataPart::validation},
          "data.validation: is 0, so " + path.string() + " has no sequences for validation (a share above 0)");
  refuses({.source = text.source, .ignore = 256}, {},
          "data.ignore: token 256, but the vocabulary has 256 tokens (0 to 255)");
  refuses({.source = text.source, .validation = 1}, {}, "data.validation: 1 (a share from 0 to less than 1)");
  refuses({.shuffle = true}, {}, "data.shuffle: has no effect with synthetic data, which has no end (tokens or text)");
}
