// Tests every collective on loopback against a simple reference: random members, sizes, pieces and strides, in place
// and not.
#include <catch2/catch_test_macros.hpp>
#include <cstring>
#include <optional>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"
#include "tests/support/graphs/random_graph.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using sg::testing::Random;

namespace {

using Values = std::vector<std::int32_t>;

// A communication of some members in a separate graph, on i32.
class Trial {
 public:
  Trial(sg::PartOp op, std::uint64_t seed)
      : op_(op), random_(seed), n_(static_cast<std::size_t>(random_.between(1, 6))), graph_(static_cast<int>(n_)) {
    std::vector<sg::Rank> ranks;
    for (std::size_t i = 0; i < n_; ++i) ranks.push_back(sg::Rank{static_cast<int>(i)});
    random_.shuffle(ranks);
    ranks_ = ranks;
    group_ = graph_.group({.name = "g", .ranks = ranks});
    most_  = random_.chance(10) ? 60'000 : random_.chance(50) ? 700 : 5;
    root_  = random_.below(n_);
    reads_.resize(n_), writes_.resize(n_), accumulates_.resize(n_);
  }

  void run() {
    declare();
    for (std::size_t i = 0; i < n_; ++i) {
      sg::PartSpec part{.group     = group_,
                        .op        = op_,
                        .reduction = reduction_,
                        .type      = sg::DType::i32,
                        .peer      = peer_or(i),
                        .source    = source_or(i),
                        .root      = ranks_[root_]};
      if (op_ == sg::PartOp::send && i != 0) part.op = sg::PartOp::recv;
      if (op_ == sg::PartOp::send) part.peer = ranks_[1 - i];
      graph_.add({.name        = "p",
                  .reads       = reads_[i],
                  .writes      = writes_[i],
                  .accumulates = accumulates_[i],
                  .part        = part,
                  .rank        = ranks_[i]});
    }
    sg::verify(graph_);
    sg::LoopbackWorld world(static_cast<int>(n_));
    const sg::Program program(graph_, world);
    std::vector<Values> in;
    for (std::size_t i = 0; i < n_; ++i) {
      fill(program.memory(), list(i, true));
      in.push_back(values(program.memory(), list(i, true)));
    }
    static sg::Executor executor({.threads = 2});
    executor.run(program);
    for (std::size_t i = 0; i < n_; ++i) {
      const auto expected = reference(in, i);
      if (expected && values(program.memory(), list(i, false)) != *expected)
        FAIL_CHECK(sg::to_string(op_) << ": member " << i << " of " << n_ << " got something else");
    }
  }

 private:
  // --- accesses of each member -----------------------------------------------------------------------------------

  // Elements in separate memory: a whole buffer, an unaligned range, or rows that may cut elements.
  sg::Access place(std::size_t member, std::int64_t elements) {
    const std::int64_t bytes = 4 * elements, rows = random_.between(2, 5);
    const auto buffer = [&](std::int64_t size) {
      return graph_.buffer(
          {.rank = ranks_[member], .size_bytes = size, .type = sg::DType::u8, .lifetime = sg::Lifetime::persistent});
    };
    if (bytes > 0 && bytes % rows == 0 && random_.chance(30)) {
      const std::int64_t length = bytes / rows, stride = length + random_.between(1, 9);
      return buffer(3 + stride * rows).strided(random_.between(0, 3), length, stride, rows);
    }
    if (random_.chance(50)) return buffer(bytes + 7).range(random_.between(0, 7), bytes);
    return buffer(std::max<std::int64_t>(bytes, 1)).range(0, bytes);
  }
  sg::AccessList pieces(std::size_t member, std::int64_t elements) {
    sg::AccessList list;
    const std::int64_t first = random_.chance(30) ? random_.between(0, elements) : elements;
    list.push_back(place(member, first));
    if (first < elements) list.push_back(place(member, elements - first));
    return list;
  }
  // One access per member, or another number if all sizes are equal. `own`: the member's shard.
  sg::AccessList shards(std::size_t member, const std::vector<std::int64_t>& sizes, std::optional<sg::Access>& own) {
    if (even_ && n_ > 1 && random_.chance(60)) {
      const std::int64_t size = 4 * sizes[0];
      const sg::Access all    = place(member, sizes[0] * static_cast<std::int64_t>(n_));
      if (all.region.count == 1)
        own = all.buffer.range(all.region.offset + static_cast<std::int64_t>(member) * size, size);
      return all;
    }
    sg::AccessList list;
    for (std::size_t k = 0; k < n_; ++k) {
      list.push_back(place(member, sizes[k]));
      if (k == member) own = list.view().back();
    }
    return list;
  }

