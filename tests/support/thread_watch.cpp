// Checks the list of tests that start no thread (tests/CMakeLists.txt). The tsan build leaves these tests out, so a
// test that starts a thread must not be on the list.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <catch2/catch_test_case_info.hpp>
#include <catch2/reporters/catch_reporter_event_listener.hpp>
#include <catch2/reporters/catch_reporter_registrars.hpp>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace {

std::atomic<int> num_threads_started{0};

// Whether the file of a test is on the list: names relative to tests/, each between two semicolons.
bool is_single_threaded(std::string_view file) {
  constexpr std::string_view list = ";" STEPGRAPH_SINGLE_THREADED_TESTS ";";
  for (std::size_t begin = 1; begin < list.size();) {
    const std::size_t end       = list.find(';', begin);
    const std::string_view name = list.substr(begin, end - begin);
    if (!name.empty() && file.ends_with(name)) return true;
    begin = end + 1;
  }
  return false;
}

class ThreadWatch final : public Catch::EventListenerBase {
 public:
  using Catch::EventListenerBase::EventListenerBase;

  void testCaseStarting(const Catch::TestCaseInfo&) override { num_threads_started = 0; }
  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    const Catch::TestCaseInfo& test = *stats.testInfo;
    if (num_threads_started == 0 || !is_single_threaded(test.lineInfo.file)) return;
    std::fprintf(stderr, "%s: '%s' started %d threads, but its file is in single_threaded_tests (tests/CMakeLists.txt)\n",
                 test.lineInfo.file, test.name.c_str(), num_threads_started.load());
    std::_Exit(1);  // a listener cannot fail a test
  }
};
CATCH_REGISTER_LISTENER(ThreadWatch)

}  // namespace

// Replaces the function of the C library in this program.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  using Create             = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  ++num_threads_started;
  return create(thread, attributes, run, argument);
}
