#include "ops/layers/embedding.hpp"

#include <algorithm>

#include "ops/cpu/into.hpp"
#include "ops/cpu/with_best.hpp"
#include "ops/cuda/common/built.hpp"
#include "ops/cuda/common/workspace_bytes.hpp"
#include "ops/cuda/layers/embedding.hpp"
#include "ops/tape/op_checks.hpp"

namespace stepgraph {
namespace {

// Sets elements [begin, end) to the previous value, or to zero, for kernels that then add to some of them.
template <class T, class Sum>
void begin_sum(const Into<T, Sum>& into, std::int64_t begin, std::int64_t end) {
  if (into.base == into.out) return;
  if (into.base == nullptr) {
    std::fill(into.out + begin, into.out + end, Sum{0});
  } else {
    std::copy(into.base + begin, into.base + end, into.out + begin);
  }
}

constexpr auto add_row = []<class T>(const T* __restrict from, std::int64_t width, Wide<T>* __restrict sum) {
  for (std::int64_t j = 0; j < width; ++j) sum[j] += wide(from[j]);
};

// Calls body(begin, end) for ranges of a table's rows, each of which scans all tokens. So a range has many rows, but
// fewer where there are many threads, and at the end of a thread's share: some ranges have most of the tokens.
template <class Range>
void for_table_rows(const Context& context, std::int64_t rows, std::int64_t width, const Range& body) {
  constexpr std::int64_t joined = 16;
  const std::int64_t tile       = cpu::rows_per_tile(width);
  if (rows <= tile) return body(std::int64_t{0}, rows);
  context.parallel_for((rows + tile - 1) / tile, joined,
                       [&](std::int64_t first, std::int64_t end) { body(first * tile, std::min(rows, end * tile)); });
}

void check_table(std::string_view op, const Weight& weight) {
  if (weight.shape.size() != 2) {
    throw Error(ErrorKind::config, str(op, ": weight is ", to_string(weight.shape), " (ROWSxWIDTH)"));
  }
}

// Elements [begin, begin + size) of a sum over sequences, in order. The sequences are `stride` elements apart in dy.
template <class T>
void add_positions(const T* dy, std::int64_t sequences, std::int64_t stride, const Into<T, Wide<T>>& into,
                   std::int64_t begin, std::int64_t size) {
  constexpr std::int64_t block = 128;  // elements at a time, so that the sums stay in registers or the L1 cache
  for (std::int64_t at = 0; at < size; at += block) {
    const std::int64_t count = std::min(block, size - at);
    Wide<T> sums[block];
    for (std::int64_t j = 0; j < count; ++j) sums[j] = wide(dy[at + j]);
    for (std::int64_t s = 1; s < sequences; ++s) {
      const T* more = dy + s * stride + at;
      for (std::int64_t j = 0; j < count; ++j) sums[j] += wide(more[j]);
    }
    cpu::put(into, begin + at, count, [&sums](std::int64_t j) { return sums[j]; });
  }
}

}  // namespace

Tensor embedding(Tape& tape, const Embedding& spec) {
  const std::int64_t count = spec.tokens.num_elements();
  check_indices(tape, "embedding", "tokens", spec.tokens, count);
  check_table("embedding", spec.weight);
  const std::int64_t width = spec.weight.shape[1];
  const VocabShard shard   = vocab_shard(tape, "embedding", spec.vocab_begin, spec.weight.shape[0]);
  const Tensor y           = tape.tensor("embedding", {count, width});
  const Cost cost{.bytes_moved = 2 * static_cast<double>(y.num_bytes())};

  tape.add<AllTypes>(
      {.op       = "embedding",
       .reads    = {spec.tokens, spec.weight},
       .writes   = y,
       .cost     = cost,
       .parallel = true,
       .device   = true},
      [shard, width, count]<class T>(const Context& context, T) {
        const auto tokens     = context.read<std::int32_t>(0);
        const T* const weight = context.read<T>(1).data();
        T* const out          = context.write<T>().data();
        if constexpr (cuda::built) {
          if (const DeviceQueue* queue = context.device()) {
            return cuda::embedding(*queue, tokens.data(), count, {shard.begin, shard.size}, width, weight, out);
          }
        }
        cpu::for_tiles(context, count, cpu::rows_per_tile(width), [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t i = begin; i < end; ++i) {
            const std::int64_t row = shard.find("embedding: token", tokens[static_cast<std::size_t>(i)], i);
            if (row < 0) {
              std::fill_n(out + i * width, width, T{});
            } else {
              std::copy_n(weight + row * width, width, out + i * width);
            }
          }
        });
      });

