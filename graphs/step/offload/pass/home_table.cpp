#include <map>
#include <tuple>

#include "engine/base/error.hpp"
#include "graphs/step/offload/pass/uses.hpp"

namespace stepgraph::offload {

HomeTable table_of(const Graph& graph, const HomePlan& plan) {
  HomeTable table;
  table.by_buffer.assign(graph.num_buffers(), none);
  std::map<std::tuple<Rank, OffloadClass, std::string>, std::uint32_t> units;
  for (const Home& home : plan.homes) {
    const BufferSpec& spec = graph.spec(home.buffer);
    const auto refuse      = [&](const std::string& why) {
      throw Error(ErrorKind::config, str("offload: ", graph.describe(home.buffer), " ", why));
    };
    if (spec.space != Space::device) refuse(str("is in ", to_string(spec.space), " memory (device)"));
    if (home.space == Space::device) refuse("has a home on the device (pinned or disk)");
    if (spec.size_bytes == 0) refuse("has no bytes (leave it out)");
    if (table.by_buffer[home.buffer.id] != none) refuse("has two homes (one)");
    const auto [unit, is_new] =
        units.try_emplace({spec.rank, home.of, home.unit}, static_cast<std::uint32_t>(table.units.size()));
    if (is_new) table.units.push_back({.rank = spec.rank, .of = home.of, .name = home.unit, .once = home.moves_once});
    table.by_buffer[home.buffer.id] = static_cast<std::uint32_t>(table.homes.size());
    KnownHome known;
    static_cast<HomeFormat&>(known) =
        home_format(spec.type, spec.size_bytes / static_cast<std::int64_t>(size_bytes(spec.type)), home.space,
                    home.compression, plan.piece_bytes);
    known.buffer = known.home = home.buffer;
    known.unit                = unit->second;
    known.bytes               = spec.size_bytes;
    known.lifetime            = spec.lifetime;
    table.homes.push_back(known);
  }
  return table;
}

}  // namespace stepgraph::offload
