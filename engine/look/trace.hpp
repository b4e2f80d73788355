#pragma once
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

// A timeline, measured or simulated, as Chrome trace JSON: open it at ui.perfetto.dev or in chrome://tracing. A rank is
// a process and a lane a row in it, compute first; nodes without a lane share as few further rows ("no lane 1", ...) as
// keep them apart. A slice is a node: its category is its kind, its arguments say what else is known. Members of a
// collective have the same name and message; arrows between them would hide everything else. Several timelines of one
// graph follow each other, with a row that numbers the steps.
//
// The same input gives the same bytes. Times have nanosecond resolution. Written as a stream: a million slices take a
// few seconds and no memory to speak of beyond the timelines. Throws Error(config) when a timeline is of another graph,
// Error(backend) when it cannot be written; a file is whole or as it was.
void write_trace(const OrderedGraph& graph, const Timeline& timeline, std::ostream& out,
                 const TraceOptions& options = {});
void write_trace(const OrderedGraph& graph, const Timeline& timeline, const std::string& path,
                 const TraceOptions& options = {});
void write_trace(const OrderedGraph& graph, std::span<const Timeline> timelines, std::ostream& out,
                 const TraceOptions& options = {});
void write_trace(const OrderedGraph& graph, std::span<const Timeline> timelines, const std::string& path,
                 const TraceOptions& options = {});

}  // namespace stepgraph
