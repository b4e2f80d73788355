#pragma once
#include "ops/tape/tape.hpp"

namespace stepgraph {

// Row t of the weight for every token t: [tokens] -> [tokens, width]. Tensor parallel: this rank holds the rows from
// `vocab_begin` on, ranks in order, and outputs zeros for tokens of other ranks; tp_sum follows. A token outside the
// vocabulary fails the step with Error(run), which names its position and value. The CUDA kernel does not check this
// and treats such a token as another rank's.
struct Embedding {
  Tensor tokens            = {};  // i32
  Weight weight            = {};  // [rows, width]
  std::int64_t vocab_begin = 0;
};
[[nodiscard]] Tensor embedding(Tape& tape, const Embedding& spec);

// x plus row p of the weight for position p of each sequence: [sequences * seq, width]. Tensor parallel: this rank
// holds the rows from `position_begin` on and leaves x unchanged at positions of other ranks. x must therefore be the
// rank's partial embedding, before tp_sum.
struct PositionalEmbedding {
  Tensor x                    = {};
  Weight weight               = {};  // [rows, width]
  std::int64_t position_begin = 0;
};
[[nodiscard]] Tensor positional_embedding(Tape& tape, const PositionalEmbedding& spec);

}  // namespace stepgraph
