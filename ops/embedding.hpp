#pragma once
#include "ops/tape/tape.hpp"

namespace stepgraph {

// Row t of the weight for every token t: [tokens] -> [tokens, width]. Tensor parallel: this rank has the rows from
// `vocab_begin` on, ranks in their order, and gives zeros for tokens of others; tp_sum goes after it. A token outside
// the vocabulary fails the step: Error(run) with its position and value; a device cannot tell, and takes it for another
// rank's.
struct Embedding {
  Tensor tokens            = {};  // i32
  Weight weight            = {};  // [rows, width]
  std::int64_t vocab_begin = 0;
};
[[nodiscard]] Tensor embedding(Tape& tape, const Embedding& spec);

// x plus row p of the weight for position p of each sequence: [sequences * seq, width]. Tensor parallel: this rank has
// the rows from `position_begin` on and leaves x as it is at positions of others; so x is the rank's summand of an
// embedding, before the ranks' are added up.
struct PositionalEmbedding {
  Tensor x                    = {};
  Weight weight               = {};  // [rows, width]
  std::int64_t position_begin = 0;
};
[[nodiscard]] Tensor positional_embedding(Tape& tape, const PositionalEmbedding& spec);

}  // namespace stepgraph
