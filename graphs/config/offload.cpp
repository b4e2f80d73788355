#include <limits>

#include "engine/base/error.hpp"
#include "graphs/config/reader.hpp"
#include "graphs/config/sections.hpp"

namespace stepgraph {
namespace {

using OtherName = ConfigReader::OtherName;

const ConfigReader::Names offload_keys{
    "params",     "grads",      "optimizer", "activations", "strategy", "device_bytes", "device_param_bytes",
    "host_bytes", "disk_bytes", "disk",      "slots",       "async",    "overlap",      "pinned",
    "compress"};

// What DeepSpeed, PyTorch and others call them.
constexpr OtherName keys_elsewhere[] = {
    {"offload_param", "\"params\""},
    {"offload_params", "\"params\""},
    {"offload_optimizer", "\"optimizer\""},
    {"cpu_offload", "\"params\", \"grads\" and \"optimizer\""},
    {"nvme_path", "\"disk\""},
    {"swap_path", "\"disk\""},
    {"pin_memory", "\"pinned\""},
    {"buffer_count", "\"slots\""},
    {"prefetch", "\"slots\""},
    {"max_in_cpu", "\"host_bytes\", in bytes,"},
};

constexpr OtherName strategies_elsewhere[] = {
    {"none", "\"manual\" with nothing else in offload"},
    {"auto", "\"balanced\""},
    {"cpu", "\"manual\" with offload.params, grads and optimizer true"},
    {"zerooffload", "\"manual\" with offload.grads and optimizer true"},
    {"zeroinfinity", "\"manual\" with offload.params, grads and optimizer true and offload.disk"},
    {"fsdp", "\"manual\" with offload.params, grads and optimizer true"},
    {"nvme", "\"manual\" with offload.disk and offload.host_bytes"},
    {"disk", "\"manual\" with offload.disk and offload.host_bytes"},
};

constexpr OtherName places_elsewhere[] = {
    {"none", "false"},
    {"cpu", "true"},
    {"host", "true"},
    {"nvme", "true with offload.disk and offload.host_bytes"},
    {"disk", "true with offload.disk and offload.host_bytes"},
};

constexpr OtherName compressions_elsewhere[] = {
    {"off", "\"none\""},
    {"half", "\"fp16\""},
    {"float16", "\"fp16\""},
    {"f16", "\"fp16\""},
    {"bfloat16", "\"bf16\""},
    {"8bit", "\"int8\""},
    {"q8", "\"int8\""},
    {"dynamic", "\"dynamic8\""},
    {"blockwise", "\"dynamic8\""},
    {"bitsandbytes", "\"dynamic8\""},
    {"lz4", "\"lossless\""},
    {"zstd", "\"lossless\", which is lz4,"},
};

// Which keys and places are named as elsewhere.
void check_names(const ConfigReader& root, const JsonValue* value) {
  if (!value || value->kind != JsonValue::Kind::object) return;
  for (const OtherName& other : keys_elsewhere) {
    if (value->find(other.there))
      root.refuse(str("offload.", other.there),
                  str("is called ", other.here, " here (known: ", list_names(offload_keys), ")"));
  }
  for (const std::string_view key : {"params", "grads", "optimizer", "activations"}) {
    const JsonValue* given = value->find(key);
    if (!given || given->kind != JsonValue::Kind::string) continue;
    for (const OtherName& other : places_elsewhere) {
      if (given->text == other.there)
        root.refuse(str("offload.", key), str(excerpt(*given), " is called ", other.here, " here (true or false)"));
    }
  }
}

}  // namespace

void read_offload(const ConfigReader& root, const JsonValue* value, OffloadPlan& offload) {
  check_names(root, value);
  const ConfigReader section = root.section("offload", offload_keys);
  section.boolean("params", offload.params);
  section.boolean("grads", offload.grads);
  section.boolean("optimizer", offload.optimizer);
  section.boolean("activations", offload.activations);
  offload.strategy = read_enum(section, "strategy", offload.strategy, OffloadStrategy::extreme, strategies_elsewhere);
  section.size("device_bytes", offload.device_bytes);
  section.size("device_param_bytes", offload.device_param_bytes);
  section.size("host_bytes", offload.host_bytes);
  section.size("disk_bytes", offload.disk_bytes);
  if (!section.is_empty_text("disk")) section.text("disk", offload.disk);
  section.integer("slots", offload.slots, 1, most_offload_slots);
  section.boolean("async", offload.async);
  section.boolean("overlap", offload.overlap);
  section.boolean("pinned", offload.pinned);
  offload.compress = read_enum(section, "compress", offload.compress, Compression::lossless, compressions_elsewhere);
  check_offload(offload);
}

}  // namespace stepgraph
