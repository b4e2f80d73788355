#include "graphs/train/checkpoint.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <map>
#include <random>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "graphs/files/safetensors.hpp"
#include "graphs/models/mlp.hpp"
#include "graphs/models/model_folder.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/training/checkpointed.hpp"
#include "tests/support/training/short_training.hpp"
#include "tests/support/worlds/thread_processes.hpp"

namespace sg = stepgraph;
namespace fs = std::filesystem;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::testing::fast_folder;
using sg::testing::file_bytes;
using sg::testing::save_checkpoint;
using sg::testing::small_gpt2;
using sg::testing::small_llama;
using sg::testing::states_of;
using sg::testing::TempFolder;
using sg::testing::tokens_for;
using sg::testing::Training;
using sg::testing::write_file;

namespace {

const sg::BatchSpec& batch = sg::testing::checkpoint_batch;

}  // namespace

TEST_CASE("masters, loss scale and skipped updates are in a checkpoint", "[graphs][train][checkpoint]") {
  const sg::Model model = small_gpt2();
  const sg::DType type  = GENERATE(sg::DType::bf16, sg::DType::f16);
  CAPTURE(type);
  sg::Plan plan{.layout = {.dp = 2, .tp = 1, .pp = 2}};
  plan.precision.param                   = type;
  plan.precision.loss_scale.value        = sg::testing::sanitized() ? 0x1p26 : 0x1p40;  // the first steps overflow
  plan.precision.loss_scale.growth_steps = 3;
  sg::Plan other                         = plan;
  other.layout                           = {.dp = 2, .tp = 1, .pp = 1};
  other.shard.strategy                   = sg::Shard::full;
  const TempFolder folder;
  Training first(model, plan);
  const int steps = !sg::testing::sanitized() ? 30 : type == sg::DType::f16 ? 12 : 3;
  const int more  = sg::testing::sanitized() ? 2 : 6;
  first.train(steps);
  const std::string path = save_checkpoint(first.trainer, folder.path());
  Training second(model, other);
  const sg::CheckpointState state = sg::load_checkpoint(second.trainer, path);
  CHECK(state.loss_scale.has_value() == (type == sg::DType::f16));
  CHECK((type == sg::DType::bf16 || state.updates < state.steps));
  CHECK(second.weights() == first.weights());
  CHECK(second.train(steps + more) == first.train(steps + more));
  CHECK(second.weights() == first.weights());
  CHECK(second.trainer.run().loss_scale() == first.trainer.run().loss_scale());
  // Masters of a run in bf16 become weights of a run in f32.
  Training wide(model, {});
  sg::load_checkpoint(wide.trainer, path);
  const std::string again = save_checkpoint(wide.trainer, folder / "f32");
  CHECK(states_of(sg::CheckpointReader(again)) == states_of(sg::CheckpointReader(path)));
}

TEST_CASE("steps go on while a checkpoint is written, and do not change it", "[graphs][train][checkpoint]") {
  const sg::Model model = small_gpt2();
  const TempFolder folder;
  Training run(model, {.layout = {.dp = 2, .tp = 2, .pp = 1}});
  run.train(2);
  const std::uint64_t saved = run.weights();
  sg::CheckpointWriter writer(run.trainer, {.folder = folder.path().string(), .keep = 0});
  CHECK(writer.is_written());
  CHECK_FALSE(writer.finish());
  writer.save(16, R"({"seed": 7})");
  run.train(5);
  writer.save(40);  // finishes the first one
  CHECK(fs::exists(folder / "step-000000002/manifest.json"));
  CHECK_FALSE(fs::exists(folder / "step-000000005"));
  CHECK(writer.finish() == (folder / "step-000000005").string());
  CHECK(sg::list_checkpoints(folder.path().string()).size() == 2);
  Training again(model, {});
  CHECK(sg::load_checkpoint(again.trainer, folder / "step-000000002").config == R"({"seed":7})");
  CHECK(again.weights() == saved);
  sg::CheckpointReader(folder / "step-000000005").check(2);
}

