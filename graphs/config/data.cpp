#include <limits>

#include "engine/base/error.hpp"
#include "graphs/config/sections.hpp"

namespace stepgraph {
namespace {

using Names = ConfigReader::Names;

constexpr auto max_count = std::numeric_limits<std::int64_t>::max();

constexpr std::string_view right = R"({"tokens": "FILE.u16"}, {"text": "FILE"} or {"synthetic": SEED})";

std::vector<std::filesystem::path> read_paths(const ConfigReader& data, std::string_view key) {
  std::vector<std::string> names;
  data.texts(key, names);
  return {names.begin(), names.end()};
}

DataSource read_source(const ConfigReader& root, const ConfigReader& data) {
  Names given;
  for (const std::string_view kind : {"tokens", "text", "synthetic"}) {
    if (data.has(kind)) given.push_back(kind);
  }
  if (given.empty()) root.refuse("data", str("names no source (", right, ")"));
  if (given.size() > 1)
    root.refuse("data", str("has ", given.size(), " sources: ", list_names(given), " (exactly one)"));
  if (data.has("type") && !data.has("tokens"))
    data.refuse("type", str("has no effect with ", given.front(), " (tokens, whose type it is)"));
  if (data.has("synthetic")) {
    SyntheticTokens synthetic;
    data.integer("synthetic", synthetic.seed, 0, std::numeric_limits<std::uint64_t>::max());
    return synthetic;
  }
  if (data.has("text")) return TextFiles{.paths = read_paths(data, "text")};
  TokenFiles files{.paths = read_paths(data, "tokens")};
  if (data.has("type")) files.type = read_enum(data, "type", TokenType::u16, TokenType::u32);
  return files;
}

// The parts of a source that every use of it has.
DataSpec read_spec(const ConfigReader& root, const ConfigReader& data) {
  DataSpec spec{.source = read_source(root, data)};
  if (data.has("ignore")) data.integer("ignore", spec.ignore.emplace(), 0, std::numeric_limits<std::int32_t>::max());
  return spec;
}

}  // namespace

DataSpec read_data(const ConfigReader& root) {
  root.required("data", right);
  const ConfigReader data =
      root.section("data", {"tokens", "text", "synthetic", "type", "epochs", "shuffle", "validation", "ignore"});
  DataSpec spec = read_spec(root, data);
  data.integer("epochs", spec.epochs, 0, max_count);
  data.boolean("shuffle", spec.shuffle);
  data.real("validation", spec.validation, share);
  check_data_spec(spec, "data");
  return spec;
}

EvalPlan read_eval(const ConfigReader& root, const DataSpec& data) {
  EvalPlan eval;
  const ConfigReader section = root.section("eval", {"data", "every", "steps"});
  section.integer("every", eval.every, 0, max_count);
  section.integer("steps", eval.steps, 1, max_count);
  if (section.has("data")) {
    eval.data = read_spec(section, section.section("data", {"tokens", "text", "synthetic", "type", "ignore"}));
    if (data.validation > 0)
      section.refuse("data", str("with data.validation ", data.validation,
                                 ": two sets of sequences for validation (one of them)"));
  }
  const auto needs_every = [&](std::string_view key) {
    section.refuse(key, "has no effect with eval.every 0, which is no validation (eval.every 1 or more)");
  };
  if (eval.every == 0 && eval.data) needs_every("data");
  if (eval.every == 0 && eval.steps != EvalPlan{}.steps) needs_every("steps");
  if (eval.every > 0 && !eval.data && data.validation == 0)
    section.refuse("every", str("is ", eval.every,
                                ", but there is no data for validation (eval.data, or a share "
                                "data.validation of the data)"));
  return eval;
}

CheckpointPlan read_checkpoint(const ConfigReader& root) {
  CheckpointPlan plan;
  const ConfigReader section = root.section("checkpoint", {"folder", "every", "every_s", "keep", "async"});
  if (!section.is_empty_text("folder")) section.text("folder", plan.folder);
  section.integer("every", plan.every, 0, max_count);
  section.real("every_s", plan.every_s, not_negative);
  section.integer("keep", plan.keep, 0, std::numeric_limits<int>::max());
  section.boolean("async", plan.async);
  if (!plan.folder.empty()) return plan;
  const CheckpointPlan usual;
  const std::string_view useless = plan.every != usual.every       ? "every"
                                   : plan.every_s != usual.every_s ? "every_s"
                                   : plan.keep != usual.keep       ? "keep"
                                   : plan.async != usual.async     ? "async"
                                                                   : "";
  if (!useless.empty())
    section.refuse(useless, "has no effect without checkpoint.folder, the folder of the checkpoints (its name)");
  return plan;
}

}  // namespace stepgraph
