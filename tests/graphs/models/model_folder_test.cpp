#include "graphs/models/model_folder.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <functional>

#include "engine/base/error.hpp"
#include "graphs/files/json_value.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::Message;
using Catch::Matchers::MessageMatches;
using sg::JsonValue;
using stepgraph::testing::data_file;
using stepgraph::testing::TempFolder;

namespace {

// All elements are `value`.
sg::TensorToWrite tensor(std::string name, sg::TensorShape shape, float value = 1) {
  return {.name = std::move(name), .shape = std::move(shape), .fill = std::function([value](std::span<float> out) {
                                                                std::fill(out.begin(), out.end(), value);
                                                              })};
}

void write(const TempFolder& folder, const char* file, const std::vector<sg::TensorToWrite>& tensors) {
  sg::write_safetensors(folder / file, tensors);
}
void write_index(const TempFolder& folder, const JsonValue& index) {
  (void)folder.put("model.safetensors.index.json", sg::json_line(index));
}
void write_map(const TempFolder& folder, const JsonValue& map) {
  write_index(folder, {{"metadata", {{"total_size", 8}}}, {"weight_map", map}});
}

std::vector<float> load(const sg::ModelFolder& folder, std::string_view name, const sg::TensorShape& shape) {
  std::vector<float> out(static_cast<std::size_t>(sg::num_elements(shape)));
  sg::load_tensor(folder, name, shape, std::span(out));
  return out;
}

}  // namespace

TEST_CASE("a folder with one weight file has the tensors of a model", "[graphs][model_folder]") {
  const sg::ModelFolder folder(data_file("golden/llama-tiny"));
  CHECK(folder.names().size() == 39);
  CHECK(folder.contains("model.layers.3.mlp.up_proj.weight"));
  CHECK_FALSE(folder.contains("model.layers.4.mlp.up_proj.weight"));
  CHECK(folder.info("model.layers.3.mlp.up_proj.weight").shape == sg::TensorShape{192, 64});
  std::vector<float> whole(64);
  folder.file_of("model.norm.weight").read("model.norm.weight", std::span(whole));
  CHECK(load(folder, "model.norm.weight", {64}) == whole);
}

TEST_CASE("the shards that an index lists form one folder", "[graphs][model_folder]") {
  const TempFolder folder;
  write(folder, "model-00001-of-00002.safetensors", {tensor("a", {2}, 1), tensor("c", {1}, 3)});
  write(folder, "model-00002-of-00002.safetensors", {tensor("b", {3}, 2)});
  write_map(folder, {{"a", "model-00001-of-00002.safetensors"},
                     {"b", "model-00002-of-00002.safetensors"},
                     {"c", "model-00001-of-00002.safetensors"}});
  const sg::ModelFolder weights(folder.path());
  CHECK(weights.names() == std::vector<std::string>{"a", "b", "c"});
  CHECK(weights.files().size() == 2);
  CHECK(load(weights, "b", {3}) == std::vector<float>{2, 2, 2});
  CHECK(load(weights, "c", {1}) == std::vector<float>{3});
  std::vector<double> wide(2);
  sg::load_tensor(weights, "a", {2}, std::span(wide));
  CHECK(wide == std::vector<double>{1, 1});
}

TEST_CASE("shards may be symbolic links, as in the download cache of Hugging Face", "[graphs][model_folder]") {
  const TempFolder folder, blobs;
  write(blobs, "5f3a", {tensor("a", {2}, 7)});
  std::filesystem::create_symlink(blobs / "5f3a", folder / "model-1.safetensors");
  write_map(folder, {{"a", "model-1.safetensors"}});
  CHECK(load(sg::ModelFolder(folder.path()), "a", {2}) == std::vector<float>{7, 7});
}

