#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "backends/loopback/world.hpp"
#include "engine/run/context.hpp"
#include "engine/run/executor.hpp"
#include "engine/run/memory.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;

namespace {

// A persistent number that is doubled by way of a step buffer.
struct Doubling {
  sg::Graph graph;
  sg::Buffer kept =
      graph.buffer({.name = "kept", .size_bytes = 8, .type = sg::DType::f64, .lifetime = sg::Lifetime::persistent});
  sg::Buffer other =
      graph.buffer({.name = "other", .size_bytes = 8, .type = sg::DType::f64, .lifetime = sg::Lifetime::persistent});
  sg::Buffer twice = graph.buffer({.name = "twice", .size_bytes = 8, .type = sg::DType::f64});

  Doubling() {
    graph.add({.name = "double", .reads = {kept}, .writes = {twice}},
              [](const sg::Context& c) { c.write<double>()[0] = 2 * c.read<double>()[0]; });
    graph.add({.name = "put", .reads = {twice}, .writes = {kept}},
              [](const sg::Context& c) { c.write<double>()[0] = c.read<double>()[0]; });
    graph.add({.name = "touch", .accumulates = {other}}, [](const sg::Context& c) { ++c.accumulate<double>()[0]; });
  }
};

}  // namespace

TEST_CASE("two graphs share bytes, one in memory lent by the other", "[engine][memory]") {
  const Doubling owner, guest;
  const auto plan = sg::plan_memory(owner.graph);
  const sg::Memory memory(owner.graph, plan);
  memory.span<double>(owner.kept)[0] = 3;
  const sg::Loan loan{.buffer = guest.kept, .bytes = memory.bytes(owner.kept)};
  const auto lent = std::make_shared<sg::Memory>(guest.graph, plan, std::span(&loan, 1));
  CHECK(lent->bytes(guest.kept).data() == memory.bytes(owner.kept).data());
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 1});
  const sg::Program program(sg::RunnableGraph(guest.graph, plan), world, lent);
  lent->poison();
  executor.run(program);
  executor.run(program);
  CHECK(memory.span<double>(owner.kept)[0] == 12);
  CHECK(memory.span<double>(owner.other)[0] == 0);  // not lent
  CHECK(lent->span<double>(guest.other)[0] == 2);
}

TEST_CASE("loans that do not fit are refused by name", "[engine][memory][refuses]") {
  const Doubling owner, guest;
  const auto plan = sg::plan_memory(owner.graph);
  const sg::Memory memory(owner.graph, plan);
  const auto bytes   = memory.bytes(owner.kept);
  const auto refuses = [&](std::vector<sg::Loan> loans, const char* why) {
    CHECK_THROWS_WITH(sg::Memory(guest.graph, plan, loans), ContainsSubstring(why));
  };
  refuses({{.buffer = guest.twice, .bytes = bytes}},
          "buffer 'twice' of rank 0 is lent bytes, but is not persistent (declare it persistent)");
  refuses({{.buffer = guest.kept, .bytes = bytes.first(4)}}, "has 8 bytes, but is lent 4");
  refuses({{.buffer = sg::Buffer{7}, .bytes = bytes}}, "buffer #7, which is not in this graph (it has 3 buffers)");
  refuses({{.buffer = guest.kept, .bytes = bytes}, {.buffer = guest.other, .bytes = bytes}},
          "buffer 'other' of rank 0 is lent bytes that are also lent to buffer 'kept' of rank 0");
  std::vector<std::byte> own(20);
  const auto span = std::span(own);
  refuses({{.buffer = guest.kept, .bytes = span.subspan(8, 8)}, {.buffer = guest.other, .bytes = span.subspan(4, 8)}},
          "no edge orders their accesses");
  refuses({{.buffer = guest.kept, .bytes = span.subspan(4, 8)}, {.buffer = guest.other, .bytes = span.subspan(8, 8)}},
          "no edge orders their accesses");
  CHECK_NOTHROW(sg::Memory(guest.graph, plan,
                           std::vector<sg::Loan>{{.buffer = guest.kept, .bytes = span.subspan(8, 8)},
                                                 {.buffer = guest.other, .bytes = span.subspan(0, 8)}}));
}
