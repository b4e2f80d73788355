#pragma once
#include <filesystem>
#include <string>

namespace stepgraph {

// Throws Error(backend), naming the limits of this process, if it cannot start so many more threads: it starts them,
// and ends them again. When it returns, the kernel no longer counts them. Internal to engine/: Taskflow ends the
// process if one of its threads cannot be started.
void check_threads(int count);

// The lowest pids.max of a control group and of its ancestors, which all hold for it; empty: there is no limit. `mount`
// is the folder of the controller, and `group` a path below it such as "/user.slice/session.scope". Internal to
// engine/.
[[nodiscard]] std::string lowest_pids_max(const std::filesystem::path& mount, const std::string& group);

}  // namespace stepgraph
