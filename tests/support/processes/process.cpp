#include "tests/support/processes/process.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "tests/support/processes/asan_options.hpp"

namespace stepgraph::testing {
namespace {

std::string read_file(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

}  // namespace

Outcome run_command(const std::string& command) {
  char name[] = "/tmp/stepgraph-test-XXXXXX";
  if (!mkdtemp(name)) return {};
  const std::filesystem::path folder(name);
  std::ostringstream line;
  line << "export ASAN_OPTIONS=" << asan_options_of_command << "; " << command << " >" << (folder / "out").string()
       << " 2>" << (folder / "err").string();
  const int status = std::system(line.str().c_str());
  Outcome outcome{WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(folder / "out"), read_file(folder / "err")};
  std::filesystem::remove_all(folder);
  return outcome;
}

}  // namespace stepgraph::testing
