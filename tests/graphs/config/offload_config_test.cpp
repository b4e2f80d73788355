#include <catch2/catch_test_macros.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/base/text.hpp"
#include "graphs/config/config.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/training/refusals.hpp"

namespace sg = stepgraph;
using sg::testing::check_refused;
using sg::testing::smallest_config;

namespace {

sg::Config with(const std::vector<std::string>& overrides) { return sg::parse_config(smallest_config, overrides); }
sg::OffloadPlan offload(const std::vector<std::string>& overrides) { return with(overrides).plan.offload; }

std::string refusal(const std::vector<std::string>& overrides) {
  return sg::testing::refusal(smallest_config, overrides);
}

}  // namespace

TEST_CASE("every key of offload sets its field and is written back", "[graphs][config][offload]") {
  const sg::testing::TempFolder folder;
  const std::string disk = folder.path().string();
  const sg::Config config =
      with({"offload.params=true", "offload.grads=true", "offload.optimizer=true", "offload.activations=true",
            "offload.device_bytes=24GiB", "offload.device_param_bytes=1.5MiB", "offload.host_bytes=64KiB",
            "offload.disk_bytes=1TB", "offload.disk=" + disk, "offload.slots=3", "offload.async=false",
            "offload.overlap=false", "offload.pinned=false", "offload.compress=dynamic8"});
  CHECK(config.plan.offload == sg::OffloadPlan{.params             = true,
                                               .grads              = true,
                                               .optimizer          = true,
                                               .activations        = true,
                                               .device_bytes       = std::int64_t{24} << 30,
                                               .device_param_bytes = 3 << 19,
                                               .host_bytes         = 64 << 10,
                                               .disk_bytes         = 1'000'000'000'000,
                                               .disk               = disk,
                                               .slots              = 3,
                                               .async              = false,
                                               .overlap            = false,
                                               .pinned             = false,
                                               .compress           = sg::Compression::dynamic8});
  CHECK(sg::parse_config(sg::to_json(config)) == config);

  for (const sg::OffloadStrategy strategy : sg::all_offload_strategies) {
    const sg::Config other = with({sg::str("offload.strategy=", strategy)});
    CHECK(other.plan.offload.strategy == strategy);
    CHECK(sg::parse_config(sg::to_json(other)) == other);
  }
  const std::vector<std::string_view> names{"none", "fp16", "bf16", "int8", "dynamic8", "lossless"};
  for (std::size_t i = 0; i < names.size(); ++i) {
    const sg::Config other = with({"offload.params=true", sg::str("offload.compress=", names[i])});
    CHECK(other.plan.offload.compress == sg::all_compressions[i]);
    CHECK(sg::parse_config(sg::to_json(other)) == other);
  }
}

TEST_CASE("sizes of offload are bytes or text with a unit", "[graphs][config][offload]") {
  CHECK(offload({"offload.device_bytes=123"}).device_bytes == 123);
  CHECK(offload({"offload.device_bytes=24GiB"}).device_bytes == std::int64_t{24} << 30);
  CHECK(offload({"offload.device_bytes=\"2 KiB\""}).device_bytes == 2048);
  CHECK(offload({"offload.params=true", "offload.device_param_bytes=1MiB"}).device_param_bytes == 1 << 20);
  CHECK(offload({"offload.grads=true", "offload.host_bytes=64KiB"}).host_bytes == 64 << 10);
  check_refused({
      {{"offload.device_bytes=-1"}, "offload.device_bytes: -1 is negative (bytes, or a string: \"24GiB\")"},
      {{"offload.device_param_bytes=-5", "offload.params=true"},
       "offload.device_param_bytes: -5 is negative (bytes, or a string: \"24GiB\")"},
      {{"offload.host_bytes=-2", "offload.params=true"},
       "offload.host_bytes: -2 is negative (bytes, or a string: \"24GiB\")"},
      {{"offload.disk_bytes=-3"}, "offload.disk_bytes: -3 is negative (bytes, or a string: \"24GiB\")"},
      {{"offload.host_bytes=24G"},
       "offload.host_bytes: '24G' is not a size (bytes, or a number with B, KiB, MiB, GiB, TiB, PiB, kB, MB, GB, TB or "
       "PB: 24GiB)"},
      {{"offload.host_bytes=-1GiB"},
       "offload.host_bytes: '-1GiB' is not a size (bytes, or a number with B, KiB, MiB, GiB, TiB, PiB, kB, MB, GB, TB "
       "or PB: 24GiB)"},
      {{"offload.disk_bytes=true"}, "offload.disk_bytes: true is not a size (bytes, or a string: \"24GiB\")"},
  });
}

TEST_CASE("budgets and folders of offload that cannot be are refused", "[graphs][config][offload][refuses]") {
  check_refused({
      {{"offload.slots=0", "offload.params=true"}, "offload.slots: 0 is out of range (an integer from 1 to 1024)"},
      {{"offload.params=true", "offload.device_bytes=1000", "offload.device_param_bytes=1001"},
       "offload.device_param_bytes: 1001 is above offload.device_bytes 1000, all memory of the device (at most 1000)"},
      {{"offload.params=true", "offload.disk_bytes=1GiB"},
       "offload.disk_bytes: 1073741824 has no effect without offload.disk (the name of a folder)"},
      {{"offload.params=true", "offload.disk=1"}, "offload.disk: 1 is not a string (text in quotes)"},
  });
  // A config may be for another machine.
  CHECK(refusal({"offload.params=true", sg::str("offload.host_bytes=", sg::machine_memory_bytes() + 1)}).empty());
  CHECK(refusal({"offload.params=true", "offload.disk=no such folder"}).empty());
  CHECK(refusal({"offload.params=true", "offload.device_bytes=1000", "offload.device_param_bytes=1000"}).empty());
  CHECK(refusal({"offload.params=true", "offload.disk=.", "offload.disk_bytes=1GiB"}).empty());
}

