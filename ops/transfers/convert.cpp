#include "ops/transfers/convert.hpp"

#include "engine/base/dispatch.hpp"
#include "engine/base/error.hpp"
#include "engine/run/context.hpp"
#include "ops/cpu/convert.hpp"
#include "ops/cpu/into.hpp"
#include "ops/cuda/common/built.hpp"
#include "ops/cuda/transfers/streams.hpp"
#include "ops/tape/number.hpp"
#include "ops/tape/streams.hpp"

namespace stepgraph {
namespace {

template <class To, class From>
Body convert_body(std::int64_t count) {
  return Body([count](const Context& context) {
    const Rows<To> to           = context.write_rows<To>();
    const Rows<const From> from = context.read_rows<From>();
    if constexpr (cuda::built) {
      if (const DeviceQueue* queue = context.device()) return cuda::convert(*queue, to, from, count);
    }
    cpu::for_tiles(context, count, 2 * cpu::elements_per_tile,
                   [&](std::int64_t begin, std::int64_t end) { cpu::convert_elements(to, from, begin, end); });
  });
}

Body body_for(DType to, DType from, std::int64_t count) {
  if (is_half(to)) return dispatch_half(to, [&]<class Half>(Half) { return convert_body<Half, float>(count); });
  return dispatch_half(from, [&]<class Half>(Half) { return convert_body<float, Half>(count); });
}

// The number of elements of an access. Throws if its ranges are not whole elements.
std::int64_t num_elements(const Graph& graph, const std::string& name, const Access& access) {
  const DType type         = graph.spec(access.buffer).type;
  const auto size          = static_cast<std::int64_t>(size_bytes(type));
  const std::int64_t bytes = num_bytes(graph, access);
  const std::int64_t piece = access.region.length == Access::whole ? bytes : access.region.length;
  if (piece % size == 0) return bytes / size;
  throw Error(ErrorKind::config, str("convert '", name, "': ranges of ", piece, " bytes are not whole elements of ",
                                     type, " (a multiple of ", size, ")"));
}

}  // namespace

Node convert(Graph& graph, const Convert& spec) {
  const DType to = graph.spec(spec.to.buffer).type, from = graph.spec(spec.from.buffer).type;
  if (!(from == DType::f32 && is_half(to)) && !(is_half(from) && to == DType::f32)) {
    throw Error(ErrorKind::config,
                str("convert '", spec.name, "': ", from, " to ", to, " (f32 to bf16 or f16, or one of those to f32)"));
  }
  const std::int64_t count = num_elements(graph, spec.name, spec.to), given = num_elements(graph, spec.name, spec.from);
  if (count != given) {
    throw Error(ErrorKind::config,
                str("convert '", spec.name, "': ", given, " elements into ", count, " (equal numbers)"));
  }
  std::optional<Lane> lane;
  if (spec.lane) lane = graph.lane(graph.spec(spec.to.buffer).rank, *spec.lane);
  return graph.add({.name     = spec.name,
                    .lane     = lane,
                    .reads    = spec.from,
                    .writes   = spec.to,
                    .op       = "convert",
                    .parallel = true,
                    .device   = true,
                    .cost     = {.flops = static_cast<double>(count), .bytes_moved = 6 * static_cast<double>(count)},
                    .labels   = spec.labels},
                   body_for(to, from, count));
}

}  // namespace stepgraph
