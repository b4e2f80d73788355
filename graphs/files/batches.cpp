#include "graphs/files/batches.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "engine/base/error.hpp"
#include "ops/layers/cross_entropy.hpp"
#include "ops/tape/counter_random.hpp"

namespace stepgraph {
namespace {

constexpr std::int64_t no_end = std::numeric_limits<std::int64_t>::max();

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::config, message); }

// The number of validation sequences: at least one, where a share is asked for and there are two.
std::int64_t num_validation(double share, std::int64_t sequences) {
  if (share <= 0 || sequences < 2) return 0;
  const auto rounded = static_cast<std::int64_t>(std::llround(share * static_cast<double>(sequences)));
  return std::clamp<std::int64_t>(rounded, 1, sequences - 1);
}

}  // namespace

// A Feistel network permutes the numbers of 2 * half bits. A result that is not below `count` is permuted again until
// it is (cycle walking: Black and Rogaway 2002): at most four times on average, since 4 * count is more than all
// numbers.
std::int64_t shuffled_index(std::int64_t index, std::int64_t count, std::uint64_t key) {
  constexpr int rounds     = 8;
  const auto most          = static_cast<std::uint64_t>(count - 1);
  const int half           = std::max(1, (static_cast<int>(std::bit_width(most)) + 1) / 2);
  const std::uint64_t mask = (std::uint64_t{1} << half) - 1;
  auto number              = static_cast<std::uint64_t>(index);
  do {
    std::uint64_t left = number >> half, right = number & mask;
    for (std::uint64_t round = 0; round < rounds; ++round) {
      const std::uint64_t next = left ^ (mix_bits(derived_key(key, round) ^ right) & mask);
      left                     = right;
      right                    = next;
    }
    number = left << half | right;
  } while (number > most);
  return static_cast<std::int64_t>(number);
}

void check_data_spec(const DataSpec& spec, std::string_view path) {
  if (spec.epochs < 0) refuse(str(path, ".epochs: ", spec.epochs, " (0 or more; 0: no end)"));
  if (!(spec.validation >= 0 && spec.validation < 1))
    refuse(str(path, ".validation: ", spec.validation, " (a share from 0 to less than 1)"));
  if (spec.ignore && *spec.ignore < 0) refuse(str(path, ".ignore: ", *spec.ignore, " (a token)"));
  if (!std::holds_alternative<SyntheticTokens>(spec.source)) return;
  const auto no_effect = [&](std::string_view key) {
    refuse(str(path, ".", key, ": has no effect with synthetic data, which has no end (tokens or text)"));
  };
  if (spec.epochs != DataSpec{}.epochs) no_effect("epochs");
  if (spec.shuffle) no_effect("shuffle");
  if (spec.validation > 0) no_effect("validation");
}

Batches::Batches(DataSpec spec, std::int64_t vocab, const BatchesOptions& options)
    : spec_(std::move(spec)), options_(options), data_(spec_.source, vocab) {
  if (options.global < 1 || options.seq < 1)
    refuse(str("data: batches of ", options.global, " sequences of ", options.seq, " tokens (1 or more of both)"));
  check_data_spec(spec_, "data");
  if (spec_.ignore && *spec_.ignore >= vocab)
    refuse(str("data.ignore: token ", *spec_.ignore, ", but the vocabulary has ", vocab, " tokens (0 to ", vocab - 1,
               ")"));
  const bool validates = options.part == DataPart::validation;
  if (validates && spec_.validation == 0)
    refuse(str("data.validation: is 0, so ", data_.subject(), " has no sequences for validation (a share above 0)"));
  if (!data_.num_tokens()) return;
  const std::int64_t all  = (*data_.num_tokens() - 1) / options.seq;
  const std::int64_t held = num_validation(spec_.validation, all);
  num_sequences_          = validates ? held : all - held;
  first_sequence_         = validates ? all - held : 0;
  if (num_steps().value_or(1) > 0) return;
  const std::int64_t here = *num_sequences_;
  if (spec_.validation == 0)
    refuse(str(data_.subject(), ": has ", *data_.num_tokens(), " tokens, but one step needs ", tokens_per_step(),
               " and one more as the last target (a longer file, or a smaller batch)"));
  refuse(str(data_.subject(), ": has ", here, here == 1 ? " sequence" : " sequences", " for ",
             validates ? "validation" : "training", " (data.validation ", spec_.validation, "), but one step needs ",
             options.global, " (a longer file, or a smaller batch)"));
}

std::int64_t Batches::tokens_per_step() const noexcept { return std::int64_t{options_.global} * options_.seq; }

std::optional<std::int64_t> Batches::num_run_sequences() const noexcept {
  if (!num_sequences_) return std::nullopt;
  if (options_.part == DataPart::validation) return num_sequences_;
  if (spec_.epochs == 0) return *num_sequences_ == 0 ? std::optional<std::int64_t>(0) : std::nullopt;
  return *num_sequences_ > no_end / spec_.epochs ? no_end : *num_sequences_ * spec_.epochs;
}

std::optional<std::int64_t> Batches::num_steps(std::int64_t first_sequence) const noexcept {
  const auto sequences = num_run_sequences();
  if (!sequences) return std::nullopt;
  const std::int64_t left = std::max<std::int64_t>(0, *sequences - first_sequence);
  return left / options_.global + (options_.pads && left % options_.global > 0 ? 1 : 0);
}

Batch Batches::read(std::int64_t first_sequence) const {
  const auto seq         = static_cast<std::size_t>(options_.seq);
  const auto global      = std::int64_t{options_.global};
  const std::int64_t end = num_run_sequences().value_or(no_end);
  const bool fits        = first_sequence >= 0 && first_sequence <= end - (options_.pads ? 1 : global);
  if (!fits)
    refuse(str(data_.subject(), ": ", global, " sequences were requested from sequence ", first_sequence,
               " on, but there are ", end));
  Batch batch{.inputs  = std::vector<std::int32_t>(static_cast<std::size_t>(global) * seq, 0),
              .targets = std::vector<std::int32_t>(static_cast<std::size_t>(global) * seq, ignored_target)};
  std::vector<std::int32_t> tokens(seq + 1);
  const std::int64_t present = std::min(global, end - first_sequence);
  for (std::int64_t i = 0; i < present; ++i) {
    std::int64_t sequence = first_sequence + i;
    if (num_sequences_) {
      const std::int64_t epoch = sequence / *num_sequences_;
      sequence %= *num_sequences_;
      if (spec_.shuffle && options_.part == DataPart::training) {
        const std::uint64_t key =
            derived_key(derived_key(name_key("shuffle"), options_.seed), static_cast<std::uint64_t>(epoch));
        sequence = shuffled_index(sequence, *num_sequences_, key);
      }
      sequence += first_sequence_;
    }
    data_.read(sequence * options_.seq, tokens);
    const auto at = i * options_.seq;
    std::copy(tokens.begin(), tokens.end() - 1, batch.inputs.begin() + at);
    std::copy(tokens.begin() + 1, tokens.end(), batch.targets.begin() + at);
  }
  if (spec_.ignore) std::ranges::replace(batch.targets, *spec_.ignore, ignored_target);
  batch.num_counted =
      std::ranges::count_if(batch.targets, [](std::int32_t target) { return target != ignored_target; });
  return batch;
}

}  // namespace stepgraph