  void declare() {
    using enum sg::PartOp;
    if (op_ == send && n_ != 2) {
      op_ = barrier;  // a message needs two ends
      return;
    }
    even_ = random_.chance(50);
    for (std::size_t i = 0; i < n_; ++i) sizes_.push_back(i > 0 && even_ ? sizes_[0] : random_.between(0, most_));
    slices_.assign(n_, sizes_);
    for (std::size_t a = 0; a < n_ && even_; ++a) slices_[a].assign(n_, sizes_[0]);
    const bool symmetric = random_.chance(50);
    for (std::size_t a = 0; a < n_ && !even_; ++a) {
      for (std::size_t b = 0; b < n_; ++b)
        slices_[a][b] = symmetric && b < a ? slices_[b][a] : random_.between(0, most_ / 4);
    }
    reduction_ = static_cast<sg::Reduction>(random_.below(5));
    targets_.resize(n_);
    for (std::size_t i = 0; i < n_; ++i) targets_[i] = static_cast<int>(i);
    random_.shuffle(targets_);
    for (std::size_t i = 0; i < n_; ++i) {
      if (targets_[i] == static_cast<int>(i) || random_.chance(20)) targets_[i] = -1;
    }
    for (std::size_t i = 0; i < n_; ++i) declare(i);
  }

  void declare(std::size_t i) {
    using enum sg::PartOp;
    const bool is_root = i == root_, in_place = random_.chance(50);
    std::optional<sg::Access> own;
    switch (op_) {
      case all_reduce:
      case reduce:
      case broadcast: {
        const bool reads_too = op_ != broadcast || is_root, writes_too = op_ != reduce || is_root;
        if (in_place && reads_too && writes_too) {
          accumulates_[i] = pieces(i, sizes_[0]);
        } else {
          if (reads_too) reads_[i] = pieces(i, sizes_[0]);
          if (writes_too) writes_[i] = pieces(i, sizes_[0]);
        }
        return;
      }
      case all_gather:
      case gather:
        if (op_ == all_gather || is_root) writes_[i] = shards(i, sizes_, own);
        reads_[i] = in_place && own ? sg::AccessList(*own) : pieces(i, sizes_[i]);
        return;
      case reduce_scatter:
      case scatter:
        if (op_ == reduce_scatter || is_root) reads_[i] = shards(i, sizes_, own);
        writes_[i] = in_place && own ? sg::AccessList(*own) : pieces(i, sizes_[i]);
        return;
      case all_to_all: {
        std::vector<std::int64_t> from;
        for (std::size_t k = 0; k < n_; ++k) from.push_back(slices_[k][i]);
        if (in_place && from == slices_[i]) {
          accumulates_[i] = shards(i, from, own);
        } else {
          reads_[i]  = shards(i, slices_[i], own);
          writes_[i] = shards(i, from, own);
        }
        return;
      }
      case permute:
        if (targets_[i] >= 0) reads_[i] = pieces(i, sizes_[i]);
        if (source(i) < n_) writes_[i] = pieces(i, sizes_[source(i)]);
        return;
      case send:
        (i == 0 ? reads_ : writes_)[i] = pieces(i, sizes_[0]);
        return;
      default:
        return;
    }
  }
  std::size_t source(std::size_t member) const {
    std::size_t from = 0;
    while (from < n_ && targets_[from] != static_cast<int>(member)) ++from;
    return from;
  }
  sg::Rank peer_or(std::size_t i) const {
    return op_ == sg::PartOp::permute && targets_[i] >= 0 ? ranks_[static_cast<std::size_t>(targets_[i])]
                                                          : sg::Rank{-1};
  }
  sg::Rank source_or(std::size_t i) const {
    return op_ == sg::PartOp::permute && source(i) < n_ ? ranks_[source(i)] : sg::Rank{-1};
  }

  // --- memory before the run -------------------------------------------------------------------------------------

