#include "graphs/huggingface.hpp"

namespace stepgraph {

Model model_from_config(std::string_view text, std::string_view subject) {
  const ModelConfig config = parse_model_config(text, subject);
  const auto* as_gpt2      = std::get_if<Gpt2Spec>(&config.spec);
  Model model              = as_gpt2 ? gpt2(*as_gpt2) : llama(std::get<LlamaSpec>(config.spec));
  model.config             = config_to_save(text);
  return model;
}

}  // namespace stepgraph
