#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "engine/base/error.hpp"
#include "graphs/config/config.hpp"
#include "graphs/models/huggingface.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/refusals.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::testing::check_refused;
using sg::testing::refusal;
using sg::testing::smallest_config;

TEST_CASE("malformed overrides are refused", "[graphs][config][refuses]") {
  check_refused({
      {{"layout.dp"}, "override 'layout.dp': no '=' (path=value, as in layout.dp=2)"},
      {{"=2"}, "override '=2': a key is empty (path=value, as in layout.dp=2)"},
      {{"layout..dp=2"}, "override 'layout..dp=2': a key is empty (path=value, as in layout.dp=2)"},
      {{".dp=2"}, "override '.dp=2': a key is empty (path=value, as in layout.dp=2)"},
      {{"batch.seq=4", "batch.seq.x=2"}, "override 'batch.seq.x=2': batch.seq is 4, which has no keys"},
      {{"data={\"text\": }"},
       "override 'data={\"text\": }': the value is not JSON: line 1, column 10: syntax error while parsing value - "
       "unexpected '}'; expected '[', '{', or a literal"},
      {{"layout.dq=2"},
       "layout.dq: unknown key (did you mean dp? known: dp, tp, pp, order, devices_per_node, sequence_parallel)"},
      {{"seed="}, "seed: \"\" is not an integer (an integer from 0 to 18446744073709551615)"},
      {{"data.tokens=x"}, "data: has 2 sources: tokens, synthetic (exactly one)"},
      {{"layout={\"dp\": 1, \"dp\": 2}"},
       "override 'layout={\"dp\": 1, \"dp\": 2}': the value is not JSON: dp: given twice (once)"},
  });
}

