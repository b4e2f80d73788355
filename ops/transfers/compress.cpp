#include "ops/transfers/compress.hpp"

#include <algorithm>
#include <cstring>

#include "engine/base/error.hpp"
#include "engine/run/context.hpp"
#include "ops/cpu/compress.hpp"
#include "ops/cpu/into.hpp"
#include "ops/cuda/common/built.hpp"
#include "ops/cuda/transfers/compress.hpp"
#include "ops/shared/compress_codes.hpp"
#include "ops/tape/streams.hpp"

namespace stepgraph {
namespace {

std::int64_t element_bytes(DType type) noexcept { return static_cast<std::int64_t>(size_bytes(type)); }

// A range of elements and what is really done with it.
struct Range {
  Compression kind;
  DType type;
  std::int64_t elements;
  [[nodiscard]] std::int64_t raw_bytes() const { return elements * element_bytes(type); }
  [[nodiscard]] cpu::LosslessRange lossless() const {
    return {.raw_bytes = raw_bytes(), .element_bytes = static_cast<int>(element_bytes(type))};
  }
};

// Calls each(count, tile, call) with the number of items, those of a tile, and what compresses items [begin, end).
template <class Each>
void compress_with(const Range& range, const std::byte* raw, std::byte* packed, const Each& each) {
  if (range.kind == Compression::lossless) {
    each(range.lossless().num_blocks(), 1, [&](std::int64_t begin, std::int64_t end) {
      for (; begin < end; ++begin) cpu::compress_block(range.lossless(), raw, packed, begin);
    });
    cpu::close_gaps(range.lossless(), packed);
    return;
  }
  each(range.elements, cpu::compress_tile, [&](std::int64_t begin, std::int64_t end) {
    cpu::compress_elements(range.kind, range.type, raw, packed, begin, end);
  });
}
template <class Each>
void decompress_with(const Range& range, std::byte* raw, const std::byte* packed, const Each& each) {
  if (range.kind == Compression::lossless) {
    return each(range.lossless().num_blocks(), 1, [&](std::int64_t begin, std::int64_t end) {
      for (; begin < end; ++begin) cpu::decompress_block(range.lossless(), raw, packed, begin);
    });
  }
  each(range.elements, cpu::compress_tile, [&](std::int64_t begin, std::int64_t end) {
    cpu::decompress_elements(range.kind, range.type, raw, packed, begin, end);
  });
}

void check_built(const std::string& subject, Compression kind) {
  if (is_built(kind)) return;
  throw Error(ErrorKind::config,
              str(subject, ": ", to_string(kind), " needs lz4, but this build has none (install liblz4-dev)"));
}

// --- nodes -----------------------------------------------------------------------------------------------------------

[[noreturn]] void refuse(const std::string& subject, const std::string& what) {
  throw Error(ErrorKind::config, str(subject, ": ", what));
}

Range check(const Graph& graph, const std::string& subject, const Compress& spec) {
  const BufferSpec &raw = graph.spec(spec.raw.buffer), &packed = graph.spec(spec.packed.buffer);
  const DType type = spec.type.value_or(raw.type);
  check_built(subject, spec.kind);
  if (packed.type != DType::u8) refuse(subject, str("packed bytes in a buffer of ", packed.type, " (u8)"));
  for (const Access* access : {&spec.raw, &spec.packed}) {
    if (access->region.count > 1)
      refuse(subject, str(to_string(access->region), " of ", graph.describe(access->buffer), " (one range)"));
  }
  const std::int64_t bytes = num_bytes(graph, spec.raw), element = element_bytes(type);
  if (bytes % element != 0 || spec.raw.region.offset % element != 0)
    refuse(subject, str(bytes, " bytes from ", spec.raw.region.offset, " on are not whole elements of ", type));
  if (spec.packed.region.offset % packed_alignment != 0) {
    refuse(subject,
           str("packed bytes begin at ", spec.packed.region.offset, " (a multiple of ", packed_alignment, ")"));
  }
  const Range range{effective(spec.kind, type), type, bytes / element};
  const std::int64_t reserved = compressed_bytes(spec.kind, type, range.elements),
                     given    = num_bytes(graph, spec.packed);
  if (reserved != given) {
    refuse(subject, str(range.elements, " elements of ", type, " as ", to_string(spec.kind), " in ", given, " bytes (",
                        reserved, ")"));
  }
  if (raw.space != packed.space || raw.space == Space::disk) {
    refuse(subject, str("elements in ", to_string(raw.space), " and packed bytes in ", to_string(packed.space),
                        " memory (both in device, or both in pinned memory)"));
  }
  if (range.kind == Compression::lossless && raw.space != Space::pinned)
    refuse(subject, str("lossless in ", to_string(raw.space), " memory (pinned)"));
  return range;
}

NodeSpec node_of(const Graph& graph, const char* op, const Compress& spec, const Range& range) {
  const BufferSpec& raw = graph.spec(spec.raw.buffer);
  const bool host = raw.space == Space::pinned, lossless = range.kind == Compression::lossless;
  NodeSpec node{.name     = spec.name,
                .kind     = host ? NodeKind::host : NodeKind::compute,
                .op       = lossless ? str(op, "_lossless") : op,
                .parallel = true,
                .device   = !host,
                .cost     = {.flops       = 4 * static_cast<double>(range.elements),
                             .bytes_moved = static_cast<double>(num_bytes(graph, spec.raw)) +
                                            static_cast<double>(num_bytes(graph, spec.packed))},
                .labels   = spec.labels};
  if (spec.lane) node.lane = graph.lane(raw.rank, *spec.lane);
  return node;
}

// How nodes call the items of a range: in parallel tiles.
auto tiles_of(const Context& context) {
  return [&context](std::int64_t count, std::int64_t tile, const auto& call) {
    cpu::for_tiles(context, count, tile, call);
  };
}

// --- outside of graphs -----------------------------------------------------------------------------------------------

Range check(const char* op, Compression kind, DType type, std::int64_t raw_bytes, std::int64_t packed_bytes,
            const void* raw, const void* packed) {
  check_built(op, kind);
  const Range range{effective(kind, type), type, raw_bytes / element_bytes(type)};
  if (raw_bytes % element_bytes(type) != 0) refuse(op, str(raw_bytes, " bytes are not whole elements of ", type));
  const std::int64_t reserved = compressed_bytes(kind, type, range.elements);
  if (packed_bytes != reserved) {
    refuse(op, str(range.elements, " elements of ", type, " as ", to_string(kind), " in ", packed_bytes, " bytes (",
                   reserved, ")"));
  }
  if (reinterpret_cast<std::uintptr_t>(raw) % size_bytes(type) != 0 ||
      reinterpret_cast<std::uintptr_t>(packed) % packed_alignment != 0)
    refuse(op, str("memory that is not aligned (elements to ", size_bytes(type), " bytes, packed bytes to ",
                   packed_alignment, ")"));
  return range;
}

constexpr auto all_at_once = [](std::int64_t count, std::int64_t, const auto& call) { call(std::int64_t{0}, count); };

}  // namespace

bool is_built(Compression kind) noexcept { return kind != Compression::lossless || cpu::has_lossless(); }

Compression effective(Compression kind, DType type) noexcept {
  if (kind == Compression::lossless) return kind;
  const bool halves = kind == Compression::fp16 || kind == Compression::bf16;
  if (!is_float(type) || (halves && size_bytes(type) == 2)) return Compression::none;
  return kind;
}

bool is_lossy(Compression kind, DType type) noexcept {
  const Compression used = effective(kind, type);
  return used != Compression::none && used != Compression::lossless;
}

std::int64_t compressed_bytes(Compression kind, DType type, std::int64_t elements) {
  if (elements < 0) refuse("compress", str(elements, " elements (0 or more)"));
  const Range range{effective(kind, type), type, elements};
  switch (range.kind) {
    case Compression::none:
      return range.raw_bytes();
    case Compression::fp16:
    case Compression::bf16:
      return 2 * elements;
    case Compression::int8:
    case Compression::dynamic8:
      return elements + (elements + codes::block_elements - 1) / codes::block_elements * codes::scale_bytes;
    case Compression::lossless:
      return range.lossless().table_bytes() + range.raw_bytes();
  }
  return 0;
}

double compression_ratio(Compression kind, DType type) noexcept {
  const auto raw = static_cast<double>(size_bytes(type));
  switch (effective(kind, type)) {
    case Compression::fp16:
    case Compression::bf16:
      return 2 / raw;
    case Compression::int8:
    case Compression::dynamic8:
      return (1 + static_cast<double>(codes::scale_bytes) / static_cast<double>(codes::block_elements)) / raw;
    default:
      return 1;
  }
}

std::int64_t effective_budget(std::int64_t budget_bytes, Compression kind, DType type) noexcept {
  const double raw = static_cast<double>(budget_bytes) / compression_ratio(kind, type);
  return compression_ratio(kind, type) == 1 ? budget_bytes : static_cast<std::int64_t>(raw);
}

Node compress(Graph& graph, const Compress& spec) {
  const Range range = check(graph, str("compress '", spec.name, "'"), spec);
  NodeSpec node     = node_of(graph, "compress", spec, range);
  node.reads        = spec.raw;
  node.writes       = spec.packed;
  if (range.kind == Compression::none) return graph.add(node, copy_body({.reads = 1, .writes = 1}));
  return graph.add(node, [range](const Context& context) {
    const std::byte* raw = context.read<std::byte>().data();
    std::byte* packed    = context.write<std::byte>().data();
    if constexpr (cuda::built) {
      if (const DeviceQueue* queue = context.device())
        return cuda::compress_elements(*queue, range.kind, range.type, raw, packed, range.elements);
    }
    compress_with(range, raw, packed, tiles_of(context));
  });
}

Node decompress(Graph& graph, const Compress& spec) {
  const Range range = check(graph, str("decompress '", spec.name, "'"), spec);
  NodeSpec node     = node_of(graph, "decompress", spec, range);
  node.reads        = spec.packed;
  node.writes       = spec.raw;
  if (range.kind == Compression::none) return graph.add(node, copy_body({.reads = 1, .writes = 1}));
  return graph.add(node, [range](const Context& context) {
    std::byte* raw          = context.write<std::byte>().data();
    const std::byte* packed = context.read<std::byte>().data();
    if constexpr (cuda::built) {
      if (const DeviceQueue* queue = context.device())
        return cuda::decompress_elements(*queue, range.kind, range.type, raw, packed, range.elements);
    }
    decompress_with(range, raw, packed, tiles_of(context));
  });
}

std::int64_t compress(Compression kind, DType type, std::span<const std::byte> raw, std::span<std::byte> packed) {
  const Range range = check("compress", kind, type, std::ssize(raw), std::ssize(packed), raw.data(), packed.data());
  if (range.kind == Compression::none) {
    std::copy(raw.begin(), raw.end(), packed.begin());
  } else {
    compress_with(range, raw.data(), packed.data(), all_at_once);
  }
  return used_bytes(kind, type, range.elements, packed);
}

void decompress(Compression kind, DType type, std::span<const std::byte> packed, std::span<std::byte> raw) {
  const Range range = check("decompress", kind, type, std::ssize(raw), std::ssize(packed), raw.data(), packed.data());
  if (range.kind == Compression::none) {
    std::copy(packed.begin(), packed.end(), raw.begin());
  } else {
    decompress_with(range, raw.data(), packed.data(), all_at_once);
  }
}

std::int64_t used_bytes(Compression kind, DType type, std::int64_t elements, std::span<const std::byte> packed) {
  const Range range{effective(kind, type), type, elements};
  if (range.kind == Compression::lossless) return cpu::lossless_bytes(range.lossless(), packed.data());
  return compressed_bytes(kind, type, elements);
}

}  // namespace stepgraph