TEST_CASE("keys of offload without an effect are refused", "[graphs][config][offload][refuses]") {
  const std::string nothing =
      "because nothing is offloaded (offload.params, grads, optimizer or activations true, or a strategy)";
  for (const auto& [key, value] : std::vector<std::pair<std::string, std::string>>{{"host_bytes", "1MiB"},
                                                                                   {"disk", "."},
                                                                                   {"slots", "3"},
                                                                                   {"async", "false"},
                                                                                   {"pinned", "false"},
                                                                                   {"compress", "bf16"}}) {
    const std::string given = sg::str("offload.", key, "=", value);
    CHECK(refusal({given}) == sg::str("offload.", key, ": has no effect ", nothing));
    for (const char* one : {"params", "grads", "optimizer", "activations"})
      CHECK(refusal({given, sg::str("offload.", one, "=true")}).empty());
    CHECK(refusal({given, "offload.strategy=extreme"}).empty());
  }
  check_refused({
      {{"offload.grads=true", "offload.device_param_bytes=1MiB"},
       "offload.device_param_bytes: has no effect while all weights stay on the device (offload.params true)"},
      {{"offload.strategy=balanced", "offload.optimizer=true", "offload.device_param_bytes=1MiB"},
       "offload.device_param_bytes: has no effect while all weights stay on the device (offload.params true)"},
      {{"offload.params=true", "offload.overlap=false"},
       "offload.overlap: has no effect without offload.optimizer true: the update then runs at the end of its own step "
       "(offload.optimizer true)"},
      {{"offload.disk=.", "offload.strategy=balanced"},
       "offload.disk: '.' has no effect with strategy balanced, which does not use a disk (strategy manual or "
       "extreme)"},
  });
  // A strategy may move everything unless keys say what.
  CHECK(refusal({"offload.strategy=balanced", "offload.device_param_bytes=1MiB"}).empty());
  CHECK(refusal({"offload.strategy=balanced", "offload.optimizer=true", "offload.overlap=false"}).empty());
  CHECK(refusal({"offload.optimizer=true", "offload.overlap=false"}).empty());
  CHECK(refusal({"offload.device_bytes=1GiB"}).empty());  // a limit in any case
}

TEST_CASE("names of offload in other libraries are answered with the names here",
          "[graphs][config][offload][refuses]") {
  const std::string strategies = " here (known: manual, conservative, balanced, aggressive, extreme)";
  const std::string keys =
      " here (known: params, grads, optimizer, activations, strategy, device_bytes, device_param_bytes, host_bytes, "
      "disk_bytes, disk, slots, async, overlap, pinned, compress)";
  check_refused({
      {{"offload.strategy=zero_offload"},
       "offload.strategy: \"zero_offload\" is called \"manual\" with offload.grads and optimizer true" + strategies},
      {{"offload.strategy=ZeRO-Infinity"},
       "offload.strategy: \"ZeRO-Infinity\" is called \"manual\" with offload.params, grads and optimizer true and "
       "offload.disk" +
           strategies},
      {{"offload.strategy=cpu"},
       "offload.strategy: \"cpu\" is called \"manual\" with offload.params, grads and optimizer true" + strategies},
      {{"offload.strategy=nvme"},
       "offload.strategy: \"nvme\" is called \"manual\" with offload.disk and offload.host_bytes" + strategies},
      {{"offload.strategy=none"},
       "offload.strategy: \"none\" is called \"manual\" with nothing else in offload" + strategies},
      {{"offload.strategy=agressive"},
       "offload.strategy: \"agressive\" is unknown (did you mean aggressive? known: manual, conservative, balanced, "
       "aggressive, extreme)"},
      {{"offload.optimizer=cpu"}, "offload.optimizer: \"cpu\" is called true here (true or false)"},
      {{"offload.params=nvme"},
       "offload.params: \"nvme\" is called true with offload.disk and offload.host_bytes here (true or false)"},
      {{"offload.grads=none"}, "offload.grads: \"none\" is called false here (true or false)"},
      {{"offload.grads=yes"}, "offload.grads: \"yes\" is not true or false (true or false, without quotes)"},
      {{"offload.nvme_path=/tmp"}, "offload.nvme_path: is called \"disk\"" + keys},
      {{"offload.pin_memory=true"}, "offload.pin_memory: is called \"pinned\"" + keys},
      {{"offload.compress=lz4"},
       "offload.compress: \"lz4\" is called \"lossless\" here (known: none, fp16, bf16, int8, dynamic8, lossless)"},
      {{"offload.compress=zstd"},
       "offload.compress: \"zstd\" is called \"lossless\", which is lz4, here (known: none, fp16, bf16, int8, "
       "dynamic8, "
       "lossless)"},
      {{"offload.compress=float16"},
       "offload.compress: \"float16\" is called \"fp16\" here (known: none, fp16, bf16, int8, dynamic8, lossless)"},
      {{"offload.compress=fp8"},
       "offload.compress: \"fp8\" is unknown (known: none, fp16, bf16, int8, dynamic8, lossless)"},
  });
}
