#include "backends/nccl/calls.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "backends/nccl/phase_builder.hpp"
#include "engine/base/error.hpp"

namespace stepgraph::nccl {
namespace {

using Kind = Call::Kind;

constexpr std::int64_t small_bytes = 32 * 1024;  // an all-reduce of fewer bytes takes one group

Stretch part_of(const Stretch& whole, std::int64_t begin, std::int64_t size) {
  return {whole.pieces, whole.begin + begin, size};
}

bool overlaps(const std::byte* a, std::int64_t size_a, const std::byte* b, std::int64_t size_b) {
  return a < b + size_b && b < a + size_a;
}

bool share_memory(std::span<const Piece> in, std::span<const Piece> out) {
  const auto size = [](const Piece& piece) {
    return (piece.region.count - 1) * piece.region.stride + piece.region.length;
  };
  for (const Piece& a : in) {
    for (const Piece& b : out) {
      if (a.region.num_bytes() > 0 && b.region.num_bytes() > 0 && overlaps(a.data, size(a), b.data, size(b)))
        return true;
    }
  }
  return false;
}

class Builder : public PhaseBuilder {
 public:
  Builder(const Exchange& exchange, const CallOptions& options, std::byte* workspace)
      : PhaseBuilder(exchange.what.type, workspace),
        what_(exchange.what),
        group_(exchange.group),
        part_(exchange.parts.front()),
        options_(options) {}

  std::vector<Phase> run() {
    if (size() == 1) {
      run_alone();
    } else if (reduces(what_.op)) {
      is_exchanged(what_, options_) ? reduce_by_exchange() : reduce_by_nccl();
    } else {
      move();
    }
    return finish();
  }

  static bool is_exchanged(const Graph::PartView& what, const CallOptions& options) {
    return reduces(what.op) && (options.exact || !is_reduced_by_nccl(what.reduction, what.type));
  }

 private:
  [[nodiscard]] int size() const { return static_cast<int>(group_.ranks.size()); }
  [[nodiscard]] int own() const { return part_.member; }
  [[nodiscard]] PartSide in() const { return {part_.in, group_.ranks.size()}; }
  [[nodiscard]] PartSide out() const { return {part_.out, group_.ranks.size()}; }
  [[nodiscard]] Stretch in_shard(int member) const { return in().shard(static_cast<std::size_t>(member)); }
  [[nodiscard]] Stretch out_shard(int member) const { return out().shard(static_cast<std::size_t>(member)); }
  [[nodiscard]] int place(Rank rank) const { return member_of(group_, rank); }
  [[nodiscard]] bool is_root() const { return part_.rank == what_.root; }

  // --- operations that move bytes: one group -----------------------------------------------------------------------

  void move() {
    switch (what_.op) {
      case PartOp::broadcast:
        broadcast();
        break;
      case PartOp::all_gather:
        all_gather();
        break;
      case PartOp::scatter:
        if (is_root()) {
          copy(in_shard(own()), out().all());
          for_others([&](int member) { send(in_shard(member), member); });
        } else {
          receive(out().all(), place(what_.root));
        }
        break;
      case PartOp::gather:
        if (is_root()) {
          copy(in().all(), out_shard(own()));
          for_others([&](int member) { receive(out_shard(member), member); });
        } else {
          send(in().all(), place(what_.root));
        }
        break;
      case PartOp::all_to_all:
        all_to_all();
        break;
      case PartOp::permute:
        if (part_.peer == part_.rank) {
          copy(in().all(), out().all());
          break;
        }
        if (part_.peer != Rank{-1}) send(in().all(), place(part_.peer));
        if (part_.source != Rank{-1}) receive(out().all(), place(part_.source));
        break;
      case PartOp::send:
        send(in().all(), place(what_.peer));
        break;
      case PartOp::recv:
        receive(out().all(), place(what_.peer));
        break;
      case PartOp::barrier:
        barrier();
        break;
      case PartOp::all_reduce:
      case PartOp::reduce:
      case PartOp::reduce_scatter:
        break;
    }
    next_phase();
  }

  template <class Visit>
  void for_others(const Visit& visit) const {
    for (int step = 1; step < size(); ++step) visit((own() + step) % size());
  }