TEST_CASE("an index that does not match its shards is refused", "[graphs][model_folder][refuses]") {
  const TempFolder folder;
  const std::string index = (folder / "model.safetensors.index.json").string();
  const auto refused      = [&](const JsonValue& content, const std::string& says) {
    write_index(folder, content);
    CHECK_THROWS_MATCHES(sg::ModelFolder(folder.path()), sg::Error, Message(says));
  };
  const auto map = [](const JsonValue& content) { return JsonValue{{"weight_map", content}}; };
  write(folder, "one", {tensor("a", {2}), tensor("b", {2})});
  write(folder, "two", {tensor("c", {2})});
  refused(JsonValue::list(), index + ": not an object ({...})");
  refused(map(JsonValue::list()), index + ": the object 'weight_map' is missing (tensor names and their files)");
  refused(map(JsonValue::object()), index + ": weight_map is empty (tensor names and their files)");
  refused(map({{"a", 1}}), index + ": weight_map: 'a' is not a file name (\"...\")");
  refused(map({{"a", "../one"}}),
          index + ": weight_map: 'a' is in '../one', outside the folder (a file inside the folder)");
  refused(map({{"a", "x/../../one"}}),
          index + ": weight_map: 'a' is in 'x/../../one', outside the folder (a file inside the folder)");
  refused(map({{"a", "/etc/passwd"}}),
          index + ": weight_map: 'a' is in '/etc/passwd', outside the folder (a file inside the folder)");
  refused(map({{"a", ""}}), index + ": weight_map: 'a' is in '', outside the folder (a file inside the folder)");
  refused(map({{"a", "three"}}), (folder / "three").string() + ": there is no such file");
  refused(map({{"a", "two"}}), index + ": 'a' should be in two, which does not have it");
  refused(map({{"a", "one"}}), (folder / "one").string() + ": has a tensor 'b' that is not in the index");
  write(folder, "two", {tensor("c", {2}), tensor("b", {2})});
  refused(map({{"a", "one"}, {"b", "one"}, {"c", "two"}}),
          (folder / "two").string() + ": has a tensor 'b', but the index says it is in one");
  (void)folder.put("model.safetensors.index.json", R"({"weight_map":{"a":"one","a":"two"}})");
  CHECK_THROWS_MATCHES(sg::ModelFolder(folder.path()), sg::Error,
                       Message(index + ": weight_map.a: given twice (once)"));
}

TEST_CASE("a folder without supported weights is refused with the reason", "[graphs][model_folder][refuses]") {
  const TempFolder folder;
  const auto says = [](const auto&... parts) { return Message(sg::str(parts...)); };
  const auto here = folder.path().string();
  CHECK_THROWS_MATCHES(sg::ModelFolder(folder / "none"), sg::Error,
                       says(here, "/none: there is no such folder (a folder with config.json and model.safetensors)"));
  CHECK_THROWS_MATCHES(sg::ModelFolder(folder.put("file", "")), sg::Error,
                       says(here, "/file: is not a folder (a folder with config.json and model.safetensors)"));
  CHECK_THROWS_MATCHES(sg::ModelFolder(folder.path()), sg::Error,
                       says(here, ": has no weights (model.safetensors or model.safetensors.index.json)"));
  (void)folder.put("pytorch_model.bin", "");
  CHECK_THROWS_MATCHES(
      sg::ModelFolder(folder.path()), sg::Error,
      says(here,
           ": has only pickled weights, which are not supported (model.safetensors or model.safetensors.index.json)"));
}

TEST_CASE("tensors are found with and without the prefix of the model", "[graphs][model_folder]") {
  const TempFolder folder;
  write(
      folder, "model.safetensors",
      {tensor("wte.weight", {4, 2}, 5), tensor("h.0.ln_1.weight", {2}, 6), tensor("h.0.attn.bias", {1, 1, 8, 8}),
       tensor("h.0.attn.masked_bias", {}), tensor("layers.0.mlp.up_proj.weight", {2}), tensor("lm_head.weight", {1})});
  const sg::ModelFolder weights(folder.path());
  CHECK(sg::tensor_name_in(weights, "transformer.wte.weight") == "wte.weight");
  CHECK(sg::tensor_name_in(weights, "model.layers.0.mlp.up_proj.weight") == "layers.0.mlp.up_proj.weight");
  CHECK(sg::tensor_name_in(weights, "lm_head.weight") == "lm_head.weight");
  CHECK(sg::tensor_name_in(weights, "transformer.wpe.weight").empty());
  CHECK(sg::tensor_name_in(weights, "decoder.wte.weight").empty());
  CHECK(load(weights, "transformer.h.0.ln_1.weight", {2}) == std::vector<float>{6, 6});
  const auto says = [](const char* what) { return MessageMatches(ContainsSubstring(what)); };
  CHECK_THROWS_MATCHES(load(weights, "transformer.wte.weight", {2, 4}), sg::Error,
                       says("model.safetensors: 'wte.weight' has shape 4x2 (2x4 in the model)"));
  CHECK_THROWS_MATCHES(load(weights, "transformer.wpe.weight", {2}), sg::Error,
                       says(": there is no tensor 'transformer.wpe.weight'"));
}