TEST_CASE("each rank writes an equal share, as a safetensors file", "[graphs][train][checkpoint]") {
  const sg::Model model = sg::gpt2({.layers = 2, .width = 128, .heads = 4, .context = 16, .vocab = 512});
  const sg::Shard kind  = GENERATE(sg::Shard::none, sg::Shard::zero1, sg::Shard::full, sg::Shard::hybrid);
  sg::Plan plan{.layout = {.dp = 4}, .shard = {.strategy = kind, .group = kind == sg::Shard::hybrid ? 2 : 0}};
  const TempFolder folder;
  Training run(model, plan);
  sg::CheckpointWriter writer(run.trainer, {.folder = folder.path().string()});
  writer.save(0);
  const std::string path = writer.finish().value();
  const auto& bytes      = writer.figures().rank_bytes;
  const auto all         = 12 * model.parameters().num_elements();
  REQUIRE(bytes.size() == 4);
  CHECK(writer.figures().num_bytes() < all + 4 * 65536);
  for (const std::int64_t each : bytes)
    CHECK(std::abs(static_cast<double>(each) / static_cast<double>(all) - 0.25) < 0.1);
  const sg::CheckpointReader reader(path);
  for (const sg::CheckpointFile& file : reader.manifest().files) {
    const sg::Safetensors opened(fs::path(path) / file.name);
    CHECK(opened.names().size() == file.parts.size());
  }
}

TEST_CASE("damage anywhere is refused by name, and an older checkpoint is used",
          "[graphs][train][checkpoint][refuses]") {
  const sg::Model model = small_gpt2();
  const TempFolder folder;
  const std::string all = folder.path().string();
  Training run(model, {.layout = {.dp = 2}});
  CHECK_FALSE(sg::resume_newest(run.trainer, all));
  CHECK_FALSE(sg::resume_newest(run.trainer, all + "/nothing"));
  run.train(1);
  const std::string older = save_checkpoint(run.trainer, folder.path());
  run.train(2);
  const std::string newer = save_checkpoint(run.trainer, folder.path());
  const fs::path manifest = fs::path(newer) / "manifest.json", data = fs::path(newer) / "rank-00001.safetensors";
  const std::string good_manifest = file_bytes(manifest), good_data = file_bytes(data);
  Training again(model, {});
  const auto refused = [&](const std::string& says) {
    const auto resumed = sg::resume_newest(again.trainer, all);
    REQUIRE(resumed);
    CHECK(resumed->path == older);
    CHECK(again.trainer.num_steps() == 1);
    REQUIRE(resumed->refused.size() == 1);
    CHECK_THAT(resumed->refused[0], ContainsSubstring(newer) && ContainsSubstring(says));
    CHECK_THROWS_MATCHES(sg::load_checkpoint(again.trainer, newer), sg::Error, MessageMatches(ContainsSubstring(says)));
    write_file(manifest, good_manifest);
    write_file(data, good_data);
    CHECK(sg::resume_newest(again.trainer, all)->path == newer);
  };
  const auto changed = [](std::string text, std::size_t at) {
    text[at] = static_cast<char>(text[at] ^ 1);
    return text;
  };
  std::mt19937 random(3);
  const int times = sg::testing::sanitized() ? 2 : 8;
  for (int i = 0; i < times; ++i) {
    write_file(data, changed(good_data, 8192 + random() % (good_data.size() - 8192)));
    refused("is damaged");
  }
  for (int i = 0; i < times; ++i) {
    write_file(manifest, changed(good_manifest, random() % good_manifest.size()));
    refused("manifest.json");
  }
  write_file(data, good_data.substr(0, good_data.size() - 1));
  refused("bytes, but the manifest says");
  fs::remove(data);
  refused("rank-00001.safetensors: there is no such file");
  fs::remove(manifest);
  refused("has no manifest.json");
  write_file(manifest, "{\"a\": 1}");
  refused("is not the manifest of a checkpoint");
  std::string future = good_manifest;
  future.replace(future.find("\"version\": 1"), 12, "\"version\": 3");
  write_file(manifest, future);
  refused("has format 3, which is newer");
  write_file(manifest, "");
  fs::remove(fs::path(older) / "manifest.json");
  CHECK_THROWS_MATCHES(sg::resume_newest(again.trainer, all), sg::Error,
                       MessageMatches(ContainsSubstring("none of 2 checkpoints is whole")));
}

