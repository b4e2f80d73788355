#pragma once

namespace stepgraph {

// Throws Error(backend), naming the limits of this process, if it cannot start so many more threads: it starts them,
// and ends them again. Internal to engine/: Taskflow ends the process if one of its threads cannot be started.
void check_threads(int count);

}  // namespace stepgraph
