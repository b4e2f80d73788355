#include "ops/layers/attention.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

#include "engine/base/dispatch.hpp"
#include "ops/cpu/attention/attention.hpp"
#include "ops/cuda/attention/attention.hpp"
#include "ops/cuda/common/built.hpp"
#include "ops/cuda/common/workspace_bytes.hpp"
#include "ops/shared/dropout_mask.hpp"
#include "ops/shared/heads.hpp"

namespace stepgraph {
namespace {

// Upper limit of heads computed at the same time: each one needs a workspace.
constexpr std::int64_t most_workspaces = 16;

// Flops of the two products of causal attention: 2 * 2 * heads * head_size * seq (seq + 1) / 2 per sequence. The
// backward pass has five such products.
double forward_flops(const Tape& tape, const Heads& heads) {
  const auto seq = static_cast<double>(tape.seq());
  return static_cast<double>(tape.sequences()) * 2 * 2 * static_cast<double>(heads.heads * heads.head_size) * seq *
         (seq + 1) / 2;
}

// The workspaces of a node. Each workspace serves a contiguous range of heads, or of parts of heads, of nearly equal
// size. The ranges do not depend on the threads.
struct Workspaces {
  std::int64_t sequences, heads;  // heads: of one sequence
  std::int64_t size;              // elements of one workspace
  std::int64_t parts = 1;         // of a head

  [[nodiscard]] std::int64_t all() const { return sequences * heads * parts; }
  [[nodiscard]] std::int64_t count() const { return std::min(all(), most_workspaces); }
  [[nodiscard]] Tensor tensor(Tape& tape, std::string_view name) const {
    return tape.tensor(name, {count(), size}, tape.wide_type());
  }
  // Calls body(sequence, head, part, workspace of that part).
  template <class W, class Body>
  void for_parts(const Context& context, W* workspace, const Body& body) const {
    context.parallel_for(count(), [&](std::int64_t w) {
      const std::int64_t end = (w + 1) * all() / count();
      for (std::int64_t i = w * all() / count(); i < end; ++i) {
        const std::int64_t head = i / parts;
        body(head / heads, head % heads, i % parts, workspace + w * size);
      }
    });
  }
};

// How many parts the queries of each of `heads` heads are cut into: a power of two, such that all workspaces serve the
// same number of parts, within a tenth, if the sequence is long enough.
std::int64_t num_parts(std::int64_t heads, std::int64_t seq) {
  std::int64_t parts = 1;
  const auto unequal = [&] {
    const std::int64_t all = heads * parts, most = (all + most_workspaces - 1) / most_workspaces;
    return 10 * most * most_workspaces > 11 * all;
  };
  while (unequal() && 2 * parts * cpu::attention_part <= seq) parts *= 2;
  return parts;
}
// The first query of a part. Later queries attend to more keys, so later parts have fewer queries.
std::int64_t first_query(std::int64_t part, std::int64_t parts, std::int64_t seq) {
  if (part == parts) return seq;
  const double share = std::sqrt(static_cast<double>(part) / static_cast<double>(parts));
  return std::llround(share * static_cast<double>(seq) / cpu::attention_part) * cpu::attention_part;
}

// The dropout of the attention probabilities.
struct Dropped {
  DropoutSite site;
  cpu::AttentionDropout numbers;

