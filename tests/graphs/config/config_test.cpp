#include "graphs/config/config.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <vector>

#include "engine/base/error.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr const char* smallest = R"({"model": {"kind": "gpt2"}, "data": {"synthetic": 1}, "batch": {}})";

sg::Config with(const std::vector<std::string>& overrides) { return sg::parse_config(smallest, overrides); }

}  // namespace

TEST_CASE("keys that a config omits have the defaults of DESIGN", "[graphs][config]") {
  const sg::Config config = sg::parse_config(smallest);
  CHECK(std::get<sg::Gpt2Spec>(config.model) == sg::Gpt2Spec{});
  CHECK(std::get<sg::SyntheticTokens>(config.data).seed == 1);
  CHECK(config.batch == sg::BatchSpec{.global = 8, .micro = 2, .seq = 128});
  CHECK(config.plan == sg::Plan{});
  CHECK(config.timeout_ms == 30'000);
  CHECK(config.seed == 0);
  CHECK(config.threads == 0);
  CHECK(config.backend == "loopback");
}

TEST_CASE("a config that spells out every default equals the smallest config", "[graphs][config]") {
  const sg::Config config = sg::parse_config(R"(
    { "model":     {"kind": "gpt2", "layers": 4, "width": 256, "heads": 8, "context": 128, "vocab": 4096},
      "data":      {"synthetic": 1},
      "batch":     {"global": 8, "micro": 2, "seq": 128},
      "layout":    {"dp": 1, "tp": 1, "pp": 1, "order": "pp-dp-tp", "devices_per_node": 8, "sequence_parallel": false},
      "pipeline":  {"schedule": "1f1b", "chunks": 1, "split": "even"},
      "shard":     {"strategy": "none", "reduce": "last", "prefetch": "backward_pre", "slots": 2, "bucket_mb": 25,
                    "units": "layer", "min_params": 1000, "group": 0},
      "offload":   {"params": false, "grads": false, "optimizer": false},
      "precision": {"param": "fp32", "reduce": "fp32", "loss_scale": "none", "keep_low_precision_grads": false,
                    "norm": "fp32"},
      "optimizer": {"kind": "adamw", "lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1,
                    "clip": 1.0},
      "recompute": "none",  "memory": {"limit_bytes": 0, "reuse": "tight"},
      "comm": {"algorithm": "direct", "timeout_ms": 30000},
      "seed": 0,  "threads": 0,  "backend": "loopback" })");
  CHECK(config == sg::parse_config(smallest));
}

TEST_CASE("every config key sets its field", "[graphs][config]") {
  const sg::Config config = sg::parse_config(R"({
    "model": {"kind": "llama", "layers": 6, "width": 96, "heads": 6, "kv_heads": 2, "head_size": 32, "context": 64,
              "vocab": 256, "inner": 160, "eps": 1e-6, "rope_theta": 5e5, "init_deviation": 0.1, "tied": true,
              "attention_bias": true, "mlp_bias": true},
    "data": {"tokens": "some/file.u16"}, "batch": {"global": 24, "micro": 3, "seq": 64},
    "layout": {"dp": 4, "tp": 2, "pp": 3, "order": "tp-dp-pp", "devices_per_node": 4},
    "pipeline": {"schedule": "gpipe", "chunks": 2}, "precision": {"param": "fp64"},
    "optimizer": {"kind": "sgd", "lr": 0.5, "momentum": 0.25, "weight_decay": 0, "clip": 0},
    "memory": {"reuse": "free"}, "comm": {"algorithm": "ring", "timeout_ms": 7},
    "seed": 18446744073709551615, "threads": 3})");
  CHECK(std::get<sg::LlamaSpec>(config.model) == sg::LlamaSpec{.layers         = 6,
                                                               .width          = 96,
                                                               .heads          = 6,
                                                               .kv_heads       = 2,
                                                               .head_size      = 32,
                                                               .context        = 64,
                                                               .vocab          = 256,
                                                               .inner          = 160,
                                                               .eps            = 1e-6,
                                                               .rope_theta     = 5e5,
                                                               .init_deviation = 0.1,
                                                               .tied           = true,
                                                               .attention_bias = true,
                                                               .mlp_bias       = true});
  CHECK(std::get<sg::TokenFile>(config.data).path == "some/file.u16");
  CHECK(config.batch == sg::BatchSpec{.global = 24, .micro = 3, .seq = 64});
  CHECK(config.plan.layout == sg::LayoutSpec{.dp = 4, .tp = 2, .pp = 3, .order = "tp-dp-pp", .devices_per_node = 4});
  CHECK(config.plan.pipeline == sg::PipelinePlan{.schedule = "gpipe", .chunks = 2});
  CHECK(config.plan.precision == sg::PrecisionPlan{.param = sg::DType::f64, .reduce = sg::DType::f64});
  CHECK(config.plan.optimizer ==
        sg::OptimizerPlan{.kind = sg::OptimizerKind::sgd, .lr = 0.5, .momentum = 0.25, .weight_decay = 0, .clip = 0});
  CHECK(config.plan.reuse == sg::Reuse::free);
  CHECK(config.plan.algorithm == sg::Algorithm::ring);
  CHECK(config.timeout_ms == 7);
  CHECK(config.seed == 18446744073709551615u);
  CHECK(config.threads == 3);

  CHECK(std::get<sg::Gpt2Spec>(with({R"(model={"inner": 512, "activation": "gelu", "eps": 1e-4, "init_deviation": 0.5,
                                              "tied": false, "scale_attention": false,
                                              "scale_attention_by_layer": true})"})
                                   .model) == sg::Gpt2Spec{.inner                    = 512,
                                                           .activation               = sg::Gelu::exact,
                                                           .eps                      = 1e-4,
                                                           .init_deviation           = 0.5,
                                                           .tied                     = false,
                                                           .scale_attention          = false,
                                                           .scale_attention_by_layer = true});
  CHECK(std::get<sg::MlpSpec>(with({R"(model={"kind": "mlp", "layers": 2, "width": 8, "context": 128, "vocab": 16,
                                             "inner": 24, "init_deviation": 0})"})
                                  .model) ==
        sg::MlpSpec{.layers = 2, .width = 8, .context = 128, .vocab = 16, .inner = 24, .init_deviation = 0});
  CHECK(std::get<sg::LoadFrom>(with({R"(model={"load": "a folder"})"}).model).folder == "a folder");
  CHECK(std::get<sg::LoadFrom>(with({R"(model={"load": "DIR", "dropout": 0.25})"}).model).dropout == 0.25);
  CHECK(std::get<sg::Gpt2Spec>(with({"model.dropout=0.25"}).model).dropout == 0.25);
  CHECK(with({"precision.param=bf16"}).plan.precision ==
        sg::PrecisionPlan{.param = sg::DType::bf16, .reduce = sg::DType::f32});
  CHECK(with({"precision.reduce=bf16"}).plan.precision ==
        sg::PrecisionPlan{.param = sg::DType::f32, .reduce = sg::DType::bf16});
  CHECK(with({"precision.param=fp16"}).plan.precision == sg::PrecisionPlan{.param = sg::DType::f16});
  CHECK(with({"precision.param=fp64"}).plan.precision == sg::PrecisionPlan{.param = sg::DType::f64});
  CHECK(with({"precision.param=fp16"}).plan.precision.scaling() == sg::Scaling::dynamic);
  CHECK(with({"precision.reduce=fp16"}).plan.precision.scaling() == sg::Scaling::dynamic);
  CHECK(with({"precision.param=bf16"}).plan.precision.scaling() == sg::Scaling::none);
  CHECK(with({"precision.param=fp16", "precision.loss_scale=none"}).plan.precision.scaling() == sg::Scaling::none);
  CHECK(with({"precision.param=bf16", "precision.loss_scale=dynamic"}).plan.precision.scaling() ==
        sg::Scaling::dynamic);
  CHECK(with({"precision.param=fp16", "precision.loss_scale=1024"}).plan.precision.loss_scale ==
        sg::LossScale{.scaling = sg::Scaling::fixed, .value = 1024});
  CHECK(with({"precision.reduce=bf16", "precision.keep_low_precision_grads=true"})
            .plan.precision.keep_low_precision_grads);
  CHECK(with({"precision.param=bf16", "precision.norm=fp32"}).plan.precision.norm_type() == sg::DType::f32);
  CHECK(with({"comm.algorithm=adaptive", "comm.machine=m.json"}).machine == "m.json");
  CHECK(with({"comm.machine="}).machine.empty());
  CHECK(with({"layout.dp=4", "backend=mpi", "world.rank=3", "world.size=4", "world.address=node0"}).world ==
        sg::WorldSpec{.rank = 3, .size = 4, .address = "node0"});
  CHECK(with({"world.rank=-1", "world.size=0", "world.address="}).world == sg::WorldSpec{});
  CHECK(with({"memory.limit_bytes=123456789012"}).plan.memory_limit_bytes == 123'456'789'012);
  CHECK(with({"memory.limit_bytes=24GiB"}).plan.memory_limit_bytes == std::int64_t{24} << 30);
  CHECK(with({"memory.limit_bytes=\"1.5 MB\""}).plan.memory_limit_bytes == 1'500'000);
  CHECK(std::get<sg::TextFile>(with({R"(data={"text": "t.txt"})"}).data).path == "t.txt");
  CHECK(with({}).plan.recompute == sg::Recompute::none);
  CHECK(with({"recompute=none"}).plan.recompute == sg::Recompute::none);
  CHECK(with({"recompute=selective"}).plan.recompute == sg::Recompute::selective);
  CHECK(with({"recompute=full"}).plan.recompute == sg::Recompute::full);
  CHECK(with({"pipeline.schedule=my own.csv"}).plan.pipeline.schedule == "my own.csv");
  CHECK(with({"layout.pp=2", "pipeline.split=[3, 1]"}).plan.pipeline.split == std::vector{3, 1});
  CHECK(with({"layout.pp=2", "pipeline.split=even"}).plan.pipeline.split.empty());
}

TEST_CASE("a config printed as JSON parses back to the same config", "[graphs][config]") {
  for (const std::vector<std::string>& overrides : std::vector<std::vector<std::string>>{
           {},
           {R"(model={"kind": "llama", "kv_heads": 2, "rope_theta": 123456.789})", "layout.tp=2",
            "seed=12345678901234567890"},
           {R"(model={"kind": "mlp"})", R"(data={"text": "a \"quoted\" name"})", "precision.param=fp64"},
           {R"(model={"load": "DIR"})", R"(data={"tokens": "x.u16"})", "batch.seq=7", "optimizer.kind=sgd"},
           {"optimizer.lr=0.1", "optimizer.eps=1e-300", "pipeline.schedule=zb-h2", "comm.algorithm=tree",
            "recompute=full"},
           {"layout.tp=2", "layout.sequence_parallel=true", "precision.param=bf16", "model.dropout=0.125"},
           {"precision.param=fp16", "precision.norm=fp32"},
           {"precision.param=fp16", "precision.loss_scale=none"},
           {"precision.param=bf16", "precision.loss_scale=dynamic", "precision.reduce=fp16",
            "precision.keep_low_precision_grads=true"},
           {"precision.loss_scale=0.1"},
           {"comm.algorithm=adaptive", "comm.machine=m.json"},
           {"layout.pp=2", "pipeline.split=[3,1]"},
           {"layout.dp=2", "backend=gloo", "world.rank=1", "world.size=2", "world.address=node0:29500"},
           {"precision.reduce=bf16", R"(model={"load": "DIR", "dropout": 0.5})", "data.synthetic=1"},
           {"model.activation=gelu", "memory.reuse=free", "threads=2", "comm.timeout_ms=1", "recompute=selective"},
       }) {
    CAPTURE(overrides);
    const sg::Config config = with(overrides);
    const std::string text  = sg::to_json(config);
    CHECK(text.find('\n') == text.npos);
    CHECK(sg::parse_config(text) == config);
    CHECK(sg::to_json(sg::parse_config(text)) == text);
  }
  CHECK_THAT(sg::to_json(with({})), ContainsSubstring(R"("layout":{"dp":1,"tp":1,"pp":1,"order":"pp-dp-tp")") &&
                                        ContainsSubstring(R"("seed":0)"));
}