TEST_CASE("a checkpoint of another model or optimizer does not fit", "[graphs][train][checkpoint][refuses]") {
  const sg::Model gpt2 = small_gpt2(), llama = small_llama();
  const TempFolder folder;
  Training run(gpt2, {});
  run.train(1);
  const std::string path = save_checkpoint(run.trainer, folder.path());
  const auto says        = [](const char* what) { return MessageMatches(ContainsSubstring(what)); };
  Training other(llama, {});
  CHECK_THROWS_MATCHES(sg::load_checkpoint(other.trainer, path), sg::Error,
                       says("does not fit this run: it has no tensor"));
  CHECK_THROWS_MATCHES(sg::resume_newest(other.trainer, folder.path().string()), sg::Error,
                       says("does not fit this run"));
  // Settings without a shape, which only one of the two may have.
  const auto fits = [&](const std::string& from, const std::string& to) {
    sg::Model changed    = gpt2;
    const std::size_t at = changed.config.find(from);
    REQUIRE(at != std::string::npos);
    changed.config.replace(at, from.size(), to);
    Training again(changed, {});
    sg::load_checkpoint(again.trainer, path);
  };
  CHECK_NOTHROW(fits("\"scale_attn_weights\": true,", ""));  // the default
  CHECK_NOTHROW(fits("\"attn_pdrop\": 0.0", "\"attn_pdrop\": 0.5"));
  CHECK_THROWS_MATCHES(fits("\"n_head\": 4,", ""), sg::Error, says("its model has n_head 4"));
  CHECK_THROWS_MATCHES(fits("\"scale_attn_weights\": true", "\"scale_attn_weights\": false"), sg::Error,
                       says("its model has scale_attn_weights true, not false"));
  Training sgd(gpt2, {.optimizer = {.kind = sg::OptimizerKind::sgd}});
  CHECK_THROWS_MATCHES(sg::load_checkpoint(sgd.trainer, path), sg::Error, says("it is of optimizer adamw"));
  CHECK_THROWS_MATCHES(sg::CheckpointWriter(run.trainer, {.folder = ""}), sg::Error, says("the folder is empty"));
  sg::CheckpointWriter writer(run.trainer, {.folder = folder.path().string()});
  CHECK_THROWS_MATCHES(writer.save(0), sg::Error, says("a checkpoint of this step exists"));
  // With sequences of another length the position is counted in tokens.
  Training longer(gpt2, {}, {.global = 8, .micro = 1, .seq = 12});
  CHECK(sg::load_checkpoint(longer.trainer, path).position == batch.global * batch.seq / 12);
}

TEST_CASE("the newest checkpoints stay, and leftovers of killed processes go", "[graphs][train][checkpoint]") {
  const sg::Model model = small_gpt2();
  const TempFolder folder;
  fs::create_directories(folder / "step-000000001.partial-0123456789abcdef");
  write_file(folder / "step-000000001.partial-0123456789abcdef/rank-00000.safetensors", "half");
  fs::create_directories(folder / "notes");
  Training run(model, {});
  {
    sg::CheckpointWriter writer(run.trainer, {.folder = folder.path().string(), .keep = 2, .async = false});
    CHECK_FALSE(fs::exists(folder / "step-000000001.partial-0123456789abcdef"));
    for (int step = 1; step <= 4; ++step) {
      run.train(step);
      writer.save(step);
      writer.finish();
    }
  }
  const auto list = sg::list_checkpoints(folder.path().string());
  REQUIRE(list.size() == 2);
  CHECK((list[0].steps == 4 && list[1].steps == 3));
  CHECK(std::distance(fs::directory_iterator(folder.path()), {}) == 3);
}

