#include "tools/stepgraph/processes/together.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <variant>
#include <vector>

#include "engine/run/packed.hpp"
#include "engine/run/peers.hpp"
#include "ops/transfers/hash.hpp"

namespace stepgraph::cli {

bool is_first(World& world) { return world.peers() == nullptr || world.peers()->process() == 0; }

void in_first(World& world, std::string_view subject, const std::function<void()>& work) {
  stepgraph::in_first(world.peers(), subject, work);
}

std::string sample_file(const std::string& path) {
  constexpr std::uintmax_t block_bytes = 4096, num_blocks = 64;
  std::error_code failed;
  const std::uintmax_t size = std::filesystem::file_size(path, failed);
  std::ifstream file(path, std::ios::binary);
  if (failed || !file) return "missing";
  std::uint64_t hash = 0;
  std::vector<char> block(block_bytes);
  // Spread evenly, the first and the last block included.
  const std::uintmax_t last = size > block_bytes ? size - block_bytes : 0;
  for (std::uintmax_t i = 0; i < num_blocks; ++i) {
    const std::uintmax_t begin = i + 1 == num_blocks ? last : last / (num_blocks - 1) * i;
    file.seekg(static_cast<std::streamoff>(begin));
    file.read(block.data(), static_cast<std::streamsize>(block.size()));
    const auto got = static_cast<std::size_t>(file.gcount());
    file.clear();
    hash = join_hashes(hash, hash_bytes(std::as_bytes(std::span(block).first(got))));
    if (size <= block_bytes) break;
  }
  return str(size, " bytes, sampled ", hash_text(hash));
}

void require_same_job(World& world, const Config& config, std::string_view options, bool with_weights) {
  if (world.peers() == nullptr) return;
  Config shared  = config;
  shared.threads = 0;
  shared.world   = {};
  shared.devices = {};  // those of a machine
  world.peers()->require_same("version", STEPGRAPH_VERSION);
  world.peers()->require_same("config", to_json(shared));
  world.peers()->require_same("options", options);
  const auto sampled = [](const DataSource& source) {
    const auto* tokens = std::get_if<TokenFiles>(&source);
    const auto* text   = std::get_if<TextFiles>(&source);
    if (!tokens && !text) return std::string("synthetic");
    std::string samples;
    for (const std::filesystem::path& path : tokens ? tokens->paths : text->paths)
      samples += str(samples.empty() ? "" : "; ", sample_file(path.string()));
    return samples;
  };
  world.peers()->require_same("data", sampled(config.data.source));
  if (config.eval.data) world.peers()->require_same("eval.data", sampled(config.eval.data->source));
  if (!config.machine.empty()) world.peers()->require_same("comm.machine", sample_file(config.machine));
  std::string model = "from the config";
  if (const auto* from = std::get_if<LoadFrom>(&config.model)) {
    std::vector<std::string> files;
    std::error_code failed;
    for (const auto& entry : std::filesystem::directory_iterator(from->folder, failed)) {
      const std::string name = entry.path().filename().string();
      if (name == "config.json" || (with_weights && entry.path().extension() == ".safetensors")) files.push_back(name);
    }
    std::sort(files.begin(), files.end());
    model.clear();
    for (const std::string& name : files)
      model += str(model.empty() ? "" : "; ", name, ": ", sample_file(from->folder + "/" + name));
  }
  world.peers()->require_same("model", model);
}

int threads_here(World& world, int asked) {
  if (world.peers() == nullptr) return asked;
  const int num_processes = num_on_machine(*world.peers());
  if (asked > 0) return asked;
  cpu_set_t bound;
  CPU_ZERO(&bound);
  const int cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  const int mine  = sched_getaffinity(0, sizeof bound, &bound) == 0 ? CPU_COUNT(&bound) : cores;
  return std::max(1, mine < cores ? mine : cores / std::max(1, num_processes));
}

namespace {

Bytes packed(const Boundary& boundary) {
  const Stop& stop = boundary.stop;
  Packer out;
  out.add(boundary.save).add(boundary.written).add(stop.signal).add(stop.output_closed);
  out.add(stop.failure ? static_cast<int>(stop.failure->kind()) : -1);
  return out.add_text(stop.failure ? stop.failure->what() : "").take();
}

Boundary unpacked(const Bytes& bytes) {
  Unpacker in(bytes);
  Boundary boundary;
  boundary.save          = in.get<bool>();
  boundary.written       = in.get<bool>();
  boundary.stop          = {.signal = in.get<int>(), .output_closed = in.get<bool>()};
  const int kind         = in.get<int>();
  const std::string text = in.get_text();
  if (kind >= 0) boundary.stop.failure.emplace(static_cast<ErrorKind>(kind), text);
  return boundary;
}

}  // namespace

Boundary agree(World& world, const Boundary& mine) {
  if (world.peers() == nullptr) return mine;
  Peers& peers    = *world.peers();
  Boundary agreed = mine;
  for (const Bytes& bytes : peers.gather("the next step", packed(mine))) {
    Boundary other = unpacked(bytes);
    agreed.save    = agreed.save || other.save;
    agreed.written = agreed.written && other.written;
    if (!agreed.stop.wanted()) agreed.stop = std::move(other.stop);
  }
  return unpacked(peers.broadcast("the next step", is_first(world) ? packed(agreed) : Bytes()));
}

Stop agree(World& world, const Stop& mine) { return agree(world, Boundary{.stop = mine}).stop; }

std::string from_first(World& world, std::string_view subject, const std::function<std::string()>& work) {
  std::string value;
  in_first(world, subject, [&] { value = work(); });
  if (world.peers() == nullptr) return value;
  Packer mine;
  const Bytes bytes = world.peers()->broadcast(subject, is_first(world) ? mine.add_text(value).take() : Bytes());
  return Unpacker(bytes).get_text();
}

}  // namespace stepgraph::cli
