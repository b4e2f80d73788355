#include "tests/support/process.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>

#include "tests/support/scale.hpp"

namespace stepgraph::testing {
namespace {

std::string read_file(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// A search for leaks takes seconds at the end of each process: under AddressSanitizer, every fourth one has it.
class LeakSearch {
 public:
  LeakSearch() {
    static int num_processes = 0;
    if (num_processes++ % scale() == 0) return;
    const char* const given = std::getenv("ASAN_OPTIONS");
    if (given) before_ = given;
    const std::string options = (before_ ? *before_ + ":" : std::string()) + "detect_leaks=0";
    setenv("ASAN_OPTIONS", options.c_str(), 1);
    off_ = true;
  }
  LeakSearch(const LeakSearch&)            = delete;
  LeakSearch& operator=(const LeakSearch&) = delete;
  ~LeakSearch() {
    if (!off_) return;
    before_ ? setenv("ASAN_OPTIONS", before_->c_str(), 1) : unsetenv("ASAN_OPTIONS");
  }

 private:
  std::optional<std::string> before_;
  bool off_ = false;
};

}  // namespace

Outcome run_command(const std::string& command) {
  char name[] = "/tmp/stepgraph-test-XXXXXX";
  if (!mkdtemp(name)) return {};
  const std::filesystem::path folder(name);
  const LeakSearch leak_search;
  const int status =
      std::system((command + " >" + (folder / "out").string() + " 2>" + (folder / "err").string()).c_str());
  Outcome outcome{WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(folder / "out"), read_file(folder / "err")};
  std::filesystem::remove_all(folder);
  return outcome;
}

}  // namespace stepgraph::testing