TEST_CASE("weights that match the model are accepted, also beside buffers of older files", "[graphs][model_folder]") {
  const std::vector<sg::Parameter> gpt2 = {{.name = "transformer.wte.weight", .shape = {4, 2}},
                                           {.name = "transformer.h.0.ln_1.weight", .shape = {2}}};
  const TempFolder folder;
  write(folder, "model.safetensors",
        {tensor("wte.weight", {4, 2}), tensor("h.0.ln_1.weight", {2}), tensor("h.0.attn.bias", {1, 1, 8, 8}),
         tensor("h.0.attn.masked_bias", {}), tensor("lm_head.weight", {4, 2})});
  CHECK_NOTHROW(sg::check_tensors(sg::ModelFolder(folder.path()), gpt2));
  const std::vector<sg::Parameter> llama = {{.name = "model.embed_tokens.weight", .shape = {4, 2}},
                                            {.name = "lm_head.weight", .shape = {4, 2}}};
  write(folder, "model.safetensors",
        {tensor("model.embed_tokens.weight", {4, 2}, 1), tensor("lm_head.weight", {4, 2}, 2),
         tensor("model.layers.0.self_attn.rotary_emb.inv_freq", {8})});
  CHECK_NOTHROW(sg::check_tensors(sg::ModelFolder(folder.path()), llama));
  // The golden folder matches its own tensors.
  const sg::ModelFolder golden(data_file("golden/gpt2-tiny"));
  std::vector<sg::Parameter> expected;
  for (const auto& name : golden.names()) expected.push_back({.name = name, .shape = golden.info(name).shape});
  CHECK_NOTHROW(sg::check_tensors(golden, expected));
}

TEST_CASE("one message lists all mismatches of the weights", "[graphs][model_folder][refuses]") {
  const TempFolder folder;
  const std::vector<sg::Parameter> expected = {{.name = "transformer.wte.weight", .shape = {4, 2}},
                                               {.name = "transformer.wpe.weight", .shape = {4, 2}},
                                               {.name = "transformer.ln_f.bias", .shape = {2}}};
  const auto refused                        = [&](const std::string& says) {
    CHECK_THROWS_MATCHES(sg::check_tensors(sg::ModelFolder(folder.path()), expected), sg::Error,
                                                Message(sg::str(folder.path().string(), ": the weights do not match config.json: ", says)));
  };
  write(folder, "model.safetensors",
        {tensor("transformer.wte.weight", {4, 2}, 1), tensor("transformer.ln_f.bias", {3}), tensor("score", {1}),
         tensor("lm_head.weight", {4, 2}, 2)});
  refused(
      "missing 1 tensors: 'transformer.wpe.weight'; not expected 1: 'score'; 'transformer.ln_f.bias' has shape 3, "
      "not 2; 'lm_head.weight' differs from 'transformer.wte.weight', but the config ties them");
  // A long list is truncated.
  std::vector<sg::TensorToWrite> many = {tensor("wte.weight", {4, 2}), tensor("wpe.weight", {4, 2}),
                                         tensor("ln_f.bias", {2})};
  for (char letter = 'a'; letter <= 'k'; ++letter) many.push_back(tensor(std::string(1, letter), {1}));
  write(folder, "model.safetensors", many);
  refused("not expected 11: 'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h' and 3 more");
  // Elements that are not floating-point numbers.
  const std::string header = R"({"ln_f.bias":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}})";
  (void)folder.put("model.safetensors",
                   std::string{static_cast<char>(header.size()), 0, 0, 0, 0, 0, 0, 0} + header + "12345678");
  refused(
      "missing 2 tensors: 'transformer.wte.weight', 'transformer.wpe.weight'; 'ln_f.bias' has type I32, not F64, F32, "
      "F16 or BF16");
}
