#pragma once
#include <sys/types.h>

#include <functional>

namespace stepgraph::testing {

// fork(), when all other threads of this process sleep. The child keeps locks as they are at that moment, and one
// of AddressSanitizer's allocator is held while a thread ends. Threads of TBB end some time after the last arena.
[[nodiscard]] pid_t fork_when_quiet();

enum class Ended { killed, done, failed };  // failed: it threw

// Runs `work` in a child process that is killed at its system call number `call`, from 0, before the call does
// anything. Done: the work has fewer calls. Throws std::runtime_error where processes cannot be traced.
[[nodiscard]] Ended run_killed_at(int call, const std::function<void()>& work);

// Runs `work` in a child process. Returns its process id; wait_for() waits for its end.
[[nodiscard]] int start_child(const std::function<void()>& work);
[[nodiscard]] Ended wait_for(int child);

// From now on, this process cannot exchange two files: renameat2 says EINVAL, as on file systems without that. For
// child processes, because it cannot be undone.
void forbid_exchange();

// The same for all renames that may replace something: they say EXDEV, as for a folder of an overlay's lower layer. A
// rename to a name that must be free works (RENAME_NOREPLACE).
void forbid_renames();

}  // namespace stepgraph::testing
