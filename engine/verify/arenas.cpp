#include "engine/verify/arenas.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <tuple>

#include "engine/base/error.hpp"
#include "engine/verify/regions.hpp"

namespace stepgraph::verifier {
namespace {

constexpr std::uint32_t none = ~std::uint32_t{0};

// The nodes that access one buffer: the first and the last node on each lane (a lane is a chain), and all nodes without
// a lane.
struct Users {
  std::array<std::uint32_t, num_lane_kinds> first, last;
  std::vector<std::uint32_t> laneless;
  std::uint32_t begins = none;  // the earliest place of any of these nodes
};

// The buffer that holds bytes [begin, end) of an arena now. `begin` is the key in the map of holders.
struct Holder {
  std::int64_t end;
  std::uint32_t buffer;
  bool second;
};

class ArenaChecker {
 public:
  ArenaChecker(const Graph& graph, const MemoryPlan& plan, Order& order, Findings& findings)
      : graph_(graph), plan_(plan), order_(order), findings_(findings), users_(graph.num_buffers()) {
    for (Users& users : users_) users.first.fill(none), users.last.fill(none);
    find_users();
  }

  void check() {
    std::map<std::pair<int, Space>, std::vector<std::uint32_t>> arenas;
    for (std::uint32_t i = 0; i < graph_.num_buffers() && !findings_.full(); ++i) {
      const BufferSpec& buffer = graph_.spec(Buffer{i});
      const bool persistent    = buffer.lifetime == Lifetime::persistent;
      if (buffer.token || buffer.size_bytes == 0 || (!persistent && users_[i].begins == none)) continue;
      if (is_inside(i)) arenas[{index(buffer.rank), buffer.space}].push_back(i);
    }
    for (auto& [where, buffers] : arenas) check_arena(buffers);
  }

 private:
  void find_users() {
    const std::vector<std::uint32_t> places = order_.places();
    for (std::uint32_t node = 0; node < graph_.num_nodes(); ++node) {
      const auto lane              = graph_.lane(Node{node});
      const std::uint32_t position = graph_.lane_position({node});
      for (std::size_t i = 0; i < graph_.num_accesses({node}); ++i) {
        const Graph::AccessView access = graph_.access({node}, i);
        if (access.region.length == 0) continue;
        Users& users = users_[access.buffer.id];
        users.begins = std::min(users.begins, places[node]);
        if (!lane) {
          if (users.laneless.empty() || users.laneless.back() != node) users.laneless.push_back(node);
          continue;
        }
        std::uint32_t& first = users.first[static_cast<std::size_t>(lane->kind)];
        std::uint32_t& last  = users.last[static_cast<std::size_t>(lane->kind)];
        if (first == none || position < graph_.lane_position({first})) first = node;
        if (last == none || position > graph_.lane_position({last})) last = node;
      }
    }
  }

  bool is_inside(std::uint32_t id) {
    const BufferSpec& buffer  = graph_.spec(Buffer{id});
    const std::int64_t offset = plan_.offsets[id], size = plan_.arena(buffer.rank, buffer.space).size_bytes;
    const std::int64_t alignment = MemoryPlan::alignment_of(buffer);
    if (offset >= 0 && offset % alignment == 0 && offset + buffer.size_bytes <= size) return true;
    findings_.add(Flaw::bad_place,
                  str(graph_.describe(Buffer{id}), " of rank ", buffer.rank, " has ", buffer.size_bytes, " bytes at ",
                      offset, " of an arena of ", size, " (inside it, and a multiple of ", alignment, ")"));
    return false;
  }