  std::vector<sg::Access> list(std::size_t member, bool in) const {
    std::vector<sg::Access> all;
    for (const sg::AccessList* part : {in ? &reads_[member] : &writes_[member], &accumulates_[member]})
      all.insert(all.end(), part->view().begin(), part->view().end());
    return all;
  }
  static std::vector<std::byte*> addresses(const sg::Memory& memory, const std::vector<sg::Access>& accesses) {
    std::vector<std::byte*> bytes;
    for (const auto& [buffer, region] : accesses) {
      for (std::int64_t row = 0; row < region.count; ++row) {
        for (std::int64_t k = 0; k < region.length; ++k)
          bytes.push_back(memory.bytes(buffer).data() + region.offset + row * region.stride + k);
      }
    }
    return bytes;
  }
  void fill(const sg::Memory& memory, const std::vector<sg::Access>& accesses) {
    for (std::byte* byte : addresses(memory, accesses)) *byte = static_cast<std::byte>(random_.below(256));
  }
  static Values values(const sg::Memory& memory, const std::vector<sg::Access>& accesses) {
    const std::vector<std::byte*> from = addresses(memory, accesses);
    Values all(from.size() / 4);
    for (std::size_t i = 0; i < from.size(); ++i) std::memcpy(reinterpret_cast<std::byte*>(all.data()) + i, from[i], 1);
    return all;
  }

  // --- expected result ------------------------------------------------------------------------------------------

  Values reduced(const std::vector<Values>& in) const {
    Values out;
    for (std::size_t k = 0; k < in[0].size(); ++k) {
      std::int64_t sum = 0, least = in[0][k], largest = in[0][k];
      std::uint32_t product = 1;
      for (const Values& values : in) {
        sum += values[k];
        least   = std::min<std::int64_t>(least, values[k]);
        largest = std::max<std::int64_t>(largest, values[k]);
        product *= static_cast<std::uint32_t>(values[k]);
      }
      const std::int64_t results[] = {sum, sum / static_cast<std::int64_t>(n_), least, largest, product};
      out.push_back(static_cast<std::int32_t>(results[static_cast<std::size_t>(reduction_)]));
    }
    return out;
  }
  static Values part_of(const Values& all, const std::vector<std::int64_t>& sizes, std::size_t k) {
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < k; ++i) begin += sizes[i];
    return {all.begin() + begin, all.begin() + begin + sizes[k]};
  }
  // The expected result of member i; none: not checked.
  std::optional<Values> reference(const std::vector<Values>& in, std::size_t i) const {
    using enum sg::PartOp;
    Values out;
    switch (op_) {
      case all_reduce:
        return reduced(in);
      case reduce:
        return i == root_ ? std::optional(reduced(in)) : std::nullopt;
      case broadcast:
        return in[root_];
      case all_gather:
      case gather:
        if (op_ == gather && i != root_) return std::nullopt;
        for (const Values& shard : in) out.insert(out.end(), shard.begin(), shard.end());
        return out;
      case reduce_scatter:
        return part_of(reduced(in), sizes_, i);
      case scatter:
        return part_of(in[root_], sizes_, i);
      case all_to_all:
        for (std::size_t k = 0; k < n_; ++k) {
          const Values slice = part_of(in[k], slices_[k], i);
          out.insert(out.end(), slice.begin(), slice.end());
        }
        return out;
      case permute:
        return source(i) < n_ ? std::optional(in[source(i)]) : std::nullopt;
      case send:
        return i == 1 ? std::optional(in[0]) : std::nullopt;
      default:
        return std::nullopt;
    }
  }

  sg::PartOp op_;
  Random random_;
  std::size_t n_;
  sg::Graph graph_;
  sg::Group group_;
  std::vector<sg::Rank> ranks_;  // by member
  std::size_t root_  = 0;        // a member
  std::int64_t most_ = 0;        // elements
  bool even_         = true;
  sg::Reduction reduction_{};
  std::vector<std::int64_t> sizes_;                // by member
  std::vector<std::vector<std::int64_t>> slices_;  // from each to each
  std::vector<int> targets_;                       // members; -1: none
  std::vector<sg::AccessList> reads_, writes_, accumulates_;
};

}  // namespace

TEST_CASE("every collective equals a plain loop, for any memory layout", "[backends][loopback]") {
  using enum sg::PartOp;
  for (const sg::PartOp op : {all_reduce, reduce, all_gather, reduce_scatter, broadcast, scatter, gather, all_to_all,
                              permute, barrier, send}) {
    for (int seed = 0; seed < (sg::testing::sanitized() ? 10 : 160); ++seed) {
      CAPTURE(sg::to_string(op), seed);
      Trial(op, static_cast<std::uint64_t>(seed)).run();
    }
  }
}
