#include "graphs/models/mlp.hpp"

#include "engine/base/error.hpp"
#include "graphs/models/huggingface.hpp"
#include "graphs/models/weights.hpp"
#include "ops/layers/embedding.hpp"
#include "ops/layers/linear.hpp"
#include "ops/layers/residual.hpp"
#include "ops/tape/tensor_parallel.hpp"

namespace stepgraph {

Model mlp(const MlpSpec& given) {
  MlpSpec spec = given;
  if (spec.inner == 0) spec.inner = 4 * spec.width;
  if (spec.layers < 1 || spec.width < 1 || spec.context < 1 || spec.vocab < 1 || spec.inner < 1) {
    throw Error(ErrorKind::config, str("mlp: layers ", spec.layers, ", width ", spec.width, ", context ", spec.context,
                                       ", vocab ", spec.vocab, ", inner ", spec.inner, " (each at least 1)"));
  }
  const Init normal{.deviation = spec.init_deviation};
  Model model{.kind    = "mlp",
              .layers  = spec.layers,
              .width   = spec.width,
              .vocab   = spec.vocab,
              .context = spec.context,
              .inner   = spec.inner};
  model.logits_are_free = true;  // a product makes them
  model.config          = model_config(spec);
  model.blocks.push_back(
      {.name    = "embedding",
       .weights = {{.name = "embedding.weight", .shape = {spec.vocab, spec.width}, .cut = true, .init = normal}},
       .forward = [vocab = spec.vocab](Tape& tape, const Tensor& tokens) {
         return tp_sum(tape, embedding(tape, {.tokens      = tokens,
                                              .weight      = tape.weight("embedding.weight"),
                                              .vocab_begin = tp_range(vocab, tape.tp().size, tape.tp().index).begin}));
       }});
  for (int layer = 0; layer < spec.layers; ++layer) {
    const std::string up = str("layers.", layer, ".up"), down = str("layers.", layer, ".down");
    model.blocks.push_back(
        {.name  = str("layer", layer),
         .layer = layer,
         .weights =
             {{.name = up + ".weight", .shape = {spec.inner, spec.width}, .cut = true, .init = normal},
              {.name = up + ".bias", .shape = {spec.inner}, .cut = true},
              {.name = down + ".weight", .shape = {spec.width, spec.inner}, .dim = 1, .cut = true, .init = normal},
              {.name = down + ".bias", .shape = {spec.width}}},
         .forward = [up, down](Tape& tape, const Tensor& x) {
           const Tensor h = linear(tape, {.x          = tp_copy(tape, x),
                                          .weight     = tape.weight(up + ".weight"),
                                          .bias       = tape.weight(up + ".bias"),
                                          .activation = Activation::gelu_tanh,
                                          .name       = "inner"});
           const Tensor y =
               tp_sum(tape, linear(tape, {.x = h, .weight = tape.weight(down + ".weight"), .name = "mlp"}));
           return residual(tape, {.x = x, .branch = y, .bias = tape.weight(down + ".bias")});
         }});
  }
  model.blocks.push_back(
      {.name    = "head",
       .weights = {{.name = "head.weight", .shape = {spec.vocab, spec.width}, .cut = true, .init = normal}},
       .forward = [](Tape& tape, const Tensor& x) {
         return linear(tape, {.x = tp_copy(tape, x), .weight = tape.weight("head.weight"), .name = "logits"});
       }});
  return model;
}

}  // namespace stepgraph
