#include "ops/attention.hpp"

#include <algorithm>

#include "ops/cpu/attention.hpp"
#include "ops/cpu/into.hpp"
#include "ops/heads.hpp"

namespace stepgraph {
namespace {

// How many pairs of a sequence and a key and value head may be worked on at a time: each has a workspace.
constexpr std::int64_t most_workspaces = 4;

// Multiplications and additions of the two products of the causal half: 2 * 2 * heads * head_size * seq (seq + 1) / 2
// for each sequence. Backward has five such products.
double forward_flops(const Tape& tape, const Heads& heads) {
  const auto seq = static_cast<double>(tape.seq());
  return static_cast<double>(tape.sequences()) * 2 * 2 * static_cast<double>(heads.heads * heads.head_size) * seq *
         (seq + 1) / 2;
}

}  // namespace

Tensor attention(Tape& tape, const Attention& spec) {
  check_heads(tape, "attention", spec.qkv, spec.heads);
  const cpu::AttentionShape shape{.seq       = tape.seq(),
                                  .heads     = spec.heads.heads,
                                  .kv_heads  = spec.heads.kv_heads,
                                  .head_size = spec.heads.head_size,
                                  .scale     = spec.scale};
  const Tensor qkv        = spec.qkv;
  const std::int64_t rows = qkv.rows(), pairs = tape.sequences() * shape.kv_heads;
  const std::int64_t workspaces = std::min(pairs, most_workspaces);
  const Tensor out              = tape.tensor("attention", {rows, shape.out_row()});
  const Tensor log_sums         = tape.tensor("attention log_sums", {rows, shape.heads});
  const double flops            = forward_flops(tape, spec.heads);
  const auto bytes              = static_cast<double>(qkv.num_bytes() + out.num_bytes());

  // Workspace w serves the pairs w, w + workspaces, ...: which thread does which pair changes nothing.
  const auto for_pairs = [=](const Context& context, const auto& body) {
    context.parallel_for(workspaces, [&](std::int64_t workspace) {
      for (std::int64_t pair = workspace; pair < pairs; pair += workspaces) {
        body(pair / shape.kv_heads, pair % shape.kv_heads, workspace);
      }
    });
  };
  const std::int64_t forward_size = cpu::attention_forward_workspace(shape);
  tape.add({.op       = "attention",
            .reads    = qkv,
            .writes   = {out, log_sums, tape.tensor("attention workspace", {workspaces, forward_size})},
            .cost     = {.flops = flops, .bytes_moved = bytes},
            .parallel = true},
           [=]<class T>(const Context& context, T) {
             const cpu::AttentionForward<T> kernel{.shape    = shape,
                                                   .qkv      = context.read<T>(0).data(),
                                                   .out      = context.write<T>(0).data(),
                                                   .log_sums = context.write<T>(1).data()};
             T* workspace = context.write<T>(2).data();
             for_pairs(context, [&](std::int64_t sequence, std::int64_t kv_head, std::int64_t i) {
               cpu::attention_forward(kernel, sequence, kv_head, workspace + i * forward_size);
             });
           });

  const auto input_gradients = [=](Tape& back) {
    if (!back.needs_gradient(qkv)) return;
    const std::int64_t backward_size = cpu::attention_backward_workspace(shape);
    back.add_gradient(qkv,
                      {.op       = "attention_backward",
                       .reads    = {qkv, out, log_sums, back.gradient(out)},
                       .writes   = back.tensor("attention_backward workspace", {workspaces, backward_size}),
                       .cost     = {.flops = 2.5 * flops, .bytes_moved = 2 * bytes},
                       .parallel = true},
                      [=]<class T>(const Context& context, Into<T> d_qkv) {
                        const cpu::AttentionBackward<T> kernel{.shape    = shape,
                                                               .qkv      = context.read<T>(0).data(),
                                                               .out      = context.read<T>(1).data(),
                                                               .log_sums = context.read<T>(2).data(),
                                                               .d_out    = context.read<T>(3).data()};
                        T* workspace = context.write<T>(0).data();
                        for_pairs(context, [&](std::int64_t sequence, std::int64_t kv_head, std::int64_t i) {
                          cpu::attention_backward(kernel, d_qkv, sequence, kv_head, workspace + i * backward_size);
                        });
                      });
  };
  tape.on_backward({.outputs = {out}, .input_gradients = input_gradients});
  return out;
}

}  // namespace stepgraph
