#include "engine/base/partial.hpp"

#include <unistd.h>

#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <filesystem>
#include <fstream>
#include <thread>

#include "engine/base/error.hpp"
#include "engine/base/output_folder.hpp"
#include "tests/support/sanitizer.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
namespace fs = std::filesystem;

// A thread of a process that ends removes the folder that another thread still writes.
TEST_CASE("a folder whose files are being removed by another thread is not put in place", "[engine][output_folder]") {
  if (sg::testing::sanitizer() == sg::testing::Sanitizer::thread)
    SKIP("GCC 12's ThreadSanitizer takes a std::timed_mutex that is locked with a time-out for unlocked");
  const sg::testing::TempFolder temp(access("/dev/shm", W_OK) == 0 ? "/dev/shm" : fs::temp_directory_path());
  const std::string folder = temp / "model";
  const int rounds         = sg::testing::cases(100);
  for (int round = 0; round < rounds; ++round) {
    CAPTURE(round);
    std::atomic<bool> writes = false, removed = false;
    std::thread writer([&] {
      try {
        sg::OutputFolder out(folder);
        const auto make = [&](const std::string& name) { std::ofstream(out.temporary() + "/" + name) << "new"; };
        make("weights");
        for (int i = 0; !removed; ++i) {  // some appear while the folder is being removed
          make("file" + std::to_string(i % 100));
          writes = true;
        }
        make("config");
        out.keep();
      } catch (const sg::Error&) {
      }
      writes = true;
    });
    while (!writes) std::this_thread::yield();
    sg::remove_own_partials();
    removed = true;
    writer.join();
    REQUIRE(fs::is_empty(temp.path()));
  }
}
