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
  CHECK(std::get<sg::SyntheticTokens>(config.data.source).seed == 1);
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
      "pipeline":  {"schedule": "1f1b", "chunks": 1, "split": "even", "limit": 0},
      "shard":     {"strategy": "none", "reduce": "last", "prefetch": "backward_pre", "slots": 2, "bucket_mb": 25,
                    "units": "layer", "min_params": 1000, "group": 0},
      "offload":   {"params": false, "grads": false, "optimizer": false, "activations": false, "strategy": "manual",
                    "device_bytes": 0, "device_param_bytes": 0, "host_bytes": 0, "disk_bytes": 0, "disk": "",
                    "slots": 2, "async": true, "overlap": true, "pinned": true, "compress": "none"},
      "update":    {"mode": "synchronous", "max_staleness": 0},
      "precision": {"param": "fp32", "reduce": "fp32", "loss_scale": "none", "keep_low_precision_grads": false,
                    "norm": "fp32"},
      "optimizer": {"kind": "adamw", "lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1,
                    "clip": 1.0, "schedule": {"kind": "constant", "warmup": 0, "decay": 0, "steps": 0, "min": 0},
                    "groups": []},
      "checkpoint": {"folder": "", "every": 0, "every_s": 0, "keep": 2, "async": true},
      "eval": {"every": 0, "steps": 10},
      "recompute": "none",  "memory": {"limit_bytes": 0, "reuse": "tight"},
      "comm": {"algorithm": "direct", "timeout_ms": 30000, "exact": false},
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
  CHECK(config.data == sg::DataSpec{.source = sg::TokenFiles{{"some/file.u16"}}});
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
  CHECK_FALSE(with({"backend=cuda"}).devices);
  CHECK_FALSE(with({"backend=cuda", "devices=[0]"}).devices);  // the default
  CHECK_FALSE(with({"devices=[0]"}).devices);
  CHECK_FALSE(with({"backend=nccl", "devices=all"}).devices);
  CHECK(with({"backend=nccl", "devices=[0]"}).devices == std::vector{0});
  CHECK(with({"layout.dp=4", "backend=cuda", "devices=[1, 0, 1]"}).devices == std::vector{1, 0, 1});
  CHECK(with({"backend=cuda", "devices=all"}).devices == std::vector<int>{});
  CHECK(with({"memory.limit_bytes=123456789012"}).plan.memory_limit_bytes == 123'456'789'012);
  CHECK(with({"memory.limit_bytes=24GiB"}).plan.memory_limit_bytes == std::int64_t{24} << 30);
  CHECK(with({"memory.limit_bytes=\"1.5 MB\""}).plan.memory_limit_bytes == 1'500'000);
  CHECK(with({R"(data={"text": "t.txt"})"}).data == sg::DataSpec{.source = sg::TextFiles{{"t.txt"}}});
  CHECK(with({R"(data={"tokens": ["a.u32", "b.bin"], "type": "u32", "epochs": 0, "shuffle": true, "validation": 0.1,
                      "ignore": 7})"})
            .data == sg::DataSpec{.source     = sg::TokenFiles{{"a.u32", "b.bin"}, sg::TokenType::u32},
                                  .epochs     = 0,
                                  .shuffle    = true,
                                  .validation = 0.1,
                                  .ignore     = 7});
  CHECK(with({R"(data={"text": ["a", "b"]})", "data.epochs=3"}).data ==
        sg::DataSpec{.source = sg::TextFiles{{"a", "b"}}, .epochs = 3});
  CHECK(with({"eval.data.synthetic=5", "eval.data.ignore=3", "eval.every=20", "eval.steps=4"}).eval ==
        sg::EvalPlan{.data = sg::DataSpec{.source = sg::SyntheticTokens{5}, .ignore = 3}, .every = 20, .steps = 4});
  CHECK(with({R"(data={"text": "t.txt", "validation": 0.5})", "eval.every=1"}).eval == sg::EvalPlan{.every = 1});
  CHECK(with({"checkpoint.folder=runs/a", "checkpoint.every=100", "checkpoint.every_s=600.5", "checkpoint.keep=0",
              "checkpoint.async=false"})
            .checkpoint ==
        sg::CheckpointPlan{.folder = "runs/a", .every = 100, .every_s = 600.5, .keep = 0, .async = false});
  CHECK(with({"optimizer.schedule.kind=wsd", "optimizer.schedule.warmup=10", "optimizer.schedule.decay=20",
              "optimizer.schedule.steps=100", "optimizer.schedule.min=0.1"})
            .plan.optimizer.schedule ==
        sg::RateSchedule{.kind = sg::RateKind::wsd, .warmup = 10, .decay = 20, .steps = 100, .min = 0.1});
  CHECK(with({R"(optimizer.groups=[{"match": "*.bias", "weight_decay": 0}, {"match": "wte*", "lr": 1e-4}])"})
            .plan.optimizer.groups ==
        std::vector<sg::OptimizerGroup>{{.match = "*.bias", .weight_decay = 0.0}, {.match = "wte*", .lr = 1e-4}});
  CHECK(with({"backend=nccl", "comm.algorithm=ring"}).nccl_algorithm == sg::Algorithm::ring);
  CHECK(with({"backend=nccl", "comm.algorithm=ring"}).plan.algorithm == sg::Algorithm::direct);
  CHECK(with({"backend=nccl", "comm.exact=true"}).exact);
  CHECK(!with({"backend=nccl"}).exact);
  CHECK(with({}).plan.recompute == sg::Recompute::none);
  CHECK(with({"recompute=none"}).plan.recompute == sg::Recompute::none);
  CHECK(with({"recompute=selective"}).plan.recompute == sg::Recompute::selective);
  CHECK(with({"recompute=full"}).plan.recompute == sg::Recompute::full);
  CHECK(with({"recompute=auto"}).plan.recompute == sg::Recompute::automatic);
  CHECK(with({"pipeline.schedule=my own.csv"}).plan.pipeline.schedule == "my own.csv");
  CHECK(with({"layout.pp=2", "pipeline.split=[3, 1]"}).plan.pipeline.split == std::vector{3, 1});
  CHECK(with({"layout.pp=2", "pipeline.split=even"}).plan.pipeline.split.empty());
  CHECK(with({"layout.pp=3", "pipeline.split=balanced"}).plan.pipeline == sg::PipelinePlan{.balanced = true});
  CHECK(with({"pipeline.split=balanced", "comm.machine=m.json"}).machine == "m.json");
  CHECK(with({"layout.pp=2", "pipeline.schedule=auto", "pipeline.limit=1.5"}).plan.pipeline ==
        sg::PipelinePlan{.schedule = "auto", .limit = 1.5});
  CHECK(with({"layout.pp=2", "pipeline.schedule=auto", "pipeline.limit=2GiB"}).plan.pipeline.limit_bytes ==
        std::int64_t{2} << 30);
  CHECK(with({"pipeline.schedule=auto", "comm.machine=m.json"}).machine == "m.json");
  for (const char* kind : {"zb-v", "v-half", "v-min", "dualpipe-v"}) {  // two chunks are the default
    const std::string schedule = std::string("pipeline.schedule=") + kind;
    const sg::PipelinePlan plan{.schedule = kind, .chunks = 2};
    CHECK(with({"layout.pp=2", schedule}).plan.pipeline == plan);
    CHECK(with({"layout.pp=2", schedule, "pipeline.chunks=2"}).plan.pipeline == plan);
  }
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
           {"backend=nccl", "comm.algorithm=tree"},
           {"backend=nccl", "comm.exact=true"},
           {"layout.pp=2", "pipeline.split=[3,1]"},
           {"layout.pp=3", "pipeline.split=balanced"},
           {"layout.pp=2", "pipeline.schedule=zb-v"},
           {"layout.pp=2", "pipeline.schedule=gpipe", "pipeline.chunks=2"},
           {R"(data={"tokens": ["a.u32", "b.bin"], "type": "u32", "epochs": 0, "shuffle": true, "validation": 0.1})",
            "data.ignore=7", "eval.every=5"},
           {R"(data={"tokens": "x.u16", "type": "u16"})", R"(eval={"data": {"tokens": "y.u32"}, "every": 3})"},
           {"data.ignore=0", R"(eval={"data": {"synthetic": 2, "ignore": 9}, "every": 3, "steps": 1})"},
           {"checkpoint.folder=c", "checkpoint.every=7", "checkpoint.every_s=0.1", "checkpoint.keep=0"},
           {"optimizer.schedule.kind=cosine", "optimizer.schedule.warmup=3", "optimizer.schedule.min=0.1"},
           {"optimizer.schedule.kind=wsd", "optimizer.schedule.decay=3", "optimizer.schedule.steps=9"},
           {R"(optimizer.groups=[{"match": "a*", "lr": 0}, {"match": "?", "lr": 0.1, "weight_decay": 1e-3}])"},
           {"layout.dp=2", "backend=gloo", "world.rank=1", "world.size=2", "world.address=node0:29500"},
           {"layout.dp=2", "backend=cuda", "devices=[0,1]"},
           {"layout.dp=2", "backend=cuda", "devices=all"},
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
  CHECK(config.data == sg::DataSpec{.source = sg::TextFiles{{"a=b"}}});
  CHECK(with({"data={}", "data.tokens=with=sign.u16"}).data ==
        sg::DataSpec{.source = sg::TokenFiles{{"with=sign.u16"}}});
  CHECK(std::get<sg::SyntheticTokens>(
            sg::parse_config("{}", std::vector<std::string>{"model.kind=mlp", "data.synthetic=3", "batch.seq=16"})
                .data.source)
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

TEST_CASE("keys of data, validation, checkpoints and schedules without effect are refused by name",
          "[graphs][config][refuses]") {
  const auto refuses = [](const std::vector<std::string>& overrides, const std::string& what) {
    CAPTURE(overrides);
    std::string found;
    try {
      static_cast<void>(with(overrides));
    } catch (const sg::Error& error) {
      found = error.what();
    }
    CHECK_THAT(found, ContainsSubstring(what));
  };
  refuses({"data.tokens=x"}, "data: has 2 sources: tokens, synthetic (exactly one)");
  refuses({R"(data={"text": "x", "type": "u16"})"}, "data.type: has no effect with text (tokens, whose type it is)");
  refuses({R"(data={"tokens": "x", "type": "u8"})"}, "data.type: \"u8\" is unknown (known: u16, u32)");
  refuses({R"(data={"tokens": []})"}, "data.tokens: [] is empty (a name, or a list of names)");
  refuses({R"(data={"tokens": ["a", 3]})"}, "data.tokens: 3 in the list is not a name (text in quotes)");
  refuses({"data.shuffle=true"}, "data.shuffle: has no effect with synthetic data, which has no end (tokens or text)");
  refuses({"data.epochs=2"}, "data.epochs: has no effect with synthetic data");
  refuses({R"(data={"text": "x", "validation": 1})"}, "data.validation: 1 is out of range");
  refuses({"eval.every=5"}, "eval.every: is 5, but there is no data for validation (eval.data, or a share");
  refuses({"eval.data.synthetic=1"}, "eval.data: has no effect with eval.every 0");
  refuses({"eval.steps=3"}, "eval.steps: has no effect with eval.every 0");
  refuses({R"(eval={"data": {}, "every": 1})"}, "eval.data: names no source");
  refuses({R"(eval={"data": {"text": "x", "shuffle": true}, "every": 1})"}, "eval.data.shuffle: unknown key");
  refuses({R"(data={"text": "x", "validation": 0.5})", R"(eval={"data": {"text": "x"}, "every": 1})"},
          "eval.data: with data.validation 0.5: two sets of sequences for validation (one of them)");
  for (const std::string key : {"every=3", "every_s=2.5", "keep=1", "async=false"})
    refuses({"checkpoint." + key},
            "checkpoint." + key.substr(0, key.find('=')) + ": has no effect without checkpoint.folder");
  refuses({"checkpoint.foldr=x"}, "checkpoint.foldr: unknown key (did you mean folder?");
  refuses({"checkpoint.folder=x", "checkpoint.keep=-1"}, "checkpoint.keep: -1 is out of range");
  refuses({"optimizer.schedule.kind=cosine", "optimizer.schedule.decay=3"},
          "optimizer.schedule.decay: 3 has no effect with kind cosine");
  refuses({"optimizer.schedule.kind=wsd"}, "optimizer.schedule.decay: missing with kind wsd");
  refuses({"optimizer.schedule.kind=warmup_stable_decay"}, "is called \"wsd\" here");
  refuses({"optimizer.groups={}"}, "optimizer.groups: {} is not a list");
  refuses({R"(optimizer.groups=[{"lr": 1}])"}, "optimizer.groups[0].match: missing");
  refuses({R"(optimizer.groups=[{"match": "a"}])"}, "optimizer.groups[0].match: 'a' has neither lr nor weight_decay");
  refuses({R"(optimizer.groups=[{"match": "a", "lr": -1}])"}, "optimizer.groups[0].lr: -1 is out of range");
  refuses({R"(optimizer.groups=[{"match": "a", "rate": 1}])"}, "optimizer.groups[0].rate: unknown key");
}
