#include <algorithm>
#include <numeric>

#include "engine/base/error.hpp"
#include "tests/support/conformance/conformance_cases.hpp"

namespace stepgraph::testing {
namespace {

// Builds the members of one exercise.
class Builder {
 public:
  Builder(Trial& trial, const Exercise& exercise)
      : trial_(trial), what_(exercise), n_(static_cast<int>(exercise.ranks.size())) {}

  void build() {
    const int root = what_.ranks[static_cast<std::size_t>(what_.root)];
    Meeting meeting{.name      = label(),
                    .op        = what_.op,
                    .group     = trial_.group(what_.ranks),
                    .type      = what_.type,
                    .reduction = what_.reduction,
                    .root      = has_root(what_.op) ? Rank{root} : Rank{-1}};
    for (int i = 0; i < n_; ++i) meeting.members.push_back(member(i));
    trial_.meet(meeting);
    if (!what_.touch_after) return;
    for (const TrialMember& each : meeting.members) {
      trial_.touch(each.both);
      trial_.touch(each.writes);
      if (!what_.in_place) trial_.touch(each.reads);
    }
  }

 private:
  [[nodiscard]] std::string label() const {
    std::string text = str(to_string(what_.op), " ", what_.type);
    if (reduces(what_.op)) text += str(" ", to_string(what_.reduction));
    if (what_.in_place) text += " in place";
    if (what_.placement != Placement::tight) text += what_.placement == Placement::strided ? " strided" : " shuffled";
    if (what_.shards != Exercise::Shards::even)
      text += what_.shards == Exercise::Shards::uneven ? " uneven" : " sparse";
    return text + str(" of ", what_.elements, " elements");
  }

  [[nodiscard]] int shard(int member) const {
    if (what_.shards == Exercise::Shards::uneven) return (3 * member + 1) % 5;  // the fourth is empty
    if (what_.shards == Exercise::Shards::sparse) return member % 2 ? 0 : what_.elements;
    return what_.elements;
  }
  // From one member to another, for all_to_all. In place, both directions have the same size.
  [[nodiscard]] int slice(int from, int to) const {
    if (what_.shards == Exercise::Shards::uneven) return (from + (what_.in_place ? 1 : 2) * to) % 4;
    if (what_.shards == Exercise::Shards::sparse) return (from + to) % 2 ? 0 : what_.elements;
    return what_.elements;
  }
  template <class Size>
  [[nodiscard]] std::vector<int> each(const Size& size) const {
    std::vector<int> sizes;
    for (int i = 0; i < n_; ++i) sizes.push_back(size(i));
    return sizes;
  }
  // Cuts into `count` accesses of different sizes.
  static std::vector<int> cut(int elements, int count) {
    std::vector<int> sizes(static_cast<std::size_t>(count), elements / (count + 1));
    sizes.back() += elements - std::accumulate(sizes.begin(), sizes.end(), 0);
    return sizes;
  }
  // A side that holds a shard of each member: one access per member or, if all shards are equal, another number.
  [[nodiscard]] std::vector<int> held(const std::vector<int>& shards) const {
    const bool may_cut =
        what_.shards == Exercise::Shards::even && what_.placement != Placement::tight && !what_.in_place;
    return may_cut ? cut(std::accumulate(shards.begin(), shards.end(), 0), n_ + 1) : shards;
  }
  [[nodiscard]] std::vector<int> plain(int elements) const {
    return what_.placement == Placement::tight ? std::vector<int>{elements} : cut(elements, 3);
  }

  AccessList in(int member, const std::vector<int>& sizes) {
    const Fill fill = !reduces(what_.op) ? Fill::bits : fill_for(what_.reduction);
    return place(member, " in", what_.fill.value_or(fill), sizes);
  }
  AccessList out(int member, const std::vector<int>& sizes) { return place(member, " out", Fill::bits, sizes); }
  AccessList place(int member, const char* side, Fill fill, const std::vector<int>& sizes) {
    return trial_.place({Rank{what_.ranks[static_cast<std::size_t>(member)]}, label() + side, what_.type, fill}, sizes,
                        what_.placement);
  }

  TrialMember member(int i) {
    TrialMember made{.rank = Rank{what_.ranks[static_cast<std::size_t>(i)]}};
    const bool root      = i == what_.root;
    const bool in_place  = what_.in_place;
    const auto shards    = each([&](int k) { return shard(k); });
    const auto own       = [i](const AccessList& list) { return AccessList{list.view()[static_cast<std::size_t>(i)]}; };
    const auto all_bytes = plain(what_.elements);
    switch (what_.op) {
      case PartOp::all_reduce:
      case PartOp::reduce: {
        const bool receives                             = what_.op == PartOp::all_reduce || root;
        (in_place && receives ? made.both : made.reads) = in(i, all_bytes);
        if (!in_place && receives) made.writes = out(i, all_bytes);
        break;
      }
      case PartOp::broadcast:
        if (root) (in_place ? made.both : made.reads) = in(i, all_bytes);
        if (!root || !in_place) made.writes = out(i, all_bytes);
        break;
      case PartOp::all_gather:
      case PartOp::gather:
        if (what_.op == PartOp::all_gather || root) made.writes = out(i, held(shards));
        made.reads = in_place && !made.writes.empty() ? own(made.writes) : in(i, plain(shard(i)));
        break;
      case PartOp::reduce_scatter:
      case PartOp::scatter:
        if (what_.op == PartOp::reduce_scatter || root) made.reads = in(i, held(shards));
        made.writes = in_place && !made.reads.empty() ? own(made.reads) : out(i, plain(shard(i)));
        break;
      case PartOp::all_to_all: {
        const auto to = each([&](int k) { return slice(i, k); }), from = each([&](int k) { return slice(k, i); });
        if (in_place) {
          made.both = in(i, to);
        } else {
          made.reads  = in(i, held(to));
          made.writes = out(i, held(from));
        }
        break;
      }
      case PartOp::permute: {
        // Around the ring, by one or by two. Sparse: no member sends to the first one.
        const int by   = what_.shards == Exercise::Shards::uneven ? 2 : 1;
        const int peer = (i + by) % n_, source = (i + n_ - by % n_) % n_;
        const bool none = what_.shards == Exercise::Shards::sparse;
        const auto rank = [&](int k) { return Rank{what_.ranks[static_cast<std::size_t>(k)]}; };
        if (peer != i && !(none && peer == 0)) {
          made.peer  = rank(peer);
          made.reads = in(i, plain(what_.elements + i));
        }
        if (source != i && !(none && i == 0)) {
          made.source = rank(source);
          made.writes = out(i, plain(what_.elements + source));
        }
        break;
      }
      case PartOp::barrier:
      case PartOp::send:
      case PartOp::recv:
        break;
    }
    return made;
  }

  Trial& trial_;
  const Exercise& what_;
  int n_;
};

}  // namespace

void add(Trial& trial, const Exercise& exercise) { Builder(trial, exercise).build(); }

bool has_in_place(PartOp op) noexcept { return op != PartOp::permute && op != PartOp::barrier && !point_to_point(op); }

}  // namespace stepgraph::testing