TEST_CASE("a run that goes on from an older checkpoint puts the newer ones aside", "[graphs][train][checkpoint]") {
  const sg::Model model = small_gpt2();
  const TempFolder folder(fast_folder());
  const std::string all = folder.path().string();
  Training run(model, {});
  for (int step = 1; step <= 4; ++step) run.train(step), save_checkpoint(run.trainer, folder.path());
  fs::resize_file(folder / "step-000000004/rank-00000.safetensors", 100);
  Training again(model, {});
  sg::load_checkpoint(again.trainer, folder / "step-000000002");
  sg::CheckpointWriter writer(again.trainer,
                              {.folder = all, .loaded = folder / "step-000000002", .keep = 2, .replace = true});
  again.train(3);
  writer.save(24);
  CHECK(sg::list_checkpoints(all).size() == 4);  // until it is written
  writer.finish();
  CHECK(writer.figures().put_aside.size() == 2);
  const auto steps = [&] {
    std::vector<std::int64_t> found;
    for (const sg::CheckpointEntry& entry : sg::list_checkpoints(all)) found.push_back(entry.steps);
    return found;
  };
  CHECK(steps() == std::vector<std::int64_t>{3, 2});  // the one before them is gone, because two of this run are there
  again.train(6);
  writer.save(48);
  writer.finish();
  CHECK(steps() == std::vector<std::int64_t>{6, 3});
  CHECK(writer.figures().put_aside.empty());
  writer.save(48);  // the same again
  writer.finish();
  CHECK(steps() == std::vector<std::int64_t>{6, 3});
  sg::CheckpointReader(folder / "step-000000006").check();
  CHECK(sg::resume_newest(run.trainer, all)->state.steps == 6);
}

TEST_CASE("keep removes no checkpoint of another run", "[graphs][train][checkpoint]") {
  const bool fresh = GENERATE(true, false);       // else it goes on from a checkpoint of another folder
  if (sg::testing::sanitized() && fresh) return;  // a test of --force writes the same
  CAPTURE(fresh);
  const sg::Model model = small_gpt2();
  const TempFolder folder(fast_folder());
  const std::string all = (folder / "run").string(), elsewhere = (folder / "elsewhere").string();
  Training run(model, {});
  for (int step = 1; step <= 4; ++step) run.train(step), save_checkpoint(run.trainer, all);
  fs::create_directories(elsewhere);
  fs::rename(folder / "run/step-000000002", folder / "elsewhere/step-000000002");
  Training again(model, {});
  if (!fresh) sg::load_checkpoint(again.trainer, elsewhere + "/step-000000002");
  sg::CheckpointWriter writer(
      again.trainer,
      {.folder = all, .loaded = fresh ? "" : elsewhere + "/step-000000002/", .keep = 1, .replace = true});
  for (const int step : {3, 5}) {
    again.train(step);
    writer.save(step);
    writer.finish();
    CHECK(writer.figures().put_aside.size() == (step == 3 ? 3 : 0));
  }
  const auto list = sg::list_checkpoints(all);
  REQUIRE(list.size() == 1);
  CHECK(list[0].steps == 5);
  int num_aside = 0;
  for (const auto& entry : fs::directory_iterator(all))
    if (entry.path().string().find(".aside-") != std::string::npos) {
      ++num_aside;
      sg::CheckpointReader(entry.path()).check();
    }
  CHECK(num_aside == 3);
}

TEST_CASE("a checkpoint that the system cannot read now is an error, not damage",
          "[graphs][train][checkpoint][refuses]") {
  const sg::Model model = small_gpt2();
  const TempFolder folder(fast_folder());
  Training run(model, {});
  for (int step = 1; step <= 2; ++step) run.train(step), save_checkpoint(run.trainer, folder.path());
  const fs::path file = folder / "step-000000002/rank-00000.safetensors";
  fs::rename(file, folder / "kept");
  fs::create_symlink(file, file);  // a loop of links
  const auto says = MessageMatches(ContainsSubstring("Too many levels of symbolic links"));
  Training again(model, {});
  CHECK_THROWS_MATCHES(sg::resume_newest(again.trainer, folder.path().string()), sg::Error, says);
  CHECK_THROWS_MATCHES(sg::load_checkpoint(again.trainer, folder / "step-000000002"), sg::Error, says);
  CHECK_FALSE(sg::list_checkpoints(folder.path().string()).front().damaged);
  fs::remove(file);
  CHECK(sg::list_checkpoints(folder.path().string()).front().damaged);
  CHECK(sg::resume_newest(again.trainer, folder.path().string())->state.steps == 1);
}

