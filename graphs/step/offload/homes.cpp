#include "graphs/step/offload/homes.hpp"

#include <algorithm>
#include <array>

#include "engine/base/error.hpp"
#include "engine/run/storage.hpp"
#include "graphs/step/offload/bytes.hpp"

namespace stepgraph {

std::string_view to_string(OffloadClass of) noexcept {
  constexpr std::array<std::string_view, 4> names{"params", "grads", "optimizer", "activations"};
  return names[static_cast<std::size_t>(of)];
}

std::string_view to_string(ActivationMode mode) noexcept {
  constexpr std::array<std::string_view, 3> names{"keep", "recompute", "offload"};
  return names[static_cast<std::size_t>(mode)];
}

std::string to_text(const ActivationCounts& counts) {
  return str(counts.offloaded, counts.offloaded == 1 ? " layer" : " layers", " offloaded, ", counts.recomputed,
             " recomputed, ", counts.kept, " kept");
}

std::string_view to_string(UpdateMode mode) noexcept {
  constexpr std::array<std::string_view, 3> names{"resident", "streamed", "host"};
  return names[static_cast<std::size_t>(mode)];
}

HomeFormat home_format(DType type, std::int64_t elements, Space space, Compression compression,
                       std::int64_t piece_bytes) {
  HomeFormat made{.type = type, .elements = elements, .space = space};
  if (compression == Compression::none) return made;
  made.compression = effective(compression, type);
  if (made.compression != Compression::lossless) return made;
  // The packed bytes of a chunk must fit a piece: its elements and a table of 8 bytes for each block of 64 KiB.
  constexpr std::int64_t aligned = 64;  // elements
  const std::int64_t table       = 8 * (piece_bytes / (std::int64_t{64} << 10) + 1);
  const auto most = (piece_bytes - table) / static_cast<std::int64_t>(size_bytes(type)) / aligned * aligned;
  if (most < 1 || compressed_bytes(made.compression, type, most) > piece_bytes) {
    throw Error(ErrorKind::config, str("offload: pieces of ", piece_bytes, " bytes for lossless compression (at least ",
                                       Storage::block_bytes, ")"));
  }
  if (elements <= most) return made;
  made.chunk_elements = most;
  made.stride_bytes   = piece_bytes;
  return made;
}

std::vector<HomeChunk> chunks_of(const HomeFormat& home) {
  const std::int64_t each = home.chunk_elements > 0 ? home.chunk_elements : home.elements;
  std::vector<HomeChunk> chunks;
  for (std::int64_t begin = 0; begin < home.elements; begin += each) {
    const std::int64_t elements = std::min(each, home.elements - begin);
    const std::int64_t bytes    = home.compression == Compression::none
                                      ? elements * static_cast<std::int64_t>(size_bytes(home.type))
                                      : compressed_bytes(home.compression, home.type, elements);
    chunks.push_back(
        {.begin = begin, .elements = elements, .offset = home.stride_bytes * std::ssize(chunks), .bytes = bytes});
  }
  return chunks;
}

std::int64_t stored_bytes(const HomeFormat& home) {
  const std::vector<HomeChunk> chunks = chunks_of(home);
  const std::int64_t end              = chunks.empty() ? 0 : chunks.back().offset + chunks.back().bytes;
  return home.space == Space::disk ? offload::rounded_up(end, Storage::block_bytes) : end;
}

}  // namespace stepgraph
