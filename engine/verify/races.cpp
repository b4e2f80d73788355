#include <algorithm>
#include <bit>
#include <map>
#include <memory>

#include "engine/base/error.hpp"
#include "engine/verify/arenas.hpp"
#include "engine/verify/findings.hpp"
#include "engine/verify/order.hpp"
#include "engine/verify/regions.hpp"

namespace stepgraph::verifier {
namespace {

constexpr std::uint32_t none = ~std::uint32_t{0};

// The accesses to a buffer whose accesses all have the same region: the last writer, and the readers since that write.
struct Simple {
  std::uint32_t writer  = none;
  std::uint32_t readers = none;  // head of a list in RaceChecker::readers_
  bool writer_second    = false;
};

struct Reader {
  std::uint32_t node;
  std::uint32_t next;
  bool second;
};

// An access that later writes have not completely overwritten.
struct Entry {
  Region region;
  Instance instance;
};

// Entries sorted by start, in classes by the size of their span, so that entries near a region are found without a full
// scan.
class EntrySet {
 public:
  using Map = std::multimap<std::int64_t, Entry>;

  void insert(const Entry& entry) { class_of(entry.region).emplace(entry.region.begin(), entry); }

  // The most recently added entry that begins where `region` does and is in the same size class.
  [[nodiscard]] Entry* latest_at(const Region& region) {
    Map& map  = class_of(region);
    auto next = map.upper_bound(region.begin());
    if (next == map.begin() || std::prev(next)->first != region.begin()) return nullptr;
    return &std::prev(next)->second;
  }

  // Calls visit(entry, overlap) for entries that overlap; erases those for which it returns true.
  template <class Visit>
  void for_overlapping(const Region& region, const Visit& visit) {
    for (auto& [bits, map] : classes_) {
      const std::int64_t longest = std::int64_t{1} << bits;
      for (auto it = map.lower_bound(region.begin() - longest); it != map.end() && it->first < region.end();) {
        const auto shared = overlap(region, it->second.region);
        it                = shared && visit(it->second, *shared) ? map.erase(it) : std::next(it);
      }
    }
  }

 private:
  Map& class_of(const Region& region) {
    return classes_[static_cast<int>(std::bit_width(static_cast<std::uint64_t>(region.end() - region.begin())))];
  }

  std::map<int, Map> classes_;  // by bits of the span
};

// The accesses to a buffer with more than one region.
struct Mixed {
  EntrySet writes, reads;
  WrittenBytes written;
};

class RaceChecker {
 public:
  RaceChecker(const Graph& graph, Order& order, Findings& findings)
      : graph_(graph), order_(order), findings_(findings), simple_(graph.num_buffers()), mixed_(graph.num_buffers()) {
    find_mixed();
  }

  void check() {
    for (const bool second : {false, true}) {
      for (std::uint32_t node = 0; node < graph_.num_nodes() && !findings_.full(); ++node) check({node, second});
    }
  }

 private:
  void find_mixed() {
    std::vector<Region> first(graph_.num_buffers());
    std::vector<bool> touched(graph_.num_buffers());
    for (std::uint32_t node = 0; node < graph_.num_nodes(); ++node) {
      for (std::size_t i = 0; i < graph_.num_accesses({node}); ++i) {
        const Graph::AccessView access = graph_.access({node}, i);
        const std::uint32_t id         = access.buffer.id;
        if (access.region.length == 0) continue;
        if (!touched[id]) {
          touched[id] = true;
          first[id]   = access.region;
        } else if (!mixed_[id] && first[id] != access.region) {
          mixed_[id] = std::make_unique<Mixed>();
        }
      }
    }
  }

  // Reads are checked first: a node may read bytes that it then writes.
  void check(Instance node) {
    order_.ask_about(node);
    const std::size_t count = graph_.num_accesses({node.node});
    for (const bool writing : {false, true}) {
      for (std::size_t i = 0; i < count; ++i) {
        const Graph::AccessView access = graph_.access({node.node}, i);
        if (access.region.length == 0) continue;
        const bool accumulates = access.mode == AccessMode::accumulate;
        if (writing ? !writes(access.mode) : !reads(access.mode)) continue;
        if (!writing && !node.second) check_written(node, access);
        if (!writing && accumulates) continue;  // ordered as a write
        if (mixed_[access.buffer.id]) {
          writing ? write(node, access, *mixed_[access.buffer.id]) : read(node, access, *mixed_[access.buffer.id]);
        } else {
          writing ? write(node, access, simple_[access.buffer.id]) : read(node, access, simple_[access.buffer.id]);
        }
      }
    }
  }

