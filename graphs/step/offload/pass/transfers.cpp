#include "graphs/step/offload/pass/transfers.hpp"

#include <algorithm>

#include "engine/base/error.hpp"
#include "engine/run/storage.hpp"
#include "ops/transfers/clear.hpp"
#include "ops/transfers/offload_copy.hpp"

namespace stepgraph::offload {
namespace {

Region region_of(const ByteInterval& range) { return {.offset = range.begin, .length = range.end - range.begin}; }

// The bytes of a home, without those that round it up to a block. Not of lossless kinds.
std::int64_t packed_bytes(const KnownHome& home) {
  return compressed_bytes(home.compression, home.type, home.elements);
}

}  // namespace

std::string Transfers::name_of(const KnownHome& home, const Labels& labels) const {
  std::string name = out_.spec(home.buffer).name;
  if (!labels.phase.empty()) name += " " + labels.phase;
  if (labels.microbatch >= 0) name += str(" mb", labels.microbatch);
  return name;
}

Access Transfers::at(const Use& use, const UsedBuffer& buffer, const Region& region) const {
  const KnownHome& home = table_.homes[buffer.home];
  if (buffer.during == During::home) return {home.home, region};
  if (buffer.during == During::own) return {home.buffer, region};
  Region moved = region;
  moved.offset += buffer.offset;
  return {slot_of(use), moved};
}

Buffer Transfers::next_piece(Rank rank) {
  Ring& ring = rings_[rank];
  if (ring.pieces.empty()) {
    if (plan_.piece_bytes < Storage::block_bytes || plan_.piece_bytes % Storage::block_bytes != 0 ||
        plan_.num_pieces < 1) {
      throw Error(ErrorKind::config, str("offload: ", plan_.num_pieces, " pieces of ", plan_.piece_bytes,
                                         " bytes for transfers from and to the disk (at least one, and a multiple of ",
                                         Storage::block_bytes, " bytes)"));
    }
    // Persistent: whole blocks are written to the disk, also where a tensor ends inside of one.
    for (int i = 0; i < plan_.num_pieces; ++i) {
      ring.pieces.push_back(out_.buffer({.name       = str("staging ", i),
                                         .rank       = rank,
                                         .size_bytes = plan_.piece_bytes,
                                         .space      = Space::pinned,
                                         .lifetime   = Lifetime::persistent}));
    }
  }
  const Buffer piece = ring.pieces[ring.next];
  ring.next          = (ring.next + 1) % ring.pieces.size();
  return piece;
}

void Transfers::copy(const std::string& what, const Access& to, const Access& from, const Labels& labels,
                     const AccessList& done, const AccessList& after) {
  const bool up       = out_.spec(to.buffer).space == Space::device;
  const LaneKind lane = !plan_.async ? LaneKind::compute : up ? LaneKind::h2d : LaneKind::d2h;
  offload_copy(out_, {.name   = str(up ? "h2d " : "d2h ", what),
                      .lane   = lane,
                      .to     = to,
                      .from   = from,
                      .labels = labels,
                      .after  = after,
                      .done   = done});
}

void Transfers::read_disk(const KnownHome& home, const Access& to, const Labels& labels, const AccessList& after) {
  const std::int64_t size = to.region.length;
  for (std::int64_t begin = 0; begin < size; begin += plan_.piece_bytes) {
    const std::int64_t now    = std::min(plan_.piece_bytes, size - begin);
    const std::int64_t blocks = rounded_up(now, Storage::block_bytes);
    const Buffer piece        = next_piece(out_.spec(home.home).rank);
    disk_copy(out_, {.name   = "read " + name_of(home, labels),
                     .to     = piece.range(0, blocks),
                     .from   = home.home.range(begin, blocks),
                     .labels = labels,
                     .after  = after});
    copy(name_of(home, labels), to.range(begin, now), piece.range(0, now), labels, {}, after);
  }
}

void Transfers::write_disk(const KnownHome& home, const Access& from, const Labels& labels, const AccessList& done) {
  const std::int64_t size = from.region.length;
  for (std::int64_t begin = 0; begin < size; begin += plan_.piece_bytes) {
    const std::int64_t now    = std::min(plan_.piece_bytes, size - begin);
    const std::int64_t blocks = rounded_up(now, Storage::block_bytes);
    const Buffer piece        = next_piece(out_.spec(home.home).rank);
    const bool is_last        = begin + now == size;
    copy(name_of(home, labels), piece.range(0, now), from.range(begin, now), labels, is_last ? done : AccessList());
    disk_copy(out_, {.name   = "write " + name_of(home, labels),
                     .to     = home.home.range(begin, blocks),
                     .from   = piece.range(0, blocks),
                     .labels = labels});
  }
}

void Transfers::pack(const KnownHome& home, const Access& packed, const Access& raw, LaneKind lane,
                     const Labels& labels, bool unpack) {
  const Compress spec{.name   = str(unpack ? "decompress " : "compress ", name_of(home, labels)),
                      .lane   = lane,
                      .kind   = home.compression,
                      .packed = packed,
                      .raw    = raw,
                      .labels = labels,
                      .type   = home.type};
  static_cast<void>(unpack ? decompress(out_, spec) : compress(out_, spec));
}

void Transfers::fill(const Use& use, const UsedBuffer& buffer, const AccessList& after) {
  if (buffer.fill.empty()) return;
  const KnownHome& home = table_.homes[buffer.home];
  const Labels& labels  = use.labels;
  const Region whole    = {.length = home.bytes};
  const bool on_disk    = home.space == Space::disk;
  if (home.compression == Compression::lossless) return fill_lossless(use, buffer, after);
  if (home.compression == Compression::none && !on_disk) {
    for (const ByteInterval& range : buffer.fill.ranges()) {
      copy(name_of(home, labels), at(use, buffer, region_of(range)), {home.home, region_of(range)}, labels, {}, after);
    }
    return;
  }
  const bool packed   = home.compression != Compression::none;
  const auto raw      = at(use, buffer, whole);
  const Access stored = buffer.packed >= 0 ? slot_of(use).range(buffer.packed, packed_bytes(home)) : raw;
  if (!on_disk) {
    if (!use.on_host)
      return copy(name_of(home, labels), stored, home.home.range(0, packed_bytes(home)), labels, {}, after);
    return pack(home, home.home.range(0, packed_bytes(home)), raw, LaneKind::host, labels, true);
  }
  if (!use.on_host) return read_disk(home, stored, labels, after);
  const std::int64_t blocks = stored_bytes(home);
  disk_copy(out_, {.name   = "read " + name_of(home, labels),
                   .to     = stored.buffer.range(stored.region.offset, blocks),
                   .from   = home.home.range(0, blocks),
                   .labels = labels});
  if (packed) pack(home, stored, raw, LaneKind::host, labels, true);
}

void Transfers::fill_lossless(const Use& use, const UsedBuffer& buffer, const AccessList& after) {
  const KnownHome& home = table_.homes[buffer.home];
  const Labels& labels  = use.labels;
  const auto element    = static_cast<std::int64_t>(size_bytes(home.type));
  const Rank rank       = out_.spec(home.home).rank;
  for (const HomeChunk& chunk : chunks_of(home)) {
    Access packed = home.home.range(chunk.offset, chunk.bytes);
    if (home.space == Space::disk) {
      const Buffer piece        = next_piece(rank);
      const std::int64_t blocks = rounded_up(chunk.bytes, Storage::block_bytes);
      disk_copy(out_, {.name   = "read " + name_of(home, labels),
                       .to     = piece.range(0, blocks),
                       .from   = home.home.range(chunk.offset, blocks),
                       .labels = labels});
      packed = piece.range(0, chunk.bytes);
    }
    const Access raw = at(use, buffer, {.offset = chunk.begin * element, .length = chunk.elements * element});
    if (use.on_host) {
      pack(home, packed, raw, LaneKind::host, labels, true);
      continue;
    }
    const Access piece = next_piece(rank).range(0, raw.region.length);
    pack(home, packed, piece, LaneKind::host, labels, true);
    copy(name_of(home, labels), raw, piece, labels, {}, after);
  }
}

void Transfers::finish_fill(const Use& use, const UsedBuffer& buffer) {
  const KnownHome& home = table_.homes[buffer.home];
  for (const ByteInterval& range : buffer.clear.ranges()) {
    clear(out_, {.name   = "clear " + name_of(home, use.labels),
                 .values = at(use, buffer, region_of(range)),
                 .labels = use.labels});
  }
  if (buffer.fill.empty() || use.on_host || buffer.packed < 0) return;
  pack(home, slot_of(use).range(buffer.packed, packed_bytes(home)), at(use, buffer, {.length = home.bytes}),
       LaneKind::compute, use.labels, true);
}

void Transfers::back(const Use& use, const UsedBuffer& buffer, const AccessList& done) {
  if (buffer.back.empty()) return;
  const KnownHome& home = table_.homes[buffer.home];
  const Labels& labels  = use.labels;
  const bool on_disk    = home.space == Space::disk;
  if (home.compression == Compression::lossless) return back_lossless(use, buffer, done);
  if (home.compression == Compression::none && !on_disk) {
    const auto& ranges = buffer.back.ranges();
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      copy(name_of(home, labels), {home.home, region_of(ranges[i])}, at(use, buffer, region_of(ranges[i])), labels,
           i + 1 == ranges.size() ? done : AccessList());
    }
    return;
  }
  const bool packed   = home.compression != Compression::none;
  const Access raw    = at(use, buffer, {.length = home.bytes});
  const Access stored = buffer.packed >= 0 ? slot_of(use).range(buffer.packed, packed_bytes(home)) : raw;
  if (packed && use.on_host && !on_disk)
    return pack(home, home.home.range(0, packed_bytes(home)), raw, LaneKind::host, labels, false);
  if (packed) pack(home, stored, raw, use.on_host ? LaneKind::host : LaneKind::compute, labels, false);
  if (!on_disk) return copy(name_of(home, labels), home.home.range(0, packed_bytes(home)), stored, labels, done);
  if (!use.on_host) return write_disk(home, stored, labels, done);
  // Bytes behind the tensor are written only if they were read.
  const std::int64_t size = buffer.fill.empty() ? stored.region.length : stored_bytes(home);
  disk_copy(out_, {.name   = "write " + name_of(home, labels),
                   .to     = home.home.range(0, size),
                   .from   = stored.buffer.range(stored.region.offset, size),
                   .labels = labels,
                   .done   = done});
}

