#pragma once
#include <sys/eventfd.h>

#include <atomic>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/base/partial.hpp"

namespace stepgraph::cli {

// Copies what processes write, on a thread of its own, until all their pipes are closed or end() is called.
class Relay {
 public:
  // Before start(). With a prefix, which lines get, bytes go to stderr. Without one they go to stdout as they are.
  void add(Descriptor pipe, std::string prefix) { sources_.push_back({std::move(pipe), std::move(prefix), {}}); }
  void start();
  void end();  // no process is left: gives the last bytes a moment

 private:
  struct Source {
    Descriptor pipe;
    std::string prefix;
    std::string line;  // the beginning of a line
  };
  void run();
  static void copy(Source& source);
  static void finish(Source& source);

  std::vector<Source> sources_;
  Descriptor wake_{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::atomic<bool> ended_ = false;
  std::thread thread_;
};

}  // namespace stepgraph::cli
