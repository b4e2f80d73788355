#include "engine/run/context.hpp"

#include "engine/base/error.hpp"
#include "engine/run/running_program.hpp"

namespace stepgraph {

Rows<std::byte> Context::strided(AccessMode mode, std::size_t i, Element element) const {
  const GraphData& data = program_->graph().data();
  std::size_t seen      = 0;
  for (std::uint32_t k = data.nodes[node().id].access_begin; k < data.access_end(node().id); ++k) {
    const AccessRecord& access = data.accesses[k];
    if (access.mode() != mode || seen++ != i) continue;
    const BufferSpec& buffer = data.buffers[access.buffer()];
    const Region region      = data.region(access);
    const auto size          = static_cast<std::int64_t>(element.size_bytes);
    if (buffer.token) throw Error(ErrorKind::config, str(to_string(mode), "(", i, ") is a token, which has no memory"));
    // Bytes read as anything, and anything as bytes.
    const bool fits = size == 1 || buffer.type == DType::u8 ||
                      (element.type ? *element.type == buffer.type : element.size_bytes == size_bytes(buffer.type));
    if (!fits) {
      throw Error(ErrorKind::config,
                  str("buffer '", buffer.name, "' holds ", buffer.type, ", but ", to_string(mode), "(", i,
                      ") asks for ", element.type ? str(*element.type) : str("elements of ", size, " bytes")));
    }
    if (region.offset % size != 0 || region.length % size != 0 || region.stride % size != 0) {
      throw Error(ErrorKind::config, str(to_string(mode), "(", i, "): bytes ", to_string(region), " of buffer '",
                                         buffer.name, "' are not whole elements of ", size, " bytes"));
    }
    return {program_->memory().data({access.buffer()}) + region.offset, region.length, region.stride, region.count};
  }
  throw Error(ErrorKind::config,
              str(to_string(mode), "(", i, "): the node declares ", seen, " such access", seen == 1 ? "" : "es"));
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