  // Pairs within one run are checked in the first run. In the second run, only pairs across the two runs are checked.
  void require(Instance a, Instance b, const Graph::AccessView& access, Range bytes, bool a_writes) {
    if (a.second || (a.node == b.node && a.second == b.second)) return;
    if (order_.follows(a)) return;
    const std::string what = str(graph_.describe(Node{a.node}), a_writes ? " writes" : " reads", " and ",
                                 graph_.describe(Node{b.node}), b.second ? " of the next run " : " ",
                                 reads(access.mode) ? writes(access.mode) ? "accumulates into" : "reads" : "writes",
                                 " bytes [", bytes.begin, ", ", bytes.end, ") of ", graph_.describe(access.buffer),
                                 ", and no path orders the first before the second");
    findings_.add(b.second ? Flaw::loop_race : Flaw::race, what);
  }

  void check_written(Instance node, const Graph::AccessView& access) {
    const BufferSpec& buffer = graph_.spec(access.buffer);
    if (buffer.lifetime == Lifetime::persistent || buffer.token) return;
    std::optional<Range> missing;
    if (const auto& mixed = mixed_[access.buffer.id]) {
      missing = mixed->written.first_missing(access.region);
    } else if (simple_[access.buffer.id].writer == none) {
      missing = Range{access.region.begin(), access.region.begin() + access.region.length};
    }
    if (!missing) return;
    findings_.add(Flaw::unwritten_read,
                  str(graph_.describe(Node{node.node}), " reads bytes [", missing->begin, ", ", missing->end, ") of ",
                      graph_.describe(access.buffer), ", a step buffer, before any node has written them"));
  }

  [[nodiscard]] bool same_lane(std::uint32_t a, std::uint32_t b) const {
    const auto lane = graph_.lane(Node{a});
    return lane && lane == graph_.lane(Node{b});
  }

  void read(Instance node, const Graph::AccessView& access, Simple& buffer) {
    const Range bytes{access.region.begin(), access.region.begin() + access.region.length};
    if (buffer.writer != none) require({buffer.writer, buffer.writer_second}, node, access, bytes, true);
    if (buffer.readers != none) {
      Reader& latest = readers_[buffer.readers];
      if (latest.node == node.node && latest.second == node.second) return;
      if (same_lane(latest.node, node.node)) {  // a lane is a chain: the later reader stands for the earlier one
        latest.node   = node.node;
        latest.second = node.second;
        return;
      }
    }
    readers_.push_back({node.node, buffer.readers, node.second});
    buffer.readers = static_cast<std::uint32_t>(readers_.size() - 1);
  }

  void write(Instance node, const Graph::AccessView& access, Simple& buffer) {
    const Range bytes{access.region.begin(), access.region.begin() + access.region.length};
    bool read_by_others = false;  // then the last write is ordered before those reads, and they before this write
    for (std::uint32_t i = buffer.readers; i != none; i = readers_[i].next) {
      const Reader& reader = readers_[i];
      read_by_others |= reader.node != node.node || reader.second != node.second;
      require({reader.node, reader.second}, node, access, bytes, false);
    }
    if (!read_by_others && buffer.writer != none)
      require({buffer.writer, buffer.writer_second}, node, access, bytes, true);
    buffer = {node.node, none, node.second};
  }

  void read(Instance node, const Graph::AccessView& access, Mixed& buffer) {
    buffer.writes.for_overlapping(access.region, [&](const Entry& entry, Range bytes) {
      require(entry.instance, node, access, bytes, true);
      return false;
    });
    Entry* latest = buffer.reads.latest_at(access.region);
    if (latest && latest->region == access.region && same_lane(latest->instance.node, node.node)) {
      latest->instance = node;
    } else {
      buffer.reads.insert({access.region, node});
    }
  }

  void write(Instance node, const Graph::AccessView& access, Mixed& buffer) {
    for (EntrySet* set : {&buffer.reads, &buffer.writes}) {
      std::vector<Entry> left;  // the rest of entries that this write covers partly
      set->for_overlapping(access.region, [&](const Entry& entry, Range bytes) {
        require(entry.instance, node, access, bytes, set == &buffer.writes);
        if (covers(access.region, entry.region)) return true;
        if (!access.region.contiguous() || !entry.region.contiguous()) return false;
        const auto keep = [&](std::int64_t begin, std::int64_t end) {
          if (begin < end) left.push_back({{.offset = begin, .length = end - begin}, entry.instance});
        };
        keep(entry.region.begin(), access.region.begin());
        keep(access.region.end(), entry.region.end());
        return true;
      });
      for (const Entry& entry : left) set->insert(entry);
    }
    buffer.writes.insert({access.region, node});
    if (!node.second) buffer.written.add(access.region);
  }

  const Graph& graph_;
  Order& order_;
  Findings& findings_;
  std::vector<Simple> simple_;
  std::vector<std::unique_ptr<Mixed>> mixed_;  // null: the buffer is in simple_
  std::vector<Reader> readers_;
};

}  // namespace

bool check_ranks(const Graph& graph, const Edges& edges, const MemoryPlan* plan, Findings& findings) {
  Order order(graph, edges, findings);
  if (!order.acyclic()) return false;
  RaceChecker(graph, order, findings).check();
  if (plan) check_arenas(graph, *plan, order, findings);
  return true;
}

}  // namespace stepgraph::verifier
