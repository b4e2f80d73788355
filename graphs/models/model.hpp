#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "graphs/models/parameters.hpp"
#include "ops/tape/tape.hpp"

namespace stepgraph {

// Initial elements: normally distributed around 0 with this deviation, or the constant where the deviation is 0.
struct Init {
  double deviation = 0;
  double constant  = 0;
};

// Indices [begin, begin + size) of a tensor of a file, along the dim that tensor parallelism cuts. A weight is made
// of such sections.
struct TensorSection {
  std::string tensor     = {};
  std::int64_t begin     = 0;  // first index of that dim
  std::int64_t size      = 0;
  std::int64_t num_heads = 0;  // more than 0: the section is so many attention heads, and is cut between heads only
  friend bool operator==(const TensorSection&, const TensorSection&) = default;
};

// A weight as ops use it: one or more tensors of a file, or sections of them, laid end to end along `dim`.
// Tensor parallelism cuts each section along `dim`, or leaves all of it to every rank. Heads are divided evenly over
// the ranks; with fewer heads than ranks, several neighbouring ranks hold the same head. Sections without heads are cut
// between any two indices; the first ranks have one index more.
struct WeightSpec {
  std::string name                    = {};  // by which the forward pass of its block asks for it
  TensorShape shape                   = {};  // of the whole
  int dim                             = 0;
  bool cut                            = false;
  std::vector<TensorSection> sections = {};  // empty: one, the tensor of that name
  Init init                           = {};
  // The weight that this one shares values and update with: the same shape, cut and sections (or none given). Several
  // weights may be tied to one, in any stage. Each has a gradient of its own; the update uses their sum, the owner's
  // first, then those of the weights that are tied to it in their order in the model.
  std::string tied_to = {};
  bool norm           = false;  // weight of a norm: ops accept it in f32 beside activations of two bytes
};

// A part of the model that is never divided over pipeline stages. Its forward pass reads its own weights and no others.
// Blocks may use the same name for a weight of theirs, as in "w" of each layer: outside of the block, in files and for
// ties, such a weight is called BLOCK.NAME, "layer1.w". A name that only one block has is used as it is.
struct Block {
  std::string name                = {};
  int layer                       = -1;  // its number where it is a layer; stages are cut between layers
  std::vector<WeightSpec> weights = {};
  std::function<Tensor(Tape&, const Tensor&)> forward = {};  // the first takes tokens (i32), the last returns logits
};

// A model is its forward pass: blocks, each of which takes what the one before it returns. Layers are in the middle;
// what is before the first goes to the first stage, what is after the last to the last.
//
// Activations are [sequences * seq, width]. Logits are [sequences * seq, vocab / tp]: the rank's share of the
// vocabulary.
struct Model {
  std::string kind               = {};  // "gpt2"
  int layers                     = 0;
  std::int64_t width             = 0;
  std::int64_t vocab             = 0;
  std::int64_t context           = 0;  // the longest sequence
  std::int64_t heads             = 0;  // 0: no attention
  std::int64_t kv_heads          = 0;
  std::int64_t inner             = 0;  // width inside the MLP; cut by tensor parallelism
  std::vector<Block> blocks      = {};
  bool logits_are_free           = false;  // no op's backward reads them: their gradient may take their bytes
  std::string config             = {};     // config.json of a Hugging Face folder, as text
  std::vector<std::string> notes = {};     // settings of that config without effect, such as dropout: for people

  // The tensors of a file, in the order of the forward pass; tied ones once.
  [[nodiscard]] ParameterInventory parameters(DType type = DType::f32) const;
};

}  // namespace stepgraph