void Transfers::back_lossless(const Use& use, const UsedBuffer& buffer, const AccessList& done) {
  const KnownHome& home = table_.homes[buffer.home];
  const Labels& labels  = use.labels;
  const auto element    = static_cast<std::int64_t>(size_bytes(home.type));
  const Rank rank       = out_.spec(home.home).rank;
  const auto chunks     = chunks_of(home);
  for (const HomeChunk& chunk : chunks) {
    Access raw = at(use, buffer, {.offset = chunk.begin * element, .length = chunk.elements * element});
    if (!use.on_host) {
      const bool is_last = &chunk == &chunks.back();
      const Access piece = next_piece(rank).range(0, raw.region.length);
      copy(name_of(home, labels), piece, raw, labels, is_last ? done : AccessList());
      raw = piece;
    }
    if (home.space == Space::pinned) {
      pack(home, home.home.range(chunk.offset, chunk.bytes), raw, LaneKind::host, labels, false);
      continue;
    }
    const Buffer piece        = next_piece(rank);
    const std::int64_t blocks = rounded_up(chunk.bytes, Storage::block_bytes);
    pack(home, piece.range(0, chunk.bytes), raw, LaneKind::host, labels, false);
    disk_copy(out_, {.name   = "write " + name_of(home, labels),
                     .to     = home.home.range(chunk.offset, blocks),
                     .from   = piece.range(0, blocks),
                     .labels = labels});
  }
}

Buffer Transfers::mirror(Buffer of, const Labels& labels) {
  const BufferSpec& spec = out_.spec(of);
  const Buffer made      = out_.buffer({.name       = spec.name + " on the host",
                                        .rank       = spec.rank,
                                        .size_bytes = spec.size_bytes,
                                        .type       = spec.type,
                                        .space      = Space::pinned});
  copy(out_.spec(of).name, made, of, labels);
  return made;
}

}  // namespace stepgraph::offload
