#include "ops/embedding.hpp"

#include <algorithm>

#include "ops/op_checks.hpp"

namespace stepgraph {
namespace {

// What was there before, or zeros: for kernels that then add to some of it.
template <class T>
void begin_sum(const Into<T>& into) {
  if (into.base == into.out) return;
  if (into.base == nullptr) {
    std::fill_n(into.out, into.size, T{0});
  } else {
    std::copy_n(into.base, into.size, into.out);
  }
}

void check_table(std::string_view op, const Weight& weight) {
  if (weight.shape.size() != 2) {
    throw Error(ErrorKind::config, str(op, ": weight is ", to_string(weight.shape), " (ROWSxWIDTH)"));
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

  tape.add({.op = "embedding", .reads = {spec.tokens, spec.weight}, .writes = y, .cost = cost},
           [shard, width]<class T>(const Context& context, T) {
             const auto tokens     = context.read<std::int32_t>(0);
             const T* const weight = context.read<T>(1).data();
             T* out                = context.write<T>().data();
             for (std::size_t i = 0; i < tokens.size(); ++i, out += width) {
               const std::int64_t row = shard.find("embedding: token", tokens[i], static_cast<std::int64_t>(i));
               if (row < 0) {
                 std::fill_n(out, width, T{0});
               } else {
                 std::copy_n(weight + row * width, width, out);
               }
             }
           });

  tape.on_backward(
      {.outputs = {y}, .weight_gradients = [spec, y, shard, width, cost](Tape& back) {
         back.add_weight_gradient(
             spec.weight, {.op = "embedding_weight_gradient", .reads = {spec.tokens, back.gradient(y)}, .cost = cost},
             [shard, width]<class T>(const Context& context, Into<T> into) {
               const auto tokens = context.read<std::int32_t>(0);
               const T* dy       = context.read<T>(1).data();
               begin_sum(into);
               for (std::size_t i = 0; i < tokens.size(); ++i, dy += width) {
                 const std::int64_t row = shard.find("embedding: token", tokens[i], static_cast<std::int64_t>(i));
                 if (row < 0) continue;
                 for (std::int64_t j = 0; j < width; ++j) into.out[row * width + j] += dy[j];
               }
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

  // Of each sequence: where the positions of this rank's rows begin, and how many elements they are.
  const std::int64_t block = seq * width, first = std::min(begin, seq) * width,
                     used = (std::min(begin + rows, seq) - std::min(begin, seq)) * width;
  const auto used_bytes   = static_cast<std::int64_t>(size_bytes(tape.type())) * used;
  tape.add(
      {.op = std::string(op), .reads = {spec.x, spec.weight.value.range(0, used_bytes)}, .writes = y, .cost = cost},
      [block, first]<class T>(const Context& context, T) {
        const auto x      = context.read<T>(0);
        const auto weight = context.read<T>(1);
        const auto out    = context.write<T>();
        std::copy(x.begin(), x.end(), out.begin());
        for (std::size_t i = static_cast<std::size_t>(first); i < out.size(); i += static_cast<std::size_t>(block)) {
          for (std::size_t j = 0; j < weight.size(); ++j) out[i + j] += weight[j];
        }
      });

  tape.on_backward({.outputs         = {y},
                    .input_gradients = [x = spec.x, y](Tape& back) { back.pass_gradient(x, y); },
                    .weight_gradients =
                        [weight = spec.weight, y, sequences, block, first, used, cost](Tape& back) {
                          back.add_weight_gradient(
                              weight,
                              {.op = "positional_embedding_weight_gradient", .reads = back.gradient(y), .cost = cost},
                              [sequences, block, first, used]<class T>(const Context& context, Into<T> into) {
                                const T* const dy = context.read<T>().data() + first;
                                for (std::int64_t j = 0; j < used; ++j) {
                                  T sum = dy[j];
                                  for (std::int64_t s = 1; s < sequences; ++s) sum += dy[s * block + j];
                                  into.put(j, sum);
                                }
                                begin_sum<T>({.out  = into.out + used,
                                              .base = into.base == nullptr ? nullptr : into.base + used,
                                              .size = into.size - used});
                              });
                        }});
  return y;
}

}  // namespace stepgraph