TEST_CASE("a change of any byte of a checkpoint is noticed", "[graphs][train][checkpoint][refuses]") {
  const sg::Model model = sg::mlp({.layers = 1, .width = 4, .vocab = 8, .inner = 4});
  const TempFolder folder(fast_folder());
  Training run(model, {.layout = {.dp = 2}}, {.global = 2, .micro = 1, .seq = 2});
  const std::string path = save_checkpoint(run.trainer, folder.path());
  const auto num_refused = [&](const fs::path& file, std::size_t step) {
    const std::string good = file_bytes(file);
    std::size_t refused    = 0;
    for (std::size_t at = 0; at < good.size(); at += step) {
      std::string bad = good;
      bad[at]         = static_cast<char>(bad[at] ^ 0x10);
      write_file(file, bad);
      try {
        sg::CheckpointReader(path).check();
        UNSCOPED_INFO("byte " << at);
      } catch (const sg::Error&) {
        ++refused;
      }
    }
    write_file(file, good);
    return refused == (good.size() + step - 1) / step;
  };
  const std::size_t step = sg::testing::sanitized() ? 23 : 1;
  CHECK(num_refused(fs::path(path) / "manifest.json", step));
  CHECK(num_refused(fs::path(path) / "rank-00000.safetensors", step));
  CHECK(num_refused(fs::path(path) / "rank-00001.safetensors", step));
  sg::CheckpointReader(path).check();
}

TEST_CASE("a disk that takes no more bytes leaves the older checkpoints", "[graphs][train][checkpoint][refuses]") {
  const sg::Model model = small_gpt2();
  const bool async      = GENERATE(true, false);
  const TempFolder folder;
  Training run(model, {.layout = {.dp = 2}});
  run.train(1);
  const std::string older = save_checkpoint(run.trainer, folder.path());
  run.train(2);
  sg::CheckpointWriter writer(run.trainer, {.folder = folder.path().string(), .async = async});
  rlimit limit{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &limit) == 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit tight{.rlim_cur = 16384, .rlim_max = limit.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &tight);
  std::string said;
  try {
    writer.save(16);
    writer.finish();
  } catch (const sg::Error& error) {
    said = error.what();
  }
  ::setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, handler);
  CHECK_THAT(said, ContainsSubstring("cannot be written: File too large"));
  CHECK(std::distance(fs::directory_iterator(folder.path()), {}) == 1);
  Training again(model, {});
  CHECK(sg::resume_newest(again.trainer, folder.path().string())->path == older);
  // The next one works.
  writer.save(16);
  CHECK(writer.finish());
  CHECK(sg::resume_newest(again.trainer, folder.path().string())->state.steps == 2);
}

TEST_CASE("several processes write one checkpoint, which any number of processes loads",
          "[graphs][train][checkpoint][processes]") {
  const sg::Model model = small_gpt2();
  sg::Plan plan{.layout = {.dp = 2, .tp = 2, .pp = 2}, .shard = {.strategy = sg::Shard::full}};
  const TempFolder folder;
  const std::string all = folder.path().string();
  Training reference(model, plan);
  const std::vector<double> expected = reference.train(4);
  std::vector<double> losses(2);
  sg::testing::in_processes(sg::testing::neighbours(8, 4), sg::testing::Exchanges::messages, [&](sg::World& world) {
    sg::Trainer trainer(model, plan, batch, world, {.threads = 1, .seed = 7});
    for (int step = 0; step < 2; ++step) trainer.step(tokens_for(batch, step, model.vocab));
    sg::CheckpointWriter writer(trainer, {.folder = all});
    writer.save(16);
    trainer.step(tokens_for(batch, 2, model.vocab));
    if (writer.finish() != all + "/step-000000002") throw std::runtime_error("another path");
    writer.save(24);
    writer.finish();
  });
  plan.layout = {.dp = 2, .tp = 2, .pp = 1};
  // The newest one is damaged. Not all processes read that part of it, but all refuse it.
  const std::string file = all + "/step-000000003/rank-00000.safetensors";
  std::string damaged    = file_bytes(file);
  damaged.back()         = static_cast<char>(damaged.back() ^ 1);
  write_file(file, damaged);
  sg::testing::in_processes(sg::testing::neighbours(4, 2), sg::testing::Exchanges::hub, [&](sg::World& world) {
    sg::Trainer trainer(model, plan, batch, world, {.threads = 1, .seed = 1});
    const auto resumed = sg::resume_newest(trainer, all);
    if (!resumed || resumed->state.steps != 2 || resumed->refused.size() != 1) throw std::runtime_error("not resumed");
    for (int step = 2; step < 4; ++step) {
      const double loss = trainer.step(tokens_for(batch, step, model.vocab)).loss;
      if (world.peers()->process() == 0) losses[static_cast<std::size_t>(step - 2)] = loss;
    }
  });
  CHECK(losses == std::vector<double>(expected.begin() + 2, expected.end()));
}

