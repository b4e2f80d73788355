#pragma once
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "graphs/files/token_data.hpp"

namespace stepgraph {

// The data of a run, and how it is read.
struct DataSpec {
  DataSource source                  = SyntheticTokens{};
  std::int64_t epochs                = 1;      // 0: no end
  bool shuffle                       = false;  // each epoch has an order of its own, by the seed of the run
  double validation                  = 0;      // the share of the sequences, at the end, that is not trained on
  std::optional<std::int32_t> ignore = {};     // targets with this token do not count
  friend bool operator==(const DataSpec&, const DataSpec&) = default;
};

// The sequences of one step, end to end. Targets that do not count are -1 (ignored_target of
// ops/layers/cross_entropy.hpp).
struct Batch {
  std::vector<std::int32_t> inputs  = {};  // global * seq
  std::vector<std::int32_t> targets = {};
  std::int64_t num_counted          = 0;  // targets that count
};

// The number of item `index` in an order of `count` items that the key determines: a permutation, computed in constant
// time and memory.
[[nodiscard]] std::int64_t shuffled_index(std::int64_t index, std::int64_t count, std::uint64_t key);

// Which sequences: those that are trained on, or those of DataSpec::validation.
enum class DataPart : std::uint8_t { training, validation };

struct BatchesOptions {
  int global         = 1;  // sequences of a batch
  int seq            = 1;  // tokens of a sequence
  std::uint64_t seed = 0;  // of the shuffle
  DataPart part      = DataPart::training;
  // The last batch may have fewer sequences. Those that are missing have targets that do not count.
  bool pads = false;
};

// The batches of a run, by the number of their first sequence: a run that goes on needs this number only. Sequence i of
// the data has the inputs [i * seq, (i + 1) * seq) of the tokens; its targets are one token further. Sequence k of the
// run is number k % n of epoch k / n, for n sequences. The layout has no influence. Validation is one epoch and is not
// shuffled. Thread-safe for concurrent reads.
class Batches {
 public:
  // Throws Error(config) if the data is too short for one batch, and for settings without effect.
  Batches(DataSpec spec, std::int64_t vocab, const BatchesOptions& options);

  [[nodiscard]] const TokenData& data() const noexcept { return data_; }
  [[nodiscard]] const DataSpec& spec() const noexcept { return spec_; }
  [[nodiscard]] std::int64_t tokens_per_step() const noexcept;
  // Sequences of one epoch; none: synthetic data.
  [[nodiscard]] std::optional<std::int64_t> num_sequences() const noexcept { return num_sequences_; }
  // Batches in all epochs, from a sequence of the run on; none: no end. A batch may begin in one epoch and end in the
  // next.
  [[nodiscard]] std::optional<std::int64_t> num_steps(std::int64_t first_sequence = 0) const noexcept;

  // `global` sequences from this one on. Step s of a run that reads from the start begins at s * global.
  [[nodiscard]] Batch read(std::int64_t first_sequence) const;

 private:
  [[nodiscard]] std::optional<std::int64_t> num_run_sequences() const noexcept;  // in all epochs

  DataSpec spec_;
  BatchesOptions options_;
  TokenData data_;
  std::int64_t first_sequence_ = 0;  // of the part, in the data
  std::optional<std::int64_t> num_sequences_;
};

// Throws Error(config) for keys without effect; `path` is that of the section: "data", "eval.data".
void check_data_spec(const DataSpec& spec, std::string_view path);

}  // namespace stepgraph