  // Each row sums its tokens in order; rows are independent. The forward pass has checked that all tokens are in the
  // vocabulary.
  tape.on_backward({.outputs = {y}, .weight_gradients = [spec, y, shard, width](Tape& back) {
                      const auto wide_bytes = static_cast<std::int64_t>(size_bytes(back.wide_type()));
                      const auto sums = cuda::embedding_sums(spec.tokens.num_elements(), shard.size, width, wide_bytes);
                      // It reads dy for the tokens of its shard and adds to their rows. The first one sets all rows.
                      const std::int64_t own = y.num_elements() / back.tp().size;
                      const std::int64_t set = back.begins_gradient(spec.weight) ? shard.size * width : 0;
                      const std::int64_t bytes =
                          own * static_cast<std::int64_t>(size_bytes(back.type())) + (2 * own + set) * wide_bytes;
                      back.add_weight_gradient<AllTypes>(
                          spec.weight,
                          {.op              = "embedding_weight_gradient",
                           .reads           = {spec.tokens, back.gradient(y)},
                           .cost            = {.bytes_moved = static_cast<double>(bytes)},
                           .parallel        = true,
                           .device          = true,
                           .workspace_bytes = sums.workspace_bytes},
                          [shard, width]<class T>(const Context& context, Into<T, Wide<T>> into) {
                            const auto tokens = context.read<std::int32_t>(0);
                            const T* const dy = context.read<T>(1).data();
                            if constexpr (cuda::built) {
                              if (const DeviceQueue* queue = context.device()) {
                                return cuda::embedding_gradient(*queue, tokens.data(), std::ssize(tokens),
                                                                {shard.begin, shard.size}, width, dy, into);
                              }
                            }
                            const auto sum_rows = [&](std::int64_t begin, std::int64_t end) {
                              begin_sum(into, begin * width, end * width);
                              for (std::size_t i = 0; i < tokens.size(); ++i) {
                                const std::int64_t row = tokens[i] - shard.begin;
                                if (row < begin || row >= end) continue;
                                Wide<T>* __restrict sum  = into.out + row * width;
                                const T* __restrict more = dy + static_cast<std::int64_t>(i) * width;
                                cpu::with_best(more, width, sum, add_row);
                              }
                            };
                            for_table_rows(context, shard.size, width, sum_rows);
                          });
                    }});
  return y;
}

Tensor positional_embedding(Tape& tape, const PositionalEmbedding& spec) {
  constexpr std::string_view op = "positional_embedding";
  check_tensor(tape, op, "x", spec.x);
  check_table(op, spec.weight);
  const std::int64_t sequences = tape.sequences(), seq = tape.seq(), width = spec.weight.shape[1];
  check_same_shape(op, "x", {spec.x.rows(), spec.x.cols()}, {sequences * seq, width});
  const std::int64_t rows = spec.weight.shape[0], begin = spec.position_begin;
  if (begin < 0 || (tape.tp().size == 1 && begin + rows < seq)) {
    throw Error(ErrorKind::config, str(op, ": sequences of ", seq, " tokens, but the weight has positions ", begin,
                                       " to ", begin + rows, " (0 to ", seq, " or more)"));
  }
  const Tensor y = tape.tensor(op, spec.x.shape);
  const Cost cost{.flops       = static_cast<double>(y.num_elements()),
                  .bytes_moved = 2 * static_cast<double>(y.num_bytes())};

  // The positions of each sequence whose rows this rank holds.
  const std::int64_t first = std::min(begin, seq), last = std::min(begin + rows, seq);
  const auto used_bytes = static_cast<std::int64_t>(size_bytes(tape.type())) * (last - first) * width;
  tape.add<AllTypes>(
      {.op       = std::string(op),
       .reads    = {spec.x, spec.weight.value.range(0, used_bytes)},
       .writes   = y,
       .cost     = cost,
       .parallel = true,
       .device   = true},
      [=]<class T>(const Context& context, T) {
        const T *x = context.read<T>(0).data(), *weight = context.read<T>(1).data();
        T* out = context.write<T>().data();
        if constexpr (cuda::built) {
          if (const DeviceQueue* queue = context.device()) {
            return cuda::positional_embedding(*queue, {sequences, seq, first, last}, width, x, weight, out);
          }
        }
        cpu::for_tiles(context, sequences * seq, cpu::rows_per_tile(width), [&](std::int64_t from, std::int64_t to) {
          for (std::int64_t row = from; row < to; ++row) {
            const std::int64_t position = row % seq;
            const T* __restrict in      = x + row * width;
            T* __restrict sum           = out + row * width;
            if (position < first || position >= last) {
              std::copy_n(in, width, sum);
              continue;
            }
            const T* __restrict more = weight + (position - first) * width;
            cpu::with_best([=] {
              for (std::int64_t j = 0; j < width; ++j) sum[j] = narrow<T>(wide(in[j]) + wide(more[j]));
            });
          }
        });
      });

  const auto weight_gradients = [=, weight = spec.weight](Tape& back) {
    back.add_weight_gradient<AllTypes>(
        weight,
        {.op       = "positional_embedding_weight_gradient",
         .reads    = back.gradient(y),
         .cost     = cost,
         .parallel = true,
         .device   = true},
        [=]<class T>(const Context& context, Into<T, Wide<T>> into) {
          const T* const dy = context.read<T>().data();
          if constexpr (cuda::built) {
            if (const DeviceQueue* queue = context.device()) {
              return cuda::positional_embedding_gradient(*queue, {sequences, seq, first, last}, rows, width, dy, into);
            }
          }
          cpu::for_tiles(context, rows, cpu::rows_per_tile(width), [&](std::int64_t from, std::int64_t to) {
            const std::int64_t used = std::clamp(last - first, from, to);
            for (std::int64_t row = from; row < used; ++row) {
              cpu::with_best(
                  [&] { add_positions(dy + (first + row) * width, sequences, seq * width, into, row * width, width); });
            }
            begin_sum(into, used * width, to * width);
          });
        });
  };
  tape.on_backward({.outputs          = {y},
                    .input_gradients  = [x = spec.x, y](Tape& back) { back.pass_gradient(x, y); },
                    .weight_gradients = weight_gradients});
  return y;
}

}  // namespace stepgraph