TEST_CASE("an override is JSON or else a string, and creates missing sections", "[graphs][config]") {
  const sg::Config config = with({"layout.dp=2", "layout.dp=4", "optimizer.kind=sgd", "optimizer.momentum=0.5",
                                  "pipeline.schedule=\"gpipe\"", "model.tied=false", "data={\"text\": \"a=b\"}"});
  CHECK(config.plan.layout.dp == 4);
  CHECK(config.plan.optimizer.kind == sg::OptimizerKind::sgd);
  CHECK(config.plan.optimizer.momentum == 0.5);
  CHECK(config.plan.pipeline.schedule == "gpipe");
  CHECK_FALSE(std::get<sg::Gpt2Spec>(config.model).tied);
  CHECK(std::get<sg::TextFile>(config.data).path == "a=b");
  CHECK(std::get<sg::TokenFile>(with({"data={}", "data.tokens=with=sign.u16"}).data).path == "with=sign.u16");
  CHECK(std::get<sg::SyntheticTokens>(
            sg::parse_config("{}", std::vector<std::string>{"model.kind=mlp", "data.synthetic=3", "batch.seq=16"}).data)
            .seed == 3);
}

TEST_CASE("a config file is read, and errors name the file", "[graphs][config]") {
  const auto folder = std::filesystem::temp_directory_path() / ("stepgraph-config-" + std::to_string(std::rand()));
  std::filesystem::create_directory(folder);
  const std::string path = (folder / "c.json").string();
  const auto what        = [](const std::string& file) -> std::string {
    try {
      static_cast<void>(sg::read_config(file));
      return {};
    } catch (const sg::Error& error) {
      return error.kind() == sg::ErrorKind::config ? error.what() : "another kind";
    }
  };
  std::ofstream(path) << smallest;
  CHECK(sg::read_config(path) == sg::parse_config(smallest));
  CHECK(sg::read_config(path, std::vector<std::string>{"seed=5"}).seed == 5);
  std::ofstream(path) << "{";
  CHECK_THAT(what(path), ContainsSubstring(path + ": line 1, column 2: "));
  CHECK(what(path + "x") == path + "x: cannot be read: No such file or directory (a config in JSON)");
  CHECK(what(folder.string()) == folder.string() + ": cannot be read: Is a directory (a config in JSON)");
  CHECK(what("/dev/zero") == "/dev/zero: is larger than 1 MiB (a config in JSON)");
  std::filesystem::remove_all(folder);
}