TEST_CASE("a file that one of several processes cannot write is an error in all of them",
          "[graphs][train][checkpoint][processes][refuses]") {
  const sg::Model model = sg::gpt2({.layers = 2, .width = 32, .heads = 4, .context = 16, .vocab = 1024});
  const sg::Plan plan{.layout = {.dp = 1, .tp = 1, .pp = 2}};
  const TempFolder folder;
  const std::string all = folder.path().string();
  std::vector<std::string> said(2);
  std::vector<std::int64_t> bytes(2);
  rlimit limit{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &limit) == 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  sg::testing::in_processes(sg::testing::neighbours(2, 2), sg::testing::Exchanges::messages, [&](sg::World& world) {
    const auto process = static_cast<std::size_t>(world.peers()->process());
    sg::Trainer trainer(model, plan, batch, world, {.threads = 1, .seed = 7});
    sg::CheckpointWriter writer(trainer, {.folder = all, .async = false});
    writer.save(0);
    bytes[process] = writer.figures().num_bytes();
    writer.finish();
    trainer.step(tokens_for(batch, 0, model.vocab));
    // The limit is between the sizes of the two files. No process writes before process 0 has made the folder.
    const auto middle = static_cast<rlim_t>((bytes[0] + bytes[1]) / 2);
    const rlimit tight{.rlim_cur = middle, .rlim_max = limit.rlim_max};
    if (process == 0) ::setrlimit(RLIMIT_FSIZE, &tight);
    try {
      writer.save(1);
      writer.finish();
    } catch (const sg::Error& error) {
      said[process] = error.what();
    }
    if (process == 0) ::setrlimit(RLIMIT_FSIZE, &limit);
    trainer.step(tokens_for(batch, 1, model.vocab));
    writer.save(2);
    writer.finish();
  });
  ::setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, handler);
  CHECK(std::abs(bytes[0] - bytes[1]) > 32768);
  CHECK(said[0] == said[1]);
  CHECK_THAT(said[0], ContainsSubstring("cannot be written: File too large"));
  const auto list = sg::list_checkpoints(all);
  REQUIRE(list.size() == 2);
  CHECK((list[0].steps == 2 && list[1].steps == 0));
}

TEST_CASE("a checkpoint is exported as a Hugging Face folder", "[graphs][train][checkpoint]") {
  const sg::Model model = small_llama();
  const TempFolder folder;
  Training run(model, {.layout = {.dp = 2, .tp = 2, .pp = 1}, .shard = {.strategy = sg::Shard::full}});
  run.train(2);
  const sg::CheckpointReader reader(save_checkpoint(run.trainer, folder / "run"));
  sg::save_model(run.trainer.run(), (folder / "saved").string());
  sg::export_checkpoint(reader, (folder / "exported").string());
  CHECK(file_bytes(folder / "exported/model.safetensors") == file_bytes(folder / "saved/model.safetensors"));
  CHECK(file_bytes(folder / "exported/config.json") == file_bytes(folder / "saved/config.json"));
  sg::export_checkpoint(reader, (folder / "shards").string(), {.type = sg::DType::bf16, .shard_bytes = 20000});
  const sg::ModelFolder shards(folder / "shards"), whole(folder / "saved");
  CHECK(shards.files().size() > 2);
  CHECK(shards.names() == whole.names());
  for (const std::string& name : whole.names()) {
    const auto& shape = whole.info(name).shape;
    std::vector<float> a(static_cast<std::size_t>(sg::num_elements(shape))), b(a.size());
    sg::load_tensor(whole, name, shape, std::span(a));
    sg::load_tensor(shards, name, shape, std::span(b));
    CHECK(shards.info(name).type == sg::DType::bf16);
    CHECK(std::equal(a.begin(), a.end(), b.begin(),
                     [](float x, float y) { return std::abs(x - y) <= std::abs(x) / 256; }));
  }
  CHECK_THROWS_MATCHES(sg::export_checkpoint(reader, (folder / "shards").string()), sg::Error,
                       MessageMatches(ContainsSubstring("has other weights")));
}
