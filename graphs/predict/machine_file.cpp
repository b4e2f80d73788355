#include "graphs/predict/machine_file.hpp"

#include "engine/base/error.hpp"
#include "graphs/files/files.hpp"
#include "graphs/files/json_value.hpp"

namespace stepgraph {

MachineFile load_machine_file(const std::filesystem::path& path) {
  constexpr std::int64_t most_bytes = 16 << 20;
  const JsonValue value             = parse_json(read_text(path, most_bytes), path.string());
  const bool measured               = value.is_object() && value.contains("type");  // a description has no such key
  if (measured) return load_calibration(path);
  return load_cluster(path);
}

Machine machine_of(const MachineFile& file, int num_ranks, DType type) {
  if (const auto* calibration = std::get_if<Calibration>(&file))
    return calibrated_machine(*calibration, num_ranks, type);
  return cluster_machine(std::get<Cluster>(file), num_ranks, type);
}

}  // namespace stepgraph
