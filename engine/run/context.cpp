#include "engine/run/context.hpp"

#include <algorithm>

#include "engine/base/error.hpp"
#include "engine/run/program/running_program.hpp"

namespace stepgraph {

const AccessRecord& Context::access(AccessMode mode, std::size_t i) const {
  // The accesses of a node lie together by mode: reads, writes, accumulates (Graph::add).
  const GraphData& data = program_->graph().data();
  const auto begin      = data.accesses.begin();
  const auto first =
      std::partition_point(begin + data.nodes[node().id].access_begin, begin + data.access_end(node().id),
                           [&](const AccessRecord& of) { return of.mode() < mode; });
  const auto last  = std::partition_point(first, begin + data.access_end(node().id),
                                          [&](const AccessRecord& of) { return of.mode() == mode; });
  const auto count = static_cast<std::size_t>(last - first);
  if (i >= count) {
    throw Error(ErrorKind::config,
                str(to_string(mode), "(", i, "): the node declares ", count, " such access", count == 1 ? "" : "es"));
  }
  return first[static_cast<std::ptrdiff_t>(i)];
}

StoredBytes Context::stored(AccessMode mode, std::size_t i) const {
  const GraphData& data      = program_->graph().data();
  const AccessRecord& record = access(mode, i);
  const Region region        = data.region(record);
  StoredBytes found          = program_->memory().stored({record.buffer()});
  if (found.storage == nullptr) {
    const BufferSpec& buffer = data.buffers[record.buffer()];
    throw Error(ErrorKind::config, str("stored(", to_string(mode), ", ", i, "): buffer '", buffer.name, "' is in ",
                                       to_string(buffer.space), " memory (use ", to_string(mode), ")"));
  }
  if (region.count != 1)
    throw Error(ErrorKind::config, str("stored(", to_string(mode), ", ", i, ") is strided, ", region.count,
                                       " rows (one access for each range on disk)"));
  found.offset += region.offset;
  found.size_bytes = region.length;
  return found;
}

Rows<std::byte> Context::strided(AccessMode mode, std::size_t i, Element element) const {
  const GraphData& data      = program_->graph().data();
  const AccessRecord& access = this->access(mode, i);
  const BufferSpec& buffer   = data.buffers[access.buffer()];
  const Region region        = data.region(access);
  const auto size            = static_cast<std::int64_t>(element.size_bytes);
  if (buffer.token) throw Error(ErrorKind::config, str(to_string(mode), "(", i, ") is a token, which has no memory"));
  if (buffer.space == Space::disk) {
    throw Error(ErrorKind::config, str(to_string(mode), "(", i, "): buffer '", buffer.name,
                                       "' is on disk, where it has no address (use stored, or copy it to a buffer in ",
                                       to_string(Space::pinned), " memory first)"));
  }
  // Bytes read as anything, and anything as bytes.
  const bool fits = size == 1 || buffer.type == DType::u8 ||
                    (element.type ? *element.type == buffer.type : element.size_bytes == size_bytes(buffer.type));
  if (!fits) {
    throw Error(ErrorKind::config,
                str("buffer '", buffer.name, "' holds ", buffer.type, ", but ", to_string(mode), "(", i, ") asks for ",
                    element.type ? str(*element.type) : str("elements of ", size, " bytes")));
  }
  if (region.offset % size != 0 || region.length % size != 0 || region.stride % size != 0) {
    throw Error(ErrorKind::config, str(to_string(mode), "(", i, "): bytes ", to_string(region), " of buffer '",
                                       buffer.name, "' are not whole elements of ", size, " bytes"));
  }
  return {program_->memory().data({access.buffer()}) + region.offset, region.length, region.stride, region.count};
}

Rows<std::byte> Context::range(AccessMode mode, std::size_t i, Element element) const {
  const Rows<std::byte> rows = strided(mode, i, element);
  if (rows.count == 1) return rows;
  throw Error(ErrorKind::config,
              str(to_string(mode), "(", i, ") is strided, ", rows.count, " rows (use ", to_string(mode), "_rows)"));
}

void Context::run_tiles(std::int64_t num_tiles, TileCall tile) const {
  program_->parallel_for(node(), num_tiles, tile);
}

Node Context::node() const noexcept { return {task_.load(std::memory_order_relaxed)->node}; }
bool Context::stopping() const noexcept { return program_->stopping(); }
void Context::waiting_for(std::string_view what) const { program_->waiting_for(what); }
Rank Context::rank() const { return program_->graph().rank(node()); }

}  // namespace stepgraph
