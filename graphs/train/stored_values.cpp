#include "graphs/train/stored_values.hpp"

#include <cstring>

#include "engine/base/error.hpp"
#include "engine/run/device.hpp"
#include "ops/transfers/compress.hpp"

namespace stepgraph {
namespace {

constexpr std::size_t most_raw_bytes = std::size_t{256} << 20;  // beside the buffer in use

void check_range(const Graph& graph, Buffer buffer, std::int64_t offset, std::size_t size, std::size_t all) {
  if (offset >= 0 && static_cast<std::size_t>(offset) + size <= all) return;
  throw Error(ErrorKind::config, str("memory: bytes [", offset, ", ", offset + static_cast<std::int64_t>(size), ") of ",
                                     graph.describe(buffer), ", which has ", all));
}

}  // namespace

StoredValues::StoredValues(const StepGraph& step, const Memory& memory) : graph_(step.graph), memory_(memory) {
  for (const HomeFormat& home : step.homes) {
    if (home.compression != Compression::none) packed_.emplace(home.home.id, home);
  }
}

const HomeFormat* StoredValues::packed(Buffer buffer) const {
  const auto found = packed_.find(buffer.id);
  return found == packed_.end() ? nullptr : &found->second;
}

bool StoredValues::prefers_long_ranges(Buffer buffer) const {
  const Space space = graph_.spec(buffer).space;
  return space == Space::disk || (space == Space::device && memory_.device() != nullptr);
}

std::span<std::byte> StoredValues::in_place(Buffer buffer) const {
  const Space space     = graph_.spec(buffer).space;
  const bool is_visible = space != Space::disk && (memory_.device() == nullptr || memory_.device()->host_sees(space));
  return is_visible && packed(buffer) == nullptr ? memory_.bytes(buffer) : std::span<std::byte>();
}

StoredValues::Raw& StoredValues::raw(const HomeFormat& home) const {
  if (const auto found = raw_.find(home.home.id); found != raw_.end()) return found->second;
  const auto size = static_cast<std::size_t>(home.elements) * size_bytes(home.type);
  if (raw_bytes_ + size > most_raw_bytes) {
    for (const auto& [id, each] : raw_) {
      if (each.changed) store(packed_.at(id), each);
    }
    raw_.clear();
    raw_bytes_ = 0;
  }
  Raw made{.bytes = std::vector<std::byte>(size)};
  const std::size_t element = size_bytes(home.type);
  for (const HomeChunk& chunk : chunks_of(home)) {
    std::vector<std::byte> stored(static_cast<std::size_t>(chunk.bytes));
    memory_.read(home.home, std::span(stored), chunk.offset);
    decompress(home.compression, home.type, stored,
               std::span(made.bytes)
                   .subspan(static_cast<std::size_t>(chunk.begin) * element,
                            static_cast<std::size_t>(chunk.elements) * element));
  }
  raw_bytes_ += size;
  return raw_.emplace(home.home.id, std::move(made)).first->second;
}

void StoredValues::store(const HomeFormat& home, const Raw& of) const {
  const std::size_t element = size_bytes(home.type);
  for (const HomeChunk& chunk : chunks_of(home)) {
    std::vector<std::byte> stored(static_cast<std::size_t>(chunk.bytes));
    compress(home.compression, home.type,
             std::span(of.bytes).subspan(static_cast<std::size_t>(chunk.begin) * element,
                                         static_cast<std::size_t>(chunk.elements) * element),
             stored);
    memory_.write(home.home, std::span<const std::byte>(stored), chunk.offset);
  }
}

void StoredValues::read_bytes(Buffer buffer, std::int64_t offset, std::span<std::byte> to) const {
  const HomeFormat* const home = packed(buffer);
  if (home == nullptr) return memory_.read(buffer, to, offset);
  const std::lock_guard lock(mutex_);
  const Raw& from = raw(*home);
  check_range(graph_, buffer, offset, to.size(), from.bytes.size());
  std::memcpy(to.data(), from.bytes.data() + offset, to.size());
}

void StoredValues::write_bytes(Buffer buffer, std::int64_t offset, std::span<const std::byte> from) {
  const HomeFormat* const home = packed(buffer);
  if (home == nullptr) return memory_.write(buffer, from, offset);
  const std::lock_guard lock(mutex_);
  Raw& to = raw(*home);
  check_range(graph_, buffer, offset, from.size(), to.bytes.size());
  std::memcpy(to.bytes.data() + offset, from.data(), from.size());
  to.changed = true;
}

void StoredValues::flush() {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, each] : raw_) {
    if (each.changed) store(packed_.at(id), each);
  }
  raw_.clear();
  raw_bytes_ = 0;
}

}  // namespace stepgraph