  [[nodiscard]] std::optional<cpu::AttentionDropout> at_step(const Context& context, std::size_t read) const {
    if (!site.active) return {};
    cpu::AttentionDropout made = numbers;
    made.mask                  = site.mask(context, read);
    return made;
  }
  // For the CUDA kernel, which reads the step itself.
  [[nodiscard]] cuda::AttentionDropout on_device(const Context& context, std::size_t read) const {
    if (!site.active) return {};
    const DropoutMask any = site.mask_at(0);
    return {.step           = context.read<std::int64_t>(read).data(),
            .key            = site.key,
            .dropped        = any.dropped,
            .scale          = any.scale,
            .first_sequence = numbers.first_sequence,
            .first_head     = numbers.first_head,
            .all_heads      = numbers.all_heads};
  }
};
Dropped dropped(const Tape& tape, const Attention& spec) {
  return {.site    = dropout_site(tape, spec.dropout),
          .numbers = {.mask           = {},
                      .first_sequence = tape.random().first_sequence,
                      .first_head     = tape.tp().index * spec.heads.heads,
                      .all_heads      = tape.tp().size * spec.heads.heads}};
}

}  // namespace

Tensor attention(Tape& tape, const Attention& spec) {
  check_heads(tape, "attention", spec.qkv, spec.heads);
  const cpu::AttentionShape shape{.seq       = tape.seq(),
                                  .heads     = spec.heads.heads,
                                  .kv_heads  = spec.heads.kv_heads,
                                  .head_size = spec.heads.head_size,
                                  .scale     = spec.scale};
  const std::int64_t sequences = tape.sequences();
  const Dropped dropout        = dropped(tape, spec);
  const Tensor qkv             = spec.qkv;
  const Tensor out             = tape.tensor("attention", {qkv.rows(), shape.out_row()});
  const Tensor log_sums        = tape.tensor("attention log_sums", {qkv.rows(), shape.heads}, tape.wide_type());
  const double flops           = forward_flops(tape, spec.heads);
  const auto bytes             = static_cast<double>(qkv.num_bytes() + out.num_bytes());
  const auto plus_step         = [dropout](AccessList reads) {
    if (dropout.site.active) reads.push_back(dropout.site.step);
    return reads;
  };

  // The kernels of Stepgraph use no workspace.
  const bool by_dnn =
      !dropout.site.active &&
      cuda::is_dnn_attention(shape.seq, shape.head_size, static_cast<std::int64_t>(size_bytes(tape.type())));
  const std::int64_t forward_bytes = by_dnn ? cuda::dnn_forward_workspace(sequences, shape.seq, shape.heads) : 0;
  const std::int64_t backward_bytes =
      by_dnn ? cuda::dnn_backward_workspace(sequences, shape.seq, shape.heads, shape.head_size) : 0;

  const Workspaces rooms{
      tape.sequences(), shape.heads,
      dispatch_float(tape.type(), [&]<class T>(T) { return cpu::attention_forward_workspace<T>(shape); }),
      num_parts(tape.sequences() * shape.heads, shape.seq)};
  tape.add<AllTypes>({.op              = "attention",
                      .reads           = plus_step(qkv),
                      .writes          = {out, log_sums, rooms.tensor(tape, "attention workspace")},
                      .cost            = {.flops = flops, .bytes_moved = bytes},
                      .parallel        = true,
                      .device          = true,
                      .workspace_bytes = forward_bytes},
                     [=]<class T>(const Context& context, T) {
                       if constexpr (cuda::built) {
                         if (const DeviceQueue* queue = context.device()) {
                           return cuda::attention_forward<T>(*queue, {.shape     = shape,
                                                                      .sequences = sequences,
                                                                      .qkv       = context.read<T>(0).data(),
                                                                      .out       = context.write<T>(0).data(),
                                                                      .log_sums  = context.write<Wide<T>>(1).data(),
                                                                      .dropout   = dropout.on_device(context, 1)});
                         }
                       }
                       const cpu::AttentionForward<T> kernel{.shape    = shape,
                                                             .qkv      = context.read<T>(0).data(),
                                                             .out      = context.write<T>(0).data(),
                                                             .log_sums = context.write<Wide<T>>(1).data(),
                                                             .dropout  = dropout.at_step(context, 1)};
                       rooms.for_parts(
                           context, context.write<Wide<T>>(2).data(),
                           [&](std::int64_t sequence, std::int64_t head, std::int64_t part, Wide<T>* room) {
                             const std::int64_t first = first_query(part, rooms.parts, shape.seq),
                                                end   = first_query(part + 1, rooms.parts, shape.seq);
                             if (first < end)
                               cpu::attention_forward(kernel, cpu::HeadPart{sequence, head, first, end}, room);
                           });
                     });

  const auto input_gradients = [=](Tape& back) {
    if (!back.needs_gradient(qkv)) return;
    const Workspaces back_rooms{back.sequences(), shape.kv_heads, dispatch_float(back.type(), [&]<class T>(T) {
                                  return cpu::attention_backward_workspace<T>(shape);
                                })};
    const Tensor products = back.tensor("attention_backward products", log_sums.shape, log_sums.type);
    back.add_gradient<AllTypes>(qkv,
                                {.op              = "attention_backward",
                                 .reads           = plus_step({qkv, out, log_sums, back.gradient(out)}),
                                 .writes          = {products, back_rooms.tensor(back, "attention_backward workspace")},
                                 .cost            = {.flops = 2.5 * flops, .bytes_moved = 2 * bytes},
                                 .parallel        = true,
                                 .device          = true,
                                 .workspace_bytes = backward_bytes},
                                [=]<class T>(const Context& context, Into<T> d_qkv) {
                                  if constexpr (cuda::built) {
                                    if (const DeviceQueue* queue = context.device()) {
                                      return cuda::attention_backward<T>(*queue,
                                                                         {.shape     = shape,
                                                                          .sequences = sequences,
                                                                          .qkv       = context.read<T>(0).data(),
                                                                          .out       = context.read<T>(1).data(),
                                                                          .log_sums  = context.read<Wide<T>>(2).data(),
                                                                          .d_out     = context.read<T>(3).data(),
                                                                          .products  = context.write<Wide<T>>(0).data(),
                                                                          .dropout   = dropout.on_device(context, 4)},
                                                                         d_qkv);
                                    }
                                  }
                                  const cpu::AttentionBackward<T> kernel{.shape    = shape,
                                                                         .qkv      = context.read<T>(0).data(),
                                                                         .out      = context.read<T>(1).data(),
                                                                         .log_sums = context.read<Wide<T>>(2).data(),
                                                                         .d_out    = context.read<T>(3).data(),
                                                                         .products = context.write<Wide<T>>(0).data(),
                                                                         .dropout  = dropout.at_step(context, 4)};
                                  back_rooms.for_parts(
                                      context, context.write<Wide<T>>(1).data(),
                                      [&](std::int64_t sequence, std::int64_t kv_head, std::int64_t, Wide<T>* room) {
                                        cpu::attention_backward(kernel, d_qkv, sequence, kv_head, room);
                                      });
                                });
  };
  tape.on_backward({.outputs = {out}, .input_gradients = input_gradients});
  return out;
}

}  // namespace stepgraph
