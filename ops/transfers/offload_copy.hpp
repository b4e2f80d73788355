#pragma once
#include <string>

#include "engine/graph/graph.hpp"

// Copies between the memory of a device, pinned host memory and disk, as nodes.
namespace stepgraph {

// to = from, where one is in Space::device and the other in Space::pinned. Each is one range of bytes of the same size.
// `lane` is h2d or d2h; or compute, where transfers must not overlap with anything.
struct OffloadCopy {
  std::string name = {};
  LaneKind lane    = LaneKind::h2d;
  Access to        = {};
  Access from      = {};
  Labels labels    = {};
  AccessList after = {};  // tokens that the node also reads ...
  AccessList done  = {};  // ... and writes
};
Node offload_copy(Graph& graph, const OffloadCopy& spec);

// to = from, where one is in Space::disk and the other in Space::pinned: a node of kind host on the disk lane. Sizes are
// equal; a disk access begins at a multiple of Storage::block_bytes.
struct DiskCopy {
  std::string name = {};
  LaneKind lane    = LaneKind::disk;
  Access to        = {};
  Access from      = {};
  Labels labels    = {};
  AccessList after = {};
  AccessList done  = {};
};
Node disk_copy(Graph& graph, const DiskCopy& spec);

}  // namespace stepgraph
