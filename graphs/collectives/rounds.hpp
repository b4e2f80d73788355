#pragma once
#include <cstdint>
#include <vector>

#include "engine/graph/part.hpp"

// Collective algorithms as data: for each round, which member sends which bytes to which member. Internal to graphs/;
// the pass that turns rounds into nodes is algorithms.cpp.
namespace stepgraph {

// Bytes of a member: of its input, of its output, or of the work memory that the algorithm needs.
// `in` and `out` are laid end to end as engine/graph/part.hpp says.
enum class Store : std::uint8_t { in, out, work };
struct ByteRange {
  Store store         = Store::out;
  std::int64_t begin  = 0;
  std::int64_t length = 0;
};
using Bytes = std::vector<ByteRange>;

struct Transfer {
  int from = 0, to = 0;  // members
  Bytes source = {};     // of `from`
  Bytes target = {};     // of `to`
  bool reduce  = false;  // into what the target holds
};

// Work of a member without communication.
struct LocalWork {
  enum class Kind : std::uint8_t { copy, reduce, divide };
  Kind kind  = Kind::copy;
  int member = 0;
  Bytes into = {};
  Bytes from = {};
};

// Messages that are under way together, at most one from and one to each member; then local work.
struct Round {
  std::vector<Transfer> transfers = {};
  std::vector<LocalWork> locals   = {};
};

struct Rounds {
  std::vector<Round> rounds            = {};
  std::vector<std::int64_t> work_bytes = {};     // by member
  bool keep_empty                      = false;  // messages without bytes matter: a barrier's
};

// A collective, as far as algorithms care.
struct CollectiveShape {
  PartOp op                        = PartOp::barrier;
  int members                      = 1;
  int root                         = 0;  // a member
  std::int64_t element             = 1;  // bytes of one
  std::int64_t bytes               = 0;  // of the whole
  Reduction reduction              = Reduction::sum;
  std::vector<std::int64_t> shards = {};  // sizes by member, where the op has shards; of all_to_all: all alike
  std::vector<char> in_place       = {};  // by member: `in` lies in `out`, or `out` in `in`, as the op allows
};

[[nodiscard]] Rounds ring_rounds(const CollectiveShape& shape);
[[nodiscard]] Rounds tree_rounds(const CollectiveShape& shape);
// Member m is the (m % per_node)-th of node m / per_node.
[[nodiscard]] Rounds hierarchical_rounds(const CollectiveShape& shape, int per_node);

}  // namespace stepgraph