  // Buffers take their bytes in the order of their first use. All accesses of the previous holder must end before the
  // first access of the new one. Only the last holder of each byte needs a check: earlier holders were checked when it
  // took the bytes.
  void check_arena(std::vector<std::uint32_t>& buffers) {
    const auto persistent = [&](std::uint32_t id) { return graph_.spec(Buffer{id}).lifetime == Lifetime::persistent; };
    std::stable_sort(buffers.begin(), buffers.end(), [&](auto a, auto b) {
      return std::tuple(!persistent(a), users_[a].begins) < std::tuple(!persistent(b), users_[b].begins);
    });
    std::map<std::int64_t, Holder> holders;
    for (const bool second : {false, true}) {
      for (const std::uint32_t id : buffers) {
        if (findings_.full()) return;
        if (second && persistent(id)) continue;
        const std::int64_t begin = plan_.offsets[id], end = begin + graph_.spec(Buffer{id}).size_bytes;
        for (const auto& [from, holder] : take(holders, begin, end)) {
          const Range bytes{std::max(from, begin), std::min(holder.end, end)};
          if (persistent(holder.buffer)) {
            findings_.add(Flaw::bad_place, str(both(holder.buffer, id), " share ", range(bytes), ", and ",
                                               graph_.describe(Buffer{holder.buffer}), " is persistent"));
          } else if (!holder.second && (!second || holder.buffer != id)) {
            require_gone(holder.buffer, id, second, bytes);
          }
        }
        holders[begin] = {end, id, second};
      }
    }
  }

  // Removes [begin, end) from the map of holders and returns the removed holders.
  static std::vector<std::pair<std::int64_t, Holder>> take(std::map<std::int64_t, Holder>& holders, std::int64_t begin,
                                                           std::int64_t end) {
    std::vector<std::pair<std::int64_t, Holder>> taken;
    auto at = holders.lower_bound(begin);
    if (at != holders.begin() && std::prev(at)->second.end > begin) --at;
    while (at != holders.end() && at->first < end) {
      const auto [from, holder] = *at;
      taken.emplace_back(from, holder);
      at = holders.erase(at);
      if (from < begin) holders[from] = {begin, holder.buffer, holder.second};
      if (holder.end > end) at = holders.insert_or_assign(end, holder).first;
    }
    return taken;
  }

  void require_gone(std::uint32_t old_tenant, std::uint32_t new_tenant, bool second, Range bytes) {
    for (const std::uint32_t in : nodes(users_[new_tenant].first, users_[new_tenant].laneless)) {
      order_.ask_about({in, second});
      for (const std::uint32_t out : nodes(users_[old_tenant].last, users_[old_tenant].laneless)) {
        const bool same = in == out && !second;
        if (!same && order_.follows({out, false})) continue;
        findings_.add(second ? Flaw::loop_race : Flaw::race,
                      str(graph_.describe(Node{out}), " uses ", graph_.describe(Buffer{old_tenant}), " and ",
                          same ? "the same node" : graph_.describe(Node{in}), second ? " of the next run" : "",
                          " uses ", graph_.describe(Buffer{new_tenant}), " on the same ", range(bytes),
                          same ? "" : ", and no path orders the first before the second"));
        return;
      }
    }
  }

  static std::vector<std::uint32_t> nodes(const std::array<std::uint32_t, num_lane_kinds>& on_lanes,
                                          const std::vector<std::uint32_t>& laneless) {
    std::vector<std::uint32_t> all = laneless;
    std::copy_if(on_lanes.begin(), on_lanes.end(), std::back_inserter(all),
                 [](std::uint32_t node) { return node != none; });
    return all;
  }

  [[nodiscard]] std::string both(std::uint32_t a, std::uint32_t b) const {
    return str(graph_.describe(Buffer{a}), " and ", graph_.describe(Buffer{b}), " of rank ",
               graph_.spec(Buffer{a}).rank);
  }
  static std::string range(Range bytes) { return str("bytes [", bytes.begin, ", ", bytes.end, ") of the arena"); }

  const Graph& graph_;
  const MemoryPlan& plan_;
  Order& order_;
  Findings& findings_;
  std::vector<Users> users_;
};

}  // namespace

void check_arenas(const Graph& graph, const MemoryPlan& plan, Order& order, Findings& findings) {
  ArenaChecker(graph, plan, order, findings).check();
}

}  // namespace stepgraph::verifier
