#include "graphs/models/check_model.hpp"

#include <algorithm>
#include <map>

#include "engine/base/error.hpp"
#include "engine/base/nearest.hpp"
#include "graphs/models/weights.hpp"

namespace stepgraph {
namespace {

class Checker {
 public:
  explicit Checker(Model& model) : model_(model) {}

  void check() {
    const WeightNames names(model_);
    for (Block& block : model_.blocks) {
      for (WeightSpec& weight : block.weights) weight.name = names.full(block, weight);
    }
    check_blocks();
    for (Block& block : model_.blocks) {
      for (WeightSpec& weight : block.weights) check_weight(block, weight);
    }
    // Owners may be declared after the weights that are tied to them.
    for (Block& block : model_.blocks) {
      for (WeightSpec& weight : block.weights) {
        if (!weight.tied_to.empty()) check_tied(weight);
      }
    }
    check_tensors();
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw Error(ErrorKind::config, str("model '", model_.kind, "': ", why));
  }
  [[noreturn]] void refuse(const WeightSpec& weight, const std::string& why) const {
    refuse(str("weight '", weight.name, "' ", why));
  }

  void check_blocks() const {
    int layers = 0;
    bool after = false;
    for (const Block& block : model_.blocks) {
      if (!block.forward) refuse(str("block '", block.name, "' has no forward pass"));
      if (block.layer >= 0 && after)
        refuse(str("block '", block.name, "' is separated from the other layers (layers must be consecutive blocks)"));
      after = after || (layers > 0 && block.layer < 0);
      layers += block.layer >= 0;
    }
    if (layers != model_.layers || layers == 0)
      refuse(str(model_.layers, " layers, but ", layers, " blocks are layers (the same number, at least 1)"));
  }

  void check_weight(const Block& block, const WeightSpec& weight) {
    if (!seen_.emplace(weight.name, &weight).second)
      refuse(weight, str("of block '", block.name, "' is declared twice"));
    check_shape(weight.shape, weight.name);
    if (weight.dim < 0 || static_cast<std::size_t>(weight.dim) >= weight.shape.size())
      refuse(weight, str("has shape ", to_string(weight.shape), " and is cut along dim ", weight.dim,
                         " (a dim of that shape)"));
    std::int64_t size = 0;
    for (const TensorSection& section : weight.sections) {
      if (section.size < 1 || section.begin < 0 || (section.num_heads != 0 && section.size % section.num_heads != 0))
        refuse(weight,
               str("has a section with begin ", section.begin, ", size ", section.size, " and ", section.num_heads,
                   " heads (begin 0 or more, size a positive multiple of the number of heads)"));
      size += section.size;
    }
    const std::int64_t whole = weight.shape[static_cast<std::size_t>(weight.dim)];
    if (!weight.sections.empty() && size != whole)
      refuse(weight,
             str("has sections with a total size of ", size, " (", whole, ", the size of dim ", weight.dim, ")"));
  }

  void check_tied(WeightSpec& weight) const {
    const std::string tied = str("is tied to '", weight.tied_to, "'");
    const auto found       = seen_.find(weight.tied_to);
    if (found == seen_.end()) {
      std::vector<std::string_view> names;
      for (const auto& [name, spec] : seen_) names.push_back(name);
      refuse(weight, str(tied, ", which no block has (", did_you_mean(weight.tied_to, names), "the name of a weight)"));
    }
    const WeightSpec& owner = *found->second;
    if (!owner.tied_to.empty())
      refuse(weight, str(tied, ", which is tied itself ('", owner.tied_to, "': ties lead to a weight of its own)"));
    if (owner.shape != weight.shape)
      refuse(weight,
             str("of ", to_string(weight.shape), " ", tied, " of ", to_string(owner.shape), " (the same shape)"));
    if (owner.cut != weight.cut || owner.dim != weight.dim)
      refuse(weight, str(tied, ", which tensor parallelism cuts in another way (the same cut and dim)"));
    if (owner.norm != weight.norm) refuse(weight, str(tied, "; one of them is the weight of a norm (both, or none)"));
    const std::vector<TensorSection> sections = sections_of(owner);
    if (!weight.sections.empty() && weight.sections != sections)
      refuse(weight, str(tied, ", which has other sections (the same, or none)"));
    weight.sections = sections;
  }

  // Two weights that are filled from one tensor begin as equals and are then updated apart.
  void check_tensors() const {
    std::map<std::string, const WeightSpec*> owners;
    for (const Block& block : model_.blocks) {
      for (const WeightSpec& weight : block.weights) {
        if (!weight.tied_to.empty()) continue;
        for (const TensorSection& section : sections_of(weight)) {
          const auto [place, fresh] = owners.emplace(section.tensor, &weight);
          if (!fresh && place->second != &weight)
            refuse(weight, str("and weight '", place->second->name, "' are both made of tensor '", section.tensor,
                               "' (tie one to the other, or name another tensor)"));
        }
      }
    }
  }

  Model& model_;
  std::map<std::string, const WeightSpec*, std::less<>> seen_;
};

}  // namespace

Model checked_model(const Model& model) {
  Model checked = model;
  Checker(checked).check();
  return checked;
}

}  // namespace stepgraph
