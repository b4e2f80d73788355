#include "graphs/huggingface.hpp"

namespace stepgraph {

Model make_model(const std::variant<Gpt2Spec, LlamaSpec, MlpSpec>& spec) {
  struct Make {
    Model operator()(const Gpt2Spec& of) const { return gpt2(of); }
    Model operator()(const LlamaSpec& of) const { return llama(of); }
    Model operator()(const MlpSpec& of) const { return mlp(of); }
  };
  return std::visit(Make(), spec);
}

Model model_from_config(std::string_view text, std::string_view subject) {
  const ModelConfig config = parse_model_config(text, subject);
  Model model              = make_model(config.spec);
  model.config             = config_to_save(text);
  return model;
}

}  // namespace stepgraph