  void broadcast() {
    const Stretch to = out().all();
    if (to.size == 0) return;
    Call call{.kind = Kind::broadcast, .bytes = to.size, .peer = place(what_.root)};
    if (is_root()) call.from = to_read(in().all());
    call.to = to_write(to);
    if (is_root() && call.from != call.to && overlaps(call.from, to.size, call.to, to.size))
      call.from = pack(in().all());
    phase().group.push_back(call);
  }

  void all_gather() {
    const std::int64_t shard = out_shard(0).size;
    bool even                = true;
    for (int member = 1; member < size(); ++member) even = even && out_shard(member).size == shard;
    const Stretch mine = in().all();
    if (!even) {
      const std::byte* const from = mine.size > 0 ? to_read(mine) : nullptr;
      copy(mine, out_shard(own()));
      for_others([&](int member) {
        send(from, mine.size, member);
        receive(out_shard(member), member);
      });
      return;
    }
    if (shard == 0) return;
    const Stretch all     = out().all();
    const std::byte* from = to_read(mine);
    std::byte* const to   = to_write(all);
    if (from != to + own() * shard && overlaps(from, shard, to, all.size)) from = pack(mine);
    phase().group.push_back({.kind = Kind::all_gather, .from = from, .to = to, .bytes = shard});
  }

  // In place, slices are received where others are sent from: these are packed.
  void all_to_all() {
    const Stretch all = in().all();
    const bool packs  = all.size > 0 && share_memory(part_.in, part_.out);
    std::byte* packed = nullptr;
    if (packs) {
      packed = take(all.size);
      copy(all, whole(packed, all.size));
    }
    const auto slice = [&](int member) {
      if (!packs) return in_shard(member);
      std::int64_t begin = 0;
      for (int before = 0; before < member; ++before) begin += in_shard(before).size;
      return part_of(whole(packed, all.size), begin, in_shard(member).size);
    };
    copy(slice(own()), out_shard(own()));
    for_others([&](int member) {
      send(slice(member), member);
      receive(out_shard(member), member);
    });
  }

  // Four bytes of which nothing is used.
  void barrier() {
    std::byte* const word = take(4);
    phase().group.push_back({.kind = Kind::all_reduce, .from = word, .to = word, .bytes = 4, .type = DType::i32});
  }

  // --- reductions --------------------------------------------------------------------------------------------------

  void reduce_by_nccl() {
    Call call{.type = what_.type, .reduction = what_.reduction};
    const Stretch from = in().all();
    switch (what_.op) {
      case PartOp::all_reduce:
        call.kind  = Kind::all_reduce;
        call.bytes = from.size;
        break;
      case PartOp::reduce:
        call.kind  = Kind::reduce;
        call.bytes = from.size;
        call.peer  = place(what_.root);
        break;
      default:
        return reduce_scatter_by_nccl();
    }
    if (call.bytes == 0) return;
    call.from = to_read(from, Needs::aligned);
    if (what_.op == PartOp::all_reduce || is_root()) {
      call.to = to_write(out().all(), Needs::aligned);
      if (call.from != call.to && overlaps(call.from, call.bytes, call.to, call.bytes)) call.from = pack(from);
    }
    phase().group.push_back(call);
    next_phase();
  }

  // Uneven shards: one reduction to each member.
  void reduce_scatter_by_nccl() {
    const std::int64_t shard = in_shard(0).size;
    bool even                = true;
    for (int member = 1; member < size(); ++member) even = even && in_shard(member).size == shard;
    const Call call{.type = what_.type, .reduction = what_.reduction};
    if (!even) {
      for (int member = 0; member < size(); ++member) {
        Call one  = call;
        one.kind  = Kind::reduce;
        one.bytes = in_shard(member).size;
        one.peer  = member;
        if (one.bytes == 0) continue;
        one.from = to_read(in_shard(member), Needs::aligned);
        if (member == own()) {
          one.to = to_write(out().all(), Needs::aligned);
          if (one.from != one.to && overlaps(one.from, one.bytes, one.to, one.bytes)) one.from = pack(in_shard(member));
        }
        phase().group.push_back(one);
      }
      return next_phase();
    }
    if (shard == 0) return;
    Call one  = call;
    one.kind  = Kind::reduce_scatter;
    one.bytes = shard;
    one.from  = to_read(in().all(), Needs::aligned);
    one.to    = to_write(out().all(), Needs::aligned);
    if (one.to != one.from + own() * shard && overlaps(one.from, size() * shard, one.to, shard))
      one.from = pack(in().all());
    phase().group.push_back(one);
    next_phase();
  }

