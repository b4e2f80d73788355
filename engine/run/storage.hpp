#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "engine/base/types.hpp"

// What the engine needs of a disk. Implemented in backends/storage/.
namespace stepgraph {

// The bytes of one rank's buffers in Space::disk. Bytes that were never written are zero. Any thread may call it; reads
// and writes of the same bytes are ordered by the graph.
class Storage {
 public:
  // Offsets and sizes of buffers are multiples of this. Transfers of whole blocks, from and to memory that is aligned
  // to it, bypass the page cache where the file system allows it; others are slower.
  static constexpr std::int64_t block_bytes = 4096;

  virtual ~Storage()                                             = default;
  [[nodiscard]] virtual std::int64_t size_bytes() const noexcept = 0;
  // Both return when all bytes are there, with many requests in flight meanwhile. They throw Error(backend) with the
  // file, offset, size and cause: a full disk, a short read, an I/O error. After an error other calls still work.
  virtual void read(std::int64_t offset, std::span<std::byte> to)          = 0;
  virtual void write(std::int64_t offset, std::span<const std::byte> from) = 0;
};

// Makes the storage of a rank. Called when the memory of a program is made, for ranks that have buffers on disk.
using MakeStorage = std::function<std::unique_ptr<Storage>(Rank rank, std::int64_t size_bytes)>;

// Where an access to a buffer in Space::disk lies: what Context::stored returns.
struct StoredBytes {
  Storage* storage        = nullptr;
  std::int64_t offset     = 0;
  std::int64_t size_bytes = 0;
};

}  // namespace stepgraph