TEST_CASE("text that is not JSON is refused with its line and column", "[graphs][config][refuses]") {
  CHECK_THAT(refusal(""), ContainsSubstring("line 1, column 1: ") && ContainsSubstring("unexpected end of input"));
  CHECK_THAT(refusal("{\n  \"seed\": 1,\n  \"threads\" 2\n}"), ContainsSubstring("line 3, column 13: "));
  CHECK_THAT(refusal("{\"seed\": 1,}"), ContainsSubstring("line 1, column 12: "));
  CHECK_THAT(refusal("{\n// a comment\n}"), ContainsSubstring("line 2, column 1: "));
  CHECK_THAT(refusal("{\n/* a comment */\n}"), ContainsSubstring("line 2, column 1: "));
  CHECK_THAT(refusal("{\"seed\": 1} x"), ContainsSubstring("line 1, column 13: "));
  CHECK_THAT(refusal("{\"seed\": NaN}"), ContainsSubstring("line 1, column 10: "));
  CHECK_THAT(refusal("{\"seed\": 1e999}"), ContainsSubstring("line 1, column 14: number overflow parsing '1e999'"));
  CHECK_THAT(refusal("{\"seed\": 'x'}"), ContainsSubstring("line 1, column 10: "));
  CHECK_THAT(refusal("{\"a\": \"\xff\"}"), ContainsSubstring("line 1, column 8: "));
  CHECK_THAT(refusal("{\"seed\": 1"), ContainsSubstring("line 1, column 11: "));
  CHECK_THAT(refusal(std::string(100'000, '[')), ContainsSubstring("nested too deep (at most 64 levels)"));
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += "{\"a\":";
  CHECK_THAT(refusal(deep), ContainsSubstring("nested too deep (at most 64 levels)"));
}

TEST_CASE("a duplicate key is refused with its path", "[graphs][config][refuses]") {
  CHECK(refusal(R"({"seed": 1, "seed": 1})") == "seed: given twice (once)");
  CHECK(refusal(R"({"seed": 1, "layout": {"tp": 1, "dp": 2, "tp": 1}})") == "layout.tp: given twice (once)");
  CHECK(refusal(R"({"layout": {"tp": 1}, "batch": {"tp": 1}, "layout": {}})") == "layout: given twice (once)");
  // Comparing each key with all earlier keys would take minutes.
  std::string many = "{";
  for (int i = 0; i < (sg::testing::sanitized() ? 30'000 : 300'000); ++i) many += "\"key" + std::to_string(i) + "\":1,";
  CHECK(refusal(many + "\"key7\":1}") == "key7: given twice (once)");
}

TEST_CASE("model, data and batch are required", "[graphs][config][refuses]") {
  CHECK(refusal("{}") == R"(model: missing ({"kind": "gpt2", ...} or {"load": "DIR"}))");
  CHECK(refusal(R"({"model": {}, "batch": {}})") ==
        R"(data: missing ({"tokens": "FILE.u16"}, {"text": "FILE"} or {"synthetic": SEED}))");
  CHECK(refusal(R"({"model": {}, "data": {"synthetic": 1}})") ==
        R"(batch: missing ({"global": 8, "micro": 2, "seq": 128}))");
  CHECK_THAT(refusal("[1]"),
             ContainsSubstring("config: [1] is not an object (an object with the keys: model, data, batch, "));
  CHECK_THAT(refusal("3"), ContainsSubstring("config: 3 is not an object"));
}

TEST_CASE("unknown keys are refused, with the known keys and the most similar one", "[graphs][config][refuses]") {
  check_refused({
      {{"modle=1"},
       "modle: unknown key (did you mean model? known: model, data, batch, layout, pipeline, shard, offload, "
       "update, precision, optimizer, recompute, memory, comm, checkpoint, eval, world, seed, threads, backend, "
       "devices)"},
      {{"zzz=1"},
       "zzz: unknown key (known: model, data, batch, layout, pipeline, shard, offload, update, precision, optimizer, "
       "recompute, memory, comm, checkpoint, eval, world, seed, threads, backend, devices)"},
      {{"model.layer=2"},
       "model.layer: unknown key of gpt2 (did you mean layers? known: kind, layers, width, context, vocab, inner, "
       "init_deviation, heads, activation, eps, tied, scale_attention, scale_attention_by_layer, dropout)"},
      {{"model.rope_theta=2"},
       "model.rope_theta: not a key of gpt2 (kinds with this key: llama; keys of gpt2: kind, layers, width, context, "
       "vocab, inner, init_deviation, heads, activation, eps, tied, scale_attention, scale_attention_by_layer, "
       "dropout)"},
      {{"model.kind=mlp", "model.heads=2"},
       "model.heads: not a key of mlp (kinds with this key: gpt2, llama; keys of mlp: kind, layers, width, context, "
       "vocab, inner, init_deviation)"},
      {{"model.kind=llama", "model.kvheads=2"},
       "model.kvheads: unknown key of llama (did you mean kv_heads? known: kind, layers, width, context, vocab, inner, "
       "init_deviation, heads, kv_heads, head_size, eps, rope_theta, tied, attention_bias, mlp_bias, dropout)"},
      {{"model={\"laod\": \"DIR\"}"},
       "model.laod: unknown key of gpt2 (did you mean load? known: kind, layers, width, context, vocab, inner, "
       "init_deviation, heads, activation, eps, tied, scale_attention, scale_attention_by_layer, dropout, load)"},
      {{"data.token=x"},
       "data.token: unknown key (did you mean tokens? known: tokens, text, synthetic, type, epochs, shuffle, "
       "validation, ignore)"},
      {{"batch.size=2"}, "batch.size: unknown key (known: global, micro, seq)"},
      {{"layout.ddp=2"},
       "layout.ddp: unknown key (did you mean dp? known: dp, tp, pp, order, devices_per_node, sequence_parallel)"},
      {{"pipeline.shcedule=gpipe"},
       "pipeline.shcedule: unknown key (did you mean schedule? known: schedule, chunks, split, limit)"},
      {{"shard.strategie=full"},
       "shard.strategie: unknown key (did you mean strategy? known: strategy, reduce, prefetch, forward_prefetch, "
       "slots, grad_slots, bucket_mb, first_bucket_mb, bucket_views, delay_all_reduce, find_unused_parameters, "
       "static_graph, reduction, units, min_params, flat, group, reshard_after_forward, reshard_group, "
       "keep_between_microbatches)"},
      {{"offload.param=false"},
       "offload.param: unknown key (did you mean params? known: params, grads, optimizer, activations, strategy, "
       "device_bytes, device_param_bytes, host_bytes, disk_bytes, disk, slots, async, overlap, pinned, compress)"},
      {{"precision.params=fp32"},
       "precision.params: unknown key (did you mean param? known: param, reduce, loss_scale, "
       "keep_low_precision_grads, norm)"},
      {{"optimizer.beta=0.5"},
       "optimizer.beta: unknown key (did you mean beta1? known: kind, lr, weight_decay, clip, schedule, groups, beta1, "
       "beta2, eps, "
       "momentum)"},
      {{"memory.limit=0"}, "memory.limit: unknown key (known: limit_bytes, reuse, preset)"},
      {{"comm.timeout=5"}, "comm.timeout: unknown key (known: algorithm, timeout_ms, machine, exact)"},
  });
  std::string long_key(100'000, 'x');
  CHECK_THAT(refusal(smallest_config, {long_key.append("=1")}), ContainsSubstring("unknown key (known: model"));
}

TEST_CASE("values of the wrong type are refused with their path", "[graphs][config][refuses]") {
  check_refused({
      {{"model=gpt2"},
       "model: \"gpt2\" is not an object (an object with the keys: kind, layers, width, context, vocab, inner, "
       "init_deviation, heads, activation, eps, tied, scale_attention, scale_attention_by_layer, dropout, load)"},
      {{"data=[]"},
       "data: [] is not an object (an object with the keys: tokens, text, synthetic, type, epochs, shuffle, "
       "validation, ignore)"},
      {{"batch=8"}, "batch: 8 is not an object (an object with the keys: global, micro, seq)"},
      {{"layout=null"},
       "layout: null is not an object (an object with the keys: dp, tp, pp, order, devices_per_node, "
       "sequence_parallel)"},
      {{"layout.dp=two"}, "layout.dp: \"two\" is not an integer (an integer from 1 to 1048576)"},
      {{"layout.dp=2.0"}, "layout.dp: 2.0 is not an integer (an integer from 1 to 1048576)"},
      {{"layout.dp=1e1"}, "layout.dp: 1e1 is not an integer (an integer from 1 to 1048576)"},
      {{"layout.dp=true"}, "layout.dp: true is not an integer (an integer from 1 to 1048576)"},
      {{"layout.dp=null"}, "layout.dp: null is not an integer (an integer from 1 to 1048576)"},
      {{"layout.dp={}"}, "layout.dp: {} is not an integer (an integer from 1 to 1048576)"},
      {{"layout.dp=[\"" + std::string(80, 'a') + "\"]"},
       "layout.dp: [\"" + std::string(58, 'a') + "... is not an integer (an integer from 1 to 1048576)"},
      {{"layout.order=1"}, "layout.order: 1 is not a string (text in quotes)"},
      {{"layout.sequence_parallel=0"},
       "layout.sequence_parallel: 0 is not true or false (true or false, without quotes)"},
      {{"pipeline.schedule=1"}, "pipeline.schedule: 1 is not a string (text in quotes)"},
      {{"pipeline.schedule="}, "pipeline.schedule: \"\" is empty (a name)"},
      {{"pipeline.split=odd"},
       "pipeline.split: \"odd\" is not a list (\"even\", \"balanced\", or a list of integers from 1 to 1048576)"},
      {{"pipeline.split=balance"},
       "pipeline.split: \"balance\" is not a list (did you mean balanced? \"even\", \"balanced\", or a list of integers "
       "from 1 to 1048576)"},
      {{"pipeline.split=[]"},
       "pipeline.split: [] is not a list (\"even\", \"balanced\", or a list of integers from 1 to 1048576)"},
      {{"pipeline.split=[4,0]"},
       "pipeline.split: 0 in the list (\"even\", \"balanced\", or a list of integers from 1 to 1048576)"},
      {{"pipeline.split=[2,\"2\"]"},
       "pipeline.split: \"2\" in the list (\"even\", \"balanced\", or a list of integers from 1 to 1048576)"},
      {{"pipeline.chunks=\"1\""}, "pipeline.chunks: \"1\" is not an integer (an integer from 1 to 1048576)"},
      {{"model.kind=1"}, "model.kind: 1 is not a string (one of: gpt2, llama, mlp)"},
      {{"model.tied=1"}, "model.tied: 1 is not true or false (true or false, without quotes)"},
      {{"model.tied=yes"}, "model.tied: \"yes\" is not true or false (true or false, without quotes)"},
      {{"model.eps=small"}, "model.eps: \"small\" is not a number (a number above 0)"},
      {{"model.activation=7"}, "model.activation: 7 is not a string (one of: gelu_new, gelu)"},
      {{"model={\"load\": 1}"}, "model.load: 1 is not a string (text in quotes)"},
      {{"model={\"load\": \"\"}"}, "model.load: \"\" is empty (a name)"},
      {{"model={\"load\": \"a\\u0000b\"}"}, "model.load: \"a\\u0000b\" has a zero byte (a name)"},
      {{"data={\"tokens\": 1}"}, "data.tokens: 1 is not a string (text in quotes)"},
      {{"data={\"tokens\": \"\"}"}, "data.tokens: \"\" is empty (a name)"},
      {{"data={\"text\": 3}"}, "data.text: 3 is not a string (text in quotes)"},
      {{"data={\"synthetic\": true}"},
       "data.synthetic: true is not an integer (an integer from 0 to 18446744073709551615)"},
      {{"shard.strategy=1"}, "shard.strategy: 1 is not a string (one of: none, zero1, grad_op, full, hybrid)"},
      {{"shard.slots=x"}, "shard.slots: \"x\" is not an integer (an integer from 1 to 2147483647)"},
      {{"shard.prefetch=false"}, "shard.prefetch: false is not a string (one of: backward_pre, backward_post, none)"},
      {{"shard.units=1"}, "shard.units: 1 is not a string (text in quotes)"},
      {{"shard.bucket_mb=big"}, "shard.bucket_mb: \"big\" is not a number (a number above 0)"},
      {{"shard.min_params=1.5"}, "shard.min_params: 1.5 is not an integer (an integer from 0 to 9223372036854775807)"},
      {{"shard.group=-"}, "shard.group: \"-\" is not an integer (an integer from 0 to 2147483647)"},
      {{"offload.params=0"}, "offload.params: 0 is not true or false (true or false, without quotes)"},
      {{"precision.param=32"}, "precision.param: 32 is not a string (one of: fp32, fp64, bf16, fp16)"},
      {{"precision.norm=32"}, "precision.norm: 32 is not a string (one of: fp32, fp64, bf16, fp16)"},
      {{"precision.loss_scale=true"},
       "precision.loss_scale: true is not a string (one of: none, dynamic, or a number above 0)"},
      {{"precision.keep_low_precision_grads=1"},
       "precision.keep_low_precision_grads: 1 is not true or false (true or false, without quotes)"},
      {{"optimizer.lr=fast"}, "optimizer.lr: \"fast\" is not a number (a number 0 or more)"},
      {{"recompute=false"}, "recompute: false is not a string (one of: none, selective, full, auto)"},
      {{"memory.limit_bytes=none"},
       "memory.limit_bytes: 'none' is not a size (bytes, or a number with B, KiB, MiB, GiB, TiB, PiB, kB, MB, GB, TB "
       "or "
       "PB: 24GiB)"},
      {{"memory.limit_bytes=true"}, "memory.limit_bytes: true is not a size (bytes, or a string: \"24GiB\")"},
      {{"memory.limit_bytes=1.5"}, "memory.limit_bytes: 1.5 is not a size (bytes, or a string: \"24GiB\")"},
      {{"memory.reuse=true"}, "memory.reuse: true is not a string (one of: free, tight)"},
      {{"comm.algorithm=0"}, "comm.algorithm: 0 is not a string (one of: direct, ring, tree, hierarchical, adaptive)"},
      {{"seed=x"}, "seed: \"x\" is not an integer (an integer from 0 to 18446744073709551615)"},
      {{"seed=1.5"}, "seed: 1.5 is not an integer (an integer from 0 to 18446744073709551615)"},
      {{"threads=all"}, "threads: \"all\" is not an integer (an integer from 0 to 1024)"},
      {{"backend=1"}, "backend: 1 is not a string (one of: loopback, cuda, gloo, mpi, nccl)"},
  });
}

TEST_CASE("numbers out of range are refused with their path", "[graphs][config][refuses]") {
  check_refused({
      {{"model.layers=0"}, "model.layers: 0 is out of range (an integer from 1 to 16384)"},
      {{"model.layers=4294967297"}, "model.layers: 4294967297 is out of range (an integer from 1 to 16384)"},
      {{"model.width=-1"}, "model.width: -1 is out of range (an integer from 1 to 1048576)"},
      {{"model.heads=0"}, "model.heads: 0 is out of range (an integer from 1 to 1048576)"},
      {{"model.context=0"}, "model.context: 0 is out of range (an integer from 1 to 16777216)"},
      {{"model.vocab=2147483648"}, "model.vocab: 2147483648 is out of range (an integer from 1 to 2147483647)"},
      {{"model.inner=-4"}, "model.inner: -4 is out of range (an integer from 0 to 4194304)"},
      {{"model.eps=0"}, "model.eps: 0 is out of range (a number above 0)"},
      {{"model.init_deviation=-1"}, "model.init_deviation: -1 is out of range (a number 0 or more)"},
      {{"model.kind=llama", "model.kv_heads=-1"}, "model.kv_heads: -1 is out of range (an integer from 0 to 1048576)"},
      {{"model.kind=llama", "model.head_size=-1"}, "model.head_size: -1 is out of range (an integer from 0 to 65536)"},
      {{"model.kind=llama", "model.head_size=50331648"},
       "model.head_size: 50331648 is out of range (an integer from 0 to 65536)"},
      {{"model.kind=llama", "model.width=1048576"},
       "model.heads: 8 heads of width / heads = 131072 (a head size of at most 65536)"},
      {{"model.kind=llama", "model.rope_theta=0"}, "model.rope_theta: 0 is out of range (a number above 0)"},
      {{"data.synthetic=-1"}, "data.synthetic: -1 is out of range (an integer from 0 to 18446744073709551615)"},
      {{"data.synthetic=18446744073709551616"},
       "data.synthetic: 18446744073709551616 is out of range (an integer from 0 to 18446744073709551615)"},
      {{"batch.global=0"}, "batch.global: 0 is out of range (an integer from 1 to 2147483647)"},
      {{"batch.micro=0"}, "batch.micro: 0 is out of range (an integer from 1 to 2147483647)"},
      {{"batch.seq=2147483648"}, "batch.seq: 2147483648 is out of range (an integer from 1 to 2147483647)"},
      {{"layout.dp=0"}, "layout.dp: 0 is out of range (an integer from 1 to 1048576)"},
      {{"layout.tp=-2"}, "layout.tp: -2 is out of range (an integer from 1 to 1048576)"},
      {{"layout.pp=99999999999999999999"},
       "layout.pp: 99999999999999999999 is out of range (an integer from 1 to 1048576)"},
      {{"layout.devices_per_node=0"}, "layout.devices_per_node: 0 is out of range (an integer from 1 to 1048576)"},
      {{"pipeline.chunks=0"}, "pipeline.chunks: 0 is out of range (an integer from 1 to 1048576)"},
      {{"shard.slots=0"}, "shard.slots: 0 is out of range (an integer from 1 to 2147483647)"},
      {{"shard.bucket_mb=0"}, "shard.bucket_mb: 0 is out of range (a number above 0)"},
      {{"shard.min_params=-1"}, "shard.min_params: -1 is out of range (an integer from 0 to 9223372036854775807)"},
      {{"shard.group=-1"}, "shard.group: -1 is out of range (an integer from 0 to 2147483647)"},
      {{"optimizer.lr=-1e-3"}, "optimizer.lr: -1e-3 is out of range (a number 0 or more)"},
      {{"optimizer.beta1=1"}, "optimizer.beta1: 1 is out of range (a number from 0 to less than 1)"},
      {{"optimizer.beta2=-0.1"}, "optimizer.beta2: -0.1 is out of range (a number from 0 to less than 1)"},
      {{"optimizer.eps=0"}, "optimizer.eps: 0 is out of range (a number above 0)"},
      {{"optimizer.weight_decay=-1"}, "optimizer.weight_decay: -1 is out of range (a number 0 or more)"},
      {{"optimizer.clip=-1"}, "optimizer.clip: -1 is out of range (a number 0 or more)"},
      {{"optimizer.kind=sgd", "optimizer.momentum=1.5"},
       "optimizer.momentum: 1.5 is out of range (a number from 0 to less than 1)"},
      {{"memory.limit_bytes=-1"}, "memory.limit_bytes: -1 is negative (bytes, or a string: \"24GiB\")"},
      {{"comm.timeout_ms=0"}, "comm.timeout_ms: 0 is out of range (an integer from 1 to 2147483647)"},
      {{"world.rank=-2"}, "world.rank: -2 is out of range (an integer from -1 to 2147483647)"},
      {{"world.size=-1"}, "world.size: -1 is out of range (an integer from 0 to 2147483647)"},
      {{"seed=-1"}, "seed: -1 is out of range (an integer from 0 to 18446744073709551615)"},
      {{"threads=-1"}, "threads: -1 is out of range (an integer from 0 to 1024)"},
      {{"threads=1025"}, "threads: 1025 is out of range (an integer from 0 to 1024)"},
  });
}

TEST_CASE("unknown names are refused, with the known names", "[graphs][config][refuses]") {
  check_refused({
      {{"model.kind=gpt3"}, "model.kind: \"gpt3\" is unknown (did you mean gpt2? known: gpt2, llama, mlp)"},
      {{"model.kind=bert"}, "model.kind: \"bert\" is unknown (known: gpt2, llama, mlp)"},
      {{"model.activation=relu"}, "model.activation: \"relu\" is unknown (did you mean gelu? known: gelu_new, gelu)"},
      {{"pipeline.schedule=1f1p"},
       "pipeline.schedule: \"1f1p\" is unknown (did you mean 1f1b? known: round-robin, sequential, gpipe, 1f1b, "
       "interleaved, zb-h1, zb-h2, zb-v, v-half, v-min, dualpipe-v, auto, or a FILE.csv)"},
      {{"pipeline.schedule=grid.txt"},
       "pipeline.schedule: \"grid.txt\" is unknown (known: round-robin, sequential, gpipe, 1f1b, interleaved, zb-h1, "
       "zb-h2, zb-v, v-half, v-min, dualpipe-v, auto, or a FILE.csv)"},
      {{"layout.order=pp-dp"}, "layout.order: 'pp-dp' lacks tp (dp, tp, pp once each, slowest to fastest)"},
      {{"layout.order=pp-dp-tp-dp"},
       "layout.order: 'pp-dp-tp-dp' has dp twice (dp, tp, pp once each, slowest to fastest)"},
      {{"layout.order=pp,dp,tp"},
       "layout.order: 'pp,dp,tp' has 'pp,dp,tp', which is not an axis (dp, tp, pp once each, slowest to fastest)"},
      {{"precision.param=float"}, "precision.param: \"float\" is called \"fp32\" here (known: fp32, fp64, bf16, fp16)"},
      {{"precision.param=fp3"},
       "precision.param: \"fp3\" is unknown (did you mean fp32? known: fp32, fp64, bf16, fp16)"},
      {{"precision.loss_scale=dinamic"},
       "precision.loss_scale: \"dinamic\" is unknown (did you mean dynamic? known: none, dynamic, or a number above "
       "0)"},
      {{"precision.loss_scale=0"}, "precision.loss_scale: 0 is out of range (a number above 0)"},
      {{"precision.loss_scale=-2"}, "precision.loss_scale: -2 is out of range (a number above 0)"},
      {{"optimizer.kind=adam"},
       "optimizer.kind: \"adam\" is called \"adamw\" with optimizer.weight_decay 0 here (known: adamw, sgd)"},
      {{"shard.prefetch=forward"}, "shard.prefetch: \"forward\" is unknown (known: backward_pre, backward_post, none)"},
      {{"shard.units=layers"}, "shard.units: 'layers' is unknown (layer, model, params:N or type:NAME)"},
      {{"recompute=ful"}, "recompute: \"ful\" is unknown (did you mean full? known: none, selective, full, auto)"},
      {{"memory.preset=standart"},
       "memory.preset: \"standart\" is unknown (did you mean standard? known: basic, standard, aggressive, extreme)"},
      {{"memory.reuse=loose"}, "memory.reuse: \"loose\" is unknown (known: free, tight)"},
      {{"comm.algorithm=rings"},
       "comm.algorithm: \"rings\" is unknown (did you mean ring? known: direct, ring, tree, hierarchical, adaptive)"},
  });
}

TEST_CASE("sharding keys that contradict each other are refused by name", "[graphs][config][shard][refuses]") {
  check_refused({
      {{"layout.dp=4", "shard.strategy=hybrid", "shard.group=3"},
       "shard.group: 3 ranks do not divide layout.dp, 4 (a divisor of 4: 2 or 4)"},
      {{"layout.dp=4", "shard.strategy=hybrid"},
       "shard.group: missing with strategy hybrid (number of ranks that share one copy of the weights; a divisor of 4: "
       "2 or 4)"},
      {{"layout.dp=4", "shard.group=2"}, "shard.group: 2 has no effect with strategy none (0, or strategy hybrid)"},
      {{"shard.slots=0"}, "shard.slots: 0 is out of range (an integer from 1 to 2147483647)"},
      {{"shard.grad_slots=0"}, "shard.grad_slots: 0 is out of range (an integer from 1 to 2147483647)"},
      {{"shard.units=params:0"},
       "shard.units: 'params:0' is not params:N with N of at least 1 (for example params:1000000)"},
      {{"shard.units=params:1x"},
       "shard.units: 'params:1x' is not params:N with N of at least 1 (for example params:1000000)"},
      {{"shard.units=type:"}, "shard.units: 'type:' is unknown (layer, model, params:N or type:NAME)"},
      {{"shard.reduce=each"},
       "shard.reduce: each with strategy none, which does not shard gradients (reduce last, or strategy grad_op, full "
       "or hybrid)"},
      {{"layout.dp=2", "shard.strategy=zero1", "shard.reduce=each"},
       "shard.reduce: each with strategy zero1, which does not shard gradients (reduce last, or strategy grad_op, full "
       "or hybrid)"},
      {{"shard.reshard_after_forward=false"},
       "shard.reshard_after_forward: has no effect with strategy none, which does not shard weights (strategy full or "
       "hybrid)"},
      {{"layout.dp=4", "shard.strategy=full", "shard.reshard_group=3"},
       "shard.reshard_group: 3 ranks do not divide a shard group of 4 (0, or a divisor of at least 2)"},
      {{"layout.dp=4", "shard.strategy=full", "shard.reshard_group=2", "shard.reshard_after_forward=false"},
       "shard.reshard_group: 2 has no effect while weights stay gathered (0, or reshard_after_forward true and "
       "keep_between_microbatches false)"},
  });
}

TEST_CASE("settings that this version does not support are refused", "[graphs][config][refuses]") {
  check_refused({
      {{"backend=nccl", "comm.algorithm=hierarchical"},
       "comm.algorithm: 'hierarchical' with backend nccl, which cannot be told that (direct, where NCCL chooses; ring "
       "or "
       "tree)"},
      {{"backend=nccl", "comm.algorithm=adaptive"},
       "comm.algorithm: 'adaptive' with backend nccl, which cannot be told that (direct, where NCCL chooses; ring or "
       "tree)"},
      {{"backend=nccl", "comm.algorithm=ring", "comm.exact=true"},
       "comm.algorithm: 'ring' with comm.exact, where NCCL reduces nothing (direct)"},
      {{"backend=\xff"}, "backend: \"\\ufffd\" is unknown (known: loopback, cuda, gloo, mpi, nccl)"},
  });
}

TEST_CASE("names of other libraries are answered with the names here", "[graphs][config][refuses]") {
  const auto strategy = [](const std::string& name) {
    return refusal(smallest_config, {"layout.dp=2", "shard.strategy=" + name});
  };
  const auto called = [](const std::string& there, const std::string& here) {
    return sg::str("shard.strategy: \"", there, "\" is called ", here,
                   " here (known: none, zero1, grad_op, full, hybrid)");
  };
  for (const char* name : {"zero3", "ZeRO-3", "fsdp", "FSDP", "FULL_SHARD"})
    CHECK(strategy(name) == called(name, "\"full\""));
  for (const char* name : {"zero2", "zero_2"}) CHECK(strategy(name) == called(name, "\"grad_op\""));
  for (const char* name : {"zero-1", "ZERO1"}) CHECK(strategy(name) == called(name, "\"zero1\""));
  for (const char* name : {"ddp", "NO_SHARD"}) CHECK(strategy(name) == called(name, "\"none\""));
  for (const char* name : {"hsdp", "HYBRID_SHARD"}) CHECK(strategy(name) == called(name, "\"hybrid\""));
  CHECK(strategy("SHARD_GRAD_OP") == called("SHARD_GRAD_OP", "\"full\" with shard.reshard_after_forward false"));
  CHECK(strategy("zero1").empty());
  check_refused({
      {{"precision.param=float32"},
       "precision.param: \"float32\" is called \"fp32\" here (known: fp32, fp64, bf16, fp16)"},
      {{"precision.param=bfloat16"},
       "precision.param: \"bfloat16\" is called \"bf16\" here (known: fp32, fp64, bf16, fp16)"},
      {{"optimizer.kind=Adam"},
       "optimizer.kind: \"Adam\" is called \"adamw\" with optimizer.weight_decay 0 here (known: adamw, sgd)"},
      // Capitals are no reason not to find a name.
      {{"recompute=FULL"}, "recompute: \"FULL\" is unknown (did you mean full? known: none, selective, full, auto)"},
      {{"optimizer.kind=AdamW"}, "optimizer.kind: \"AdamW\" is unknown (did you mean adamw? known: adamw, sgd)"},
      {{"shard.strategy=Hybrid"},
       "shard.strategy: \"Hybrid\" is unknown (did you mean hybrid? known: none, zero1, grad_op, full, hybrid)"},
      {{"pipeline.schedule=1F1B"},
       "pipeline.schedule: \"1F1B\" is unknown (did you mean 1f1b? known: round-robin, sequential, gpipe, 1f1b, "
       "interleaved, zb-h1, zb-h2, zb-v, v-half, v-min, dualpipe-v, auto, or a FILE.csv)"},
  });
}

TEST_CASE("impossible combinations are refused", "[graphs][config][refuses]") {
  check_refused({
      {{"model.dropout=1"}, "model.dropout: 1 is out of range (a number from 0 to less than 1)"},
      {{"model={\"load\": \"DIR\", \"dropout\": -0.5}"},
       "model.dropout: -0.5 is out of range (a number from 0 to less than 1)"},
      {{"model={\"kind\": \"mlp\", \"dropout\": 0.1}"},
       "model.dropout: not a key of mlp (kinds with this key: gpt2, llama; keys of mlp: kind, layers, width, context, "
       "vocab, inner, init_deviation)"},
      {{"model={\"load\": \"DIR\", \"layers\": 2}"},
       "model.layers: cannot be combined with load (only dropout can; the folder has all other settings)"},
      {{"model.load=DIR"},
       "model.kind: cannot be combined with load (only dropout can; the folder has all other settings)"},
      {{"data={}"},
       "data: names no source ({\"tokens\": \"FILE.u16\"}, {\"text\": \"FILE\"} or {\"synthetic\": SEED})"},
      {{"data={\"text\": \"a\", \"tokens\": \"b\", \"synthetic\": 1}"},
       "data: has 3 sources: tokens, text, synthetic (exactly one)"},
      {{"model.width=100"}, "model.heads: width 100 does not divide into 8 heads (width 96 or 104)"},
      {{"model.kind=llama", "model.width=5"}, "model.heads: width 5 does not divide into 8 heads (width 8)"},
      {{"model.kind=llama", "model.width=24"},
       "model.head_size: 3 (width / heads) is odd, but rotary embeddings rotate pairs (an even size)"},
      {{"model.kind=llama", "model.head_size=7"},
       "model.head_size: 7 is odd, but rotary embeddings rotate pairs (an even size)"},
      {{"model.kind=llama", "model.kv_heads=3"},
       "model.kv_heads: 8 heads are not divisible by 3 key and value heads (a divisor of 8)"},
      {{"optimizer.momentum=0.9"},
       "optimizer.momentum: not a key of adamw (kind, lr, weight_decay, clip, schedule, groups, beta1, beta2, eps)"},
      {{"optimizer.kind=sgd", "optimizer.beta2=0.9"},
       "optimizer.beta2: not a key of sgd (kind, lr, weight_decay, clip, schedule, groups, momentum)"},
      {{"precision.reduce=fp64"}, "precision.reduce: fp64 with param fp32 (fp32, bf16 or fp16)"},
      {{"precision.reduce=fp16", "precision.loss_scale=none"},
       "precision.reduce: fp16 reduce without scaling (precision.loss_scale dynamic or a number, or reduce fp32 or "
       "bf16)"},
      {{"precision.param=fp16", "precision.reduce=fp16", "precision.loss_scale=none"},
       "precision.reduce: fp16 reduce without scaling (precision.loss_scale dynamic or a number, or reduce fp32 or "
       "bf16)"},
      {{"precision.keep_low_precision_grads=true"},
       "precision.keep_low_precision_grads: true, but gradients are reduced in fp32 (false, or precision.reduce bf16 "
       "or fp16)"},
      {{"precision.norm=fp64"}, "precision.norm: fp64 with param fp32 (fp32)"},
      {{"precision.norm=bf16"}, "precision.norm: bf16 with param fp32 (fp32)"},
      {{"precision.param=bf16", "precision.norm=fp16"}, "precision.norm: fp16 with param bf16 (bf16 or fp32)"},
      {{"precision.param=fp64", "precision.reduce=fp32"}, "precision.reduce: fp32 with param fp64 (fp64)"},
      {{"precision.param=fp64", "precision.reduce=bf16"}, "precision.reduce: bf16 with param fp64 (fp64)"},
      {{"batch.seq=129"}, "batch.seq: 129 tokens are more than the model's context of 128 (at most 128)"},
      {{"batch.global=9"},
       "batch: the 9 sequences of a data-parallel rank (global 9 / dp 1) do not divide into microbatches of 2 (global "
       "8 or 10, or micro 1 or 3)"},
      {{"layout.dp=3"}, "batch: global 8 does not divide over dp 3 (global 6 or 12, or dp 2 or 4)"},
      {{"model.context=16777216", "batch.seq=16777216", "batch.global=128"},
       "batch: global 128 x seq 16777216 = 2147483648 tokens in one step (at most 2147483646)"},
      {{"layout.dp=4096", "layout.tp=4096", "layout.pp=4096"},
       "layout: dp(4096) * tp(4096) * pp(4096) is more than 2147483647 ranks"},
      {{"layout.tp=3"}, "layout.tp: heads 8 is not divisible by tp 3 (heads 6 or 9, or tp 2 or 4)"},
      {{"layout.tp=4", "model.inner=3"}, "layout.tp: 4 ranks cannot share the model's inner of 3 (at most 3)"},
      {{"layout.tp=8", "model.vocab=7"}, "layout.tp: 8 ranks cannot share the model's vocab of 7 (at most 7)"},
      {{"comm.machine=m.json"},
       "comm.machine: 'm.json' with algorithm direct, which does not look at a machine (adaptive, pipeline.split "
       "balanced, pipeline.schedule auto, or on GPUs offload or recompute auto)"},
      {{"comm.machine=m.json", "offload.optimizer=true"},
       "comm.machine: 'm.json' with algorithm direct, which does not look at a machine (adaptive, pipeline.split "
       "balanced, pipeline.schedule auto, or on GPUs offload or recompute auto)"},
      {{"layout.pp=8", "batch.global=16"},
       "layout.pp: pp 8 x chunks 1 = 8 stages, but the model has 4 layers (at most 4 stages)"},
      {{"layout.pp=4", "pipeline.schedule=interleaved", "pipeline.chunks=2"},
       "layout.pp: pp 4 x chunks 2 = 8 stages, but the model has 4 layers (at most 4 stages)"},
      {{"layout.pp=2", "model.layers=3"},
       "layout.pp: 3 layers do not divide over 2 stages (pp 2 x chunks 1; 2 or 4 layers, or pp 1 or 3, or "
       "pipeline.split)"},
      {{"layout.pp=2", "pipeline.schedule=interleaved", "pipeline.chunks=2", "model.layers=6"},
       "layout.pp: 6 layers do not divide over 4 stages (pp 2 x chunks 2; 4 or 8 layers, or pp 1 or 3, or "
       "pipeline.split)"},
      {{"layout.pp=2", "pipeline.split=[4]"},
       "pipeline.split: 1 stages, but pp 2 x chunks 1 = 2 (a number of layers for each stage)"},
      {{"layout.pp=2", "pipeline.split=[3,2]"}, "pipeline.split: 5 layers in all, but the model has 4"},
      {{"layout.pp=8", "pipeline.split=balanced"},
       "layout.pp: pp 8 x chunks 1 = 8 stages, but the model has 4 layers (at most 4 stages)"},
      {{"layout.pp=4", "pipeline.schedule=zb-v"},
       "layout.pp: pp 4 x chunks 2 = 8 stages, but the model has 4 layers (at most 4 stages)"},
      {{"layout.pp=2", "pipeline.schedule=v-min", "pipeline.chunks=1"},
       "pipeline: v-min: 1 chunk (2: rank r has stages r and 2 x ranks - 1 - r)"},
      {{"layout.pp=2", "pipeline.limit=2"}, "pipeline.limit: with schedule 1f1b, whose order is fixed (schedule auto)"},
      {{"layout.pp=2", "pipeline.schedule=v-half", "pipeline.limit=1GiB"},
       "pipeline.limit: with schedule v-half, whose order is fixed (schedule auto)"},
      {{"layout.pp=2", "pipeline.schedule=auto", "pipeline.limit=0.5"},
       "pipeline: auto: a limit of 0.5 (at least 1, which a single microbatch holds; 0: no limit)"},
      {{"layout.pp=2", "pipeline.schedule=auto", "pipeline.chunks=3"},
       "pipeline.chunks: 3 is out of range (an integer from 1 to 2)"},
      {{"layout.pp=2", "pipeline.schedule=auto", "batch.global=8", "batch.micro=1", "pipeline.chunks=2",
        "pipeline.limit=17"},
       "pipeline.limit: 17 is above 8 microbatches x 2 chunks, so it limits nothing (0: no limit; text is in bytes: "
       "\"8MiB\")"},
      {{"pipeline.limit=-1"}, "pipeline.limit: -1 is out of range (a number 0 or more)"},
      {{"pipeline.chunks=2"},
       "pipeline: 1f1b: 2 chunks (1; round-robin, sequential, gpipe and interleaved can have more)"},
      {{"layout.pp=2", "pipeline.schedule=interleaved", "pipeline.chunks=2", "batch.global=6"},
       "pipeline: interleaved: 3 microbatches with 2 chunks on 2 ranks (microbatches a multiple of 2)"},
  });
  // A vocabulary is cut unevenly, and so is an MLP.
  CHECK(refusal(smallest_config, {"layout.tp=2", "model.vocab=257"}).empty());
  for (const char* kind : {"gpt2", "llama", "mlp"})
    CHECK(refusal(R"({"model": {}, "data": {"synthetic": 1}, "batch": {}})",
                  {sg::str("model.kind=", kind), "layout.tp=2", "model.inner=3"})
              .empty());
  // At this point the loaded model and the stages of the schedule file are not known yet.
  CHECK(
      refusal(smallest_config, {"model={\"load\": \"DIR\"}", "batch.seq=4096", "layout.tp=8", "layout.pp=4"}).empty());
  CHECK(refusal(smallest_config, {"pipeline.schedule=mine.csv", "layout.pp=2", "pipeline.chunks=2"}).empty());
  CHECK(refusal(smallest_config, {"pipeline.schedule=mine.csv", "layout.pp=2", "model.layers=3"}).empty());
}

TEST_CASE("a loaded model must fit its config, like a fresh one", "[graphs][config][refuses]") {
  const sg::Model model   = sg::make_model(sg::Gpt2Spec{.layers = 3, .width = 16, .heads = 2, .context = 8});
  const auto loaded_fails = [&](std::vector<std::string> overrides) -> std::string {
    overrides.insert(overrides.begin(), {"model={\"load\": \"DIR\"}", "batch.seq=8"});
    try {
      sg::check_fit(sg::parse_config(smallest_config, overrides), model);
      return {};
    } catch (const sg::Error& error) {
      return error.what();
    }
  };
  CHECK(loaded_fails({"layout.tp=2", "layout.pp=3"}).empty());
  CHECK(loaded_fails({"batch.seq=9"}) == "batch.seq: 9 tokens are more than the model's context of 8 (at most 8)");
  CHECK(loaded_fails({"layout.tp=4"}) == "layout.tp: heads 2 is not divisible by tp 4 (heads 4, or tp 2)");
  CHECK(loaded_fails({"layout.pp=2"}) ==
        "layout.pp: 3 layers do not divide over 2 stages (pp 2 x chunks 1; 2 or 4 layers, or pp 1 or 3, or "
        "pipeline.split)");
}

TEST_CASE("a place in a job that contradicts other keys is refused", "[graphs][config][refuses]") {
  const std::string two = "layout.dp=2", gloo = "backend=gloo";
  check_refused({
      {{two, "world.rank=1", "world.size=2"},
       "world.rank: with backend loopback, which has all ranks in one process (gloo, mpi or nccl)"},
      {{two, "world.size=2", "backend=cuda"},
       "world.size: with backend cuda, which has all ranks in one process (gloo, mpi or nccl)"},
      {{"world.address=node0"},
       "world.address: with backend loopback, which has all ranks in one process (gloo, mpi or nccl)"},
      {{two, gloo, "world.rank=0"}, "world.rank: is 0, but size is not given (both, or none of them)"},
      {{two, gloo, "world.size=2"}, "world.size: is 2, but rank is not given (both, or none of them)"},
      {{two, gloo, "world.rank=2", "world.size=2"}, "world.rank: is 2, but size is 2 (0 to 1)"},
      {{two, gloo, "world.rank=2", "world.size=3"}, "world.size: is 3, but the layout has 2 ranks (as many)"},
      {{gloo, "world.address=1"}, "world.address: 1 is not a string (text in quotes)"},
      {{gloo, "world.port=1"}, "world.port: unknown key (known: rank, size, address)"},
  });
}

TEST_CASE("devices that a backend or a layout has no use for are refused", "[graphs][config][refuses]") {
  const std::string right = "(\"all\", or a list of integers from 0 to 1023)", two = "layout.dp=2",
                    cuda = "backend=cuda";
  check_refused({
      {{"devices=[1]"}, "devices: with backend loopback, whose ranks are not on GPUs (cuda or nccl)"},
      {{two, "backend=gloo", "devices=[0,1]"},
       "devices: with backend gloo, whose ranks are not on GPUs (cuda or nccl)"},
      {{"backend=mpi", "devices=all"}, "devices: with backend mpi, whose ranks are not on GPUs (cuda or nccl)"},
      {{two, cuda, "devices=[0,1,2]"}, "devices: has 3 devices, but the layout has 2 ranks (at most 2)"},
      {{cuda, "devices=[0,0]"}, "devices: has 2 devices, but the layout has 1 rank (at most 1)"},
      {{cuda, "devices=[]"}, "devices: [] is not a list " + right},
      {{cuda, "devices=0"}, "devices: 0 is not a list " + right},
      {{cuda, "devices=every"}, "devices: \"every\" is not a list " + right},
      {{cuda, "devices=[-1]"}, "devices: -1 in the list " + right},
      {{cuda, "devices=[1024]"}, "devices: 1024 in the list " + right},
      {{cuda, "devices=[\"0\"]"}, "devices: \"0\" in the list " + right},
  });
}