  // Each member's shard of a chunk goes to that member, which folds. All members cut alike, in whole elements.
  void reduce_by_exchange() {
    if (what_.op == PartOp::all_reduce) {
      const std::int64_t bytes = in().all().size;
      return bytes <= small_bytes ? all_reduce_small() : all_reduce_in_chunks();
    }
    const bool scatters  = what_.op == PartOp::reduce_scatter;
    const int root       = scatters ? -1 : place(what_.root);
    std::int64_t longest = in().all().size;
    if (scatters) {
      longest = 0;
      for (int member = 0; member < size(); ++member) longest = std::max(longest, in_shard(member).size);
    }
    const std::int64_t chunk = chunk_bytes(options_.chunk_bytes / size());
    for (std::int64_t begin = 0; begin < longest; begin += chunk) {
      // The inputs of what a member folds in this chunk.
      const auto input = [&](int member) {
        const Stretch all = scatters ? in_shard(member) : in().all();
        return part_of(all, begin, std::clamp<std::int64_t>(all.size - begin, 0, chunk));
      };
      const bool folds   = scatters || own() == root;
      const Stretch mine = folds ? input(own()) : Stretch{};
      if (scatters) {
        for_others([&](int member) { send(input(member), member); });
      } else if (!folds) {
        send(input(root), root);
      }
      Folded folded;
      if (folds) folded = receive_inputs(mine, std::min(chunk, longest - begin));
      next_phase();
      if (mine.size > 0) fold(folded, to_write(part_of(out().all(), begin, mine.size)));
      next_phase();
      free_workspace();
    }
  }

  // One group: each member gets all inputs.
  void all_reduce_small() {
    const Stretch mine = in().all();
    if (mine.size == 0) return;
    const Folded folded = receive_inputs(mine, mine.size);
    for_others([&](int member) { send(folded.own, mine.size, member); });
    next_phase();
    fold(folded, to_write(out().all()));
    next_phase();
  }

  // Two groups for each chunk: inputs to the member that folds them, then its results to all.
  void all_reduce_in_chunks() {
    const Stretch from = in().all(), to = out().all();
    const std::int64_t chunk = chunk_bytes(options_.chunk_bytes);
    for (std::int64_t begin = 0; begin < from.size; begin += chunk) {
      const std::int64_t bytes = std::min(chunk, from.size - begin);
      const std::int64_t shard = round_up((bytes + size() - 1) / size(), alignment);
      const auto of_member     = [&](const Stretch& side, int member) {
        const std::int64_t first = std::min(bytes, member * shard);
        return part_of(side, begin + first, std::min(bytes - first, shard));
      };
      for_others([&](int member) { send(of_member(from, member), member); });
      const Stretch mine  = of_member(from, own());
      const Folded folded = receive_inputs(mine, std::min(shard, bytes));
      next_phase();
      std::byte* const result = mine.size > 0 ? to_write(of_member(to, own())) : nullptr;
      if (mine.size > 0) fold(folded, result);
      for_others([&](int member) {
        send(result, mine.size, member);
        receive(of_member(to, member), member);
      });
      next_phase();
      free_workspace();
    }
  }

  // Whole elements, and aligned.
  static std::int64_t chunk_bytes(std::int64_t wanted) {
    return std::max(wanted / alignment, std::int64_t{1}) * alignment;
  }

  struct Folded {
    const std::byte* own = nullptr;
    std::byte* received  = nullptr;  // from the others, by member
    std::int64_t stride  = 0;
    std::int64_t bytes   = 0;
  };
  // `most`: the bytes of the member that folds the most. Every member takes room for inputs of so many bytes, also one
  // that folds less or nothing, so that all need the same workspace.
  Folded receive_inputs(const Stretch& mine, std::int64_t most) {
    Folded folded{.stride = round_up(most, alignment), .bytes = mine.size};
    folded.received = take((size() - 1) * folded.stride);
    if (mine.size == 0) return folded;
    folded.own = to_read(mine);
    for_others([&](int member) {
      const int place = member < own() ? member : member - 1;
      receive(folded.received + place * folded.stride, mine.size, member);
    });
    return folded;
  }
  void fold(const Folded& folded, std::byte* to) {
    Call call{.kind = Kind::fold, .from = folded.received, .to = to, .bytes = folded.bytes, .type = what_.type};
    call.reduction   = what_.reduction;
    call.own         = folded.own;
    call.stride      = folded.stride;
    call.member      = own();
    call.num_members = size();
    phase().local.push_back(call);
  }

