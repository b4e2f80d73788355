#pragma once
#include <cstdint>
#include <iosfwd>
#include <span>
#include <string>

#include "engine/graph/ordered_graph.hpp"
#include "engine/graph/timeline.hpp"

namespace stepgraph {

struct TraceOptions {
  std::string title = {};
  bool flows        = true;  // arrows along edges that leave their lane, and from sends to receives
  bool counters     = true;  // memory over time
};

// Writes a timeline, measured or simulated, as Chrome trace JSON: open it at ui.perfetto.dev or in chrome://tracing. A
// rank is a process and a lane a row in it, compute first. Nodes without a lane get further rows ("no lane 1", ...), as
// few as keep them apart. A slice is a node: its category is the node's kind, its arguments are the other properties.
// Members of a collective have the same name and message; there are no arrows between them, which would hide the rest.
// Several timelines of one graph follow each other, with a row that numbers the steps.
//
// The same input gives the same bytes. Times have nanosecond resolution. The file is written as a stream: a million
// slices take a few seconds and little memory beyond the timelines. Throws Error(config) when a timeline is of another
// graph, Error(backend) when the file cannot be written; the file is then as it was before.
void write_trace(const OrderedGraph& graph, const Timeline& timeline, std::ostream& out,
                 const TraceOptions& options = {});
void write_trace(const OrderedGraph& graph, const Timeline& timeline, const std::string& path,
                 const TraceOptions& options = {});
void write_trace(const OrderedGraph& graph, std::span<const Timeline> timelines, std::ostream& out,
                 const TraceOptions& options = {});
void write_trace(const OrderedGraph& graph, std::span<const Timeline> timelines, const std::string& path,
                 const TraceOptions& options = {});

// A trace in parts, for a graph whose slices run in several processes. Each process makes the events of its slice as
// text, with times later by `offset_s`; `process` makes them unique. One process joins them. A message between two
// processes is an arrow, half of which is in each text.
struct TracePart {
  std::string events     = {};
  std::int64_t num_nodes = 0;
};
[[nodiscard]] TracePart trace_part(const OrderedGraph& graph, const Timeline& timeline, int process, double offset_s,
                                   const TraceOptions& options = {});
void join_trace(std::span<const TracePart> parts, int num_ranks, const std::string& path,
                const TraceOptions& options = {});

}  // namespace stepgraph
