#include "graphs/models/huggingface.hpp"

#include "engine/base/error.hpp"
#include "graphs/files/files.hpp"

namespace stepgraph {

Model make_model(const std::variant<Gpt2Spec, LlamaSpec, MlpSpec>& spec) {
  struct Make {
    Model operator()(const Gpt2Spec& of) const { return gpt2(of); }
    Model operator()(const LlamaSpec& of) const { return llama(of); }
    Model operator()(const MlpSpec& of) const { return mlp(of); }
  };
  return std::visit(Make(), spec);
}

Model load_model(const std::filesystem::path& folder, double dropout) {
  const std::filesystem::path path = folder / "config.json";
  return model_from_config(read_text(path, std::int64_t{1} << 24), path.string(), dropout);
}

Model model_from_config(std::string_view text, std::string_view subject, double dropout) {
  ModelConfig config = parse_model_config(text, subject);
  std::visit(
      [&](auto& spec) {
        if constexpr (requires { spec.dropout; }) {
          spec.dropout = dropout;
        } else if (dropout > 0) {
          throw Error(ErrorKind::config, str(subject, ": an MLP has no dropout, but dropout is ", dropout, " (0)"));
        }
      },
      config.spec);
  Model model  = make_model(config.spec);
  model.config = config_to_save(text);
  model.notes  = config.notes;
  return model;
}

}  // namespace stepgraph