  // A group of one rank. Messages need two. A reduction of one value can change its bits: a NaN becomes the usual one.
  void run_alone() {
    const Stretch from = in().all();
    if (from.size == 0 || what_.op == PartOp::barrier || point_to_point(what_.op)) return;
    if (what_.op == PartOp::permute && part_.peer == Rank{-1}) return;
    if (!reduces(what_.op)) return copy(from, out().all());
    fold({.own = to_read(from), .bytes = from.size}, to_write(out().all()));
    next_phase();
  }

  const Graph::PartView& what_;
  const GroupSpec& group_;
  const LocalPart& part_;
  const CallOptions& options_;
};

// A part without memory: each buffer has an address of its own, aligned as in an arena.
class Imagined {
 public:
  Imagined(const Graph& graph, Node node) {
    std::map<std::uint32_t, std::uintptr_t> bases;
    const auto gather = [&](std::vector<Piece>& pieces, const auto& wanted) {
      for (std::size_t i = 0; i < graph.num_accesses(node); ++i) {
        const Graph::AccessView access = graph.access(node, i);
        if (!wanted(access.mode) || graph.spec(access.buffer).token) continue;
        const auto base = bases.try_emplace(access.buffer.id, (bases.size() + 2) << 44).first->second;
        Region region   = access.region;
        const auto at   = base + static_cast<std::uintptr_t>(std::exchange(region.offset, 0));
        pieces.push_back({reinterpret_cast<std::byte*>(at), region});
      }
    };
    gather(in_, [](AccessMode mode) { return reads(mode); });
    gather(out_, [](AccessMode mode) { return writes(mode); });
    const Graph::PartView what = graph.part(node);
    const GroupSpec& group     = graph.spec(what.group);
    const Rank rank            = graph.rank(node);
    part_                      = {node, rank, member_of(group, rank), what.peer, what.source, in_, out_, nullptr};
    exchange_.emplace(Exchange{what, group, 0, 0, {&part_, 1}});
  }
  Imagined(const Imagined&)            = delete;
  Imagined& operator=(const Imagined&) = delete;

  [[nodiscard]] Builder builder(const CallOptions& options) const {
    return {*exchange_, options, reinterpret_cast<std::byte*>(std::uintptr_t{1} << 44)};
  }

 private:
  std::vector<Piece> in_, out_;
  LocalPart part_{};
  std::optional<Exchange> exchange_;
};

}  // namespace

bool is_reduced_by_nccl(Reduction reduction, DType type) noexcept {
  return is_float(type) && (reduction == Reduction::sum || reduction == Reduction::average);
}

std::optional<std::string> refusal(const Graph::PartView& what, std::size_t num_members, const CallOptions& options) {
  if (!Builder::is_exchanged(what, options) || num_members <= max_fold_members) return std::nullopt;
  return str("nccl: ", to_string(what.op), " '", what.message, "', ", to_string(what.reduction), " of ", what.type,
             " over ", num_members, " ranks, is added in rank order, which a device does for at most ",
             max_fold_members,
             " (NCCL's own reductions are sums and averages of floating-point types without comm.exact)");
}

std::vector<Phase> calls_of(const Exchange& exchange, const CallOptions& options, std::span<std::byte> workspace) {
  Builder builder(exchange, options, workspace.data());
  std::vector<Phase> phases = builder.run();
  if (builder.workspace_bytes() <= static_cast<std::int64_t>(workspace.size())) return phases;
  throw Error(ErrorKind::backend, str("nccl: ", to_string(exchange.what.op), " '", exchange.what.message, "' needs ",
                                      builder.workspace_bytes(), " bytes of workspace, and has ", workspace.size(),
                                      " (as many as the plan counts; is memory that was lent aligned to 64 bytes?)"));
}

std::int64_t workspace_bytes(const Graph& graph, Node part, const CallOptions& options) {
  const Imagined imagined(graph, part);
  Builder builder = imagined.builder(options);
  static_cast<void>(builder.run());
  return builder.workspace_bytes();
}

int num_groups(const Graph& graph, Node part, const CallOptions& options) {
  const Imagined imagined(graph, part);
  const std::vector<Phase> phases = imagined.builder(options).run();
  return static_cast<int>(std::ranges::count_if(phases, [](const Phase& phase) { return !phase.group.empty(); }));
}

}  // namespace stepgraph::nccl
