#include "ops/convert.hpp"

#include "engine/context.hpp"
#include "engine/error.hpp"
#include "ops/cpu/into.hpp"
#include "ops/number.hpp"
#include "ops/streams.hpp"

namespace stepgraph {
namespace {

template <class To, class From>
Body body() {
  return Body([](const Context& context) {
    const From* from = context.read<From>().data();
    const auto to    = context.write<To>();
    cpu::for_tiles(context, std::ssize(to), cpu::elements_per_tile, [&](std::int64_t begin, std::int64_t end) {
      To* out = to.data();
      for (std::int64_t i = begin; i < end; ++i) out[i] = narrow<To>(wide(from[i]));
    });
  });
}

}  // namespace

Node convert(Graph& graph, const Convert& spec) {
  const BufferSpec &to = graph.spec(spec.to.buffer), &from = graph.spec(spec.from.buffer);
  const bool rounds = to.type == DType::bf16 && from.type == DType::f32,
             widens = to.type == DType::f32 && from.type == DType::bf16;
  if (!rounds && !widens) {
    throw Error(ErrorKind::config,
                str("convert '", spec.name, "': from ", from.type, " to ", to.type, " (f32 to bf16, or back)"));
  }
  const std::int64_t to_bytes = num_bytes(graph, spec.to), from_bytes = num_bytes(graph, spec.from);
  const auto elements = [](std::int64_t bytes, DType type) {
    return bytes / static_cast<std::int64_t>(size_bytes(type));
  };
  if (elements(to_bytes, to.type) != elements(from_bytes, from.type)) {
    throw Error(ErrorKind::config, str("convert '", spec.name, "': ", elements(from_bytes, from.type),
                                       " elements into room for ", elements(to_bytes, to.type), " (as many)"));
  }
  NodeSpec node{.name     = spec.name,
                .reads    = spec.from,
                .writes   = spec.to,
                .kind     = NodeKind::compute,
                .op       = "convert",
                .parallel = true,
                .cost     = {.bytes_moved = static_cast<double>(to_bytes + from_bytes)},
                .labels   = spec.labels};
  if (spec.lane) node.lane = graph.lane(to.rank, *spec.lane);
  return graph.add(node, rounds ? body<bf16, float>() : body<float, bf16>());
}

}  // namespace stepgraph
