#include "ops/reduce.hpp"

#include <algorithm>

#include "engine/arithmetic.hpp"
#include "engine/context.hpp"
#include "engine/error.hpp"

namespace stepgraph {
namespace {

constexpr std::int64_t tile_bytes = 256 * 1024;  // whole elements of every type

// The bytes of an access as rows; normal form: a range is one row.
Region rows_of(const Graph& graph, const Access& access) {
  if (access.region.length == Access::whole) return {.length = graph.spec(access.buffer).size_bytes};
  if (access.region.count <= 1 || access.region.stride != access.region.length) return access.region;
  return {.offset = access.region.offset, .length = access.region.num_bytes()};
}

// Calls work(row, begin, length) for tiles of rows, on idle threads too.
template <class Work>
void for_tiles(const Context& context, const Rows<std::byte>& rows, const Work& work) {
  const std::int64_t tiles = std::max<std::int64_t>(1, (rows.length + tile_bytes - 1) / tile_bytes);
  const auto tile          = [&](std::int64_t i) {
    const std::int64_t begin = i % tiles * tile_bytes;
    work(i / tiles, static_cast<std::size_t>(begin),
                  static_cast<std::size_t>(std::min(tile_bytes, rows.length - begin)));
  };
  context.parallel_for(tiles * rows.count, [&tile](std::int64_t i) { tile(i); });
}

void check(const std::string& name, const Region& region, DType type) {
  if (region.length % static_cast<std::int64_t>(size_bytes(type)) == 0) return;
  throw Error(ErrorKind::config, str("ops: '", name, "': ", to_string(region), " is not whole elements of ", type));
}

}  // namespace

Node reduce_into(Graph& graph, const ReduceInto& spec) {
  const BufferSpec& buffer = graph.spec(spec.into.buffer);
  const DType type         = spec.type.value_or(buffer.type);
  const Region into = rows_of(graph, spec.into), from = rows_of(graph, spec.from);
  if (into.length != from.length || into.count != from.count) {
    throw Error(ErrorKind::config, str("ops: reduce_into '", spec.name, "': ", to_string(from), " into ",
                                       to_string(into), " (as many rows of the same length)"));
  }
  check(spec.name, into, type);
  const auto bytes = static_cast<double>(into.num_bytes());
  return graph.add({.name        = spec.name,
                    .lane        = graph.lane(buffer.rank, spec.lane),
                    .reads       = {spec.from},
                    .accumulates = {spec.into},
                    .op          = "reduce_into",
                    .parallel    = true,
                    .cost        = {.flops = bytes / static_cast<double>(size_bytes(type)), .bytes_moved = 3 * bytes},
                    .labels      = spec.labels},
                   [type, reduction = spec.reduction](const Context& context) {
                     const auto total = context.accumulate_rows<std::byte>();
                     const auto next  = context.read_rows<std::byte>();
                     for_tiles(context, total, [&](std::int64_t row, std::size_t begin, std::size_t length) {
                       stepgraph::reduce_into(total[row].subspan(begin, length), next[row].subspan(begin, length), type,
                                              reduction);
                     });
                   });
}

Node divide(Graph& graph, const DivideBy& spec) {
  if (spec.count < 1)
    throw Error(ErrorKind::config, str("ops: divide '", spec.name, "' by ", spec.count, " (at least 1)"));
  const BufferSpec& buffer = graph.spec(spec.values.buffer);
  const DType type         = spec.type.value_or(buffer.type);
  const Region values      = rows_of(graph, spec.values);
  check(spec.name, values, type);
  const auto bytes = static_cast<double>(values.num_bytes());
  return graph.add({.name        = spec.name,
                    .lane        = graph.lane(buffer.rank, spec.lane),
                    .accumulates = {spec.values},
                    .op          = "divide",
                    .parallel    = true,
                    .cost        = {.flops = bytes / static_cast<double>(size_bytes(type)), .bytes_moved = 2 * bytes},
                    .labels      = spec.labels},
                   [type, count = spec.count](const Context& context) {
                     const auto rows = context.accumulate_rows<std::byte>();
                     for_tiles(context, rows, [&](std::int64_t row, std::size_t begin, std::size_t length) {
                       stepgraph::divide(rows[row].subspan(begin, length), type, count);
                     });
                   });
}

}  // namespace stepgraph
