#include "backends/process/job.hpp"

#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <thread>

#include "engine/base/error.hpp"
#include "tests/backends/process/processes.hpp"

namespace sg = stepgraph;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using sg::testing::error_of;
using sg::testing::patient;
using sg::testing::Places;
using sg::testing::run_processes;

namespace {

sg::JobOptions options(std::chrono::milliseconds timeout = 20s) {
  sg::JobOptions options{.version = "1.0"};
  options.control.timeout = timeout;
  return options;
}

}  // namespace

TEST_CASE("the processes of a job meet, share data and end", "[backends][process]") {
  const int size = GENERATE(1, 2, 5, 16);
  CAPTURE(size);
  const Places places(size);
  std::vector<std::int64_t> sums(static_cast<std::size_t>(size));
  const auto errors = run_processes(size, [&](int rank) {
    sg::Job job(places.of(rank), options());
    job.peers().require_same("config", "the same");
    job.store().add("sum", rank, patient());
    job.peers().barrier("added");
    sums[static_cast<std::size_t>(rank)] = job.store().add("sum", 0, patient());
    job.close();
    if (!job.control().line().empty()) throw std::runtime_error(job.control().line());
  });
  CHECK(errors == std::vector<std::string>(static_cast<std::size_t>(size)));
  CHECK(sums == std::vector<std::int64_t>(static_cast<std::size_t>(size), size * (size - 1) / 2));
}

TEST_CASE("a process of another size or version is an error in all processes", "[backends][process]") {
  const bool other_size = GENERATE(false, true);
  const Places places(3);
  const auto errors = run_processes(3, [&](int rank) {
    sg::ProcessPlace place = places.of(rank);
    sg::JobOptions mine    = options();
    if (rank == 2 && other_size) place.size = 4;
    if (rank == 2 && !other_size) mine.version = "2.0";
    const sg::Job job(place, mine);
  });
  for (int rank = 0; rank < 3; ++rank) {
    CAPTURE(rank);
    CHECK_THAT(errors[static_cast<std::size_t>(rank)],
               ContainsSubstring(other_size ? "world size: rank 2 has 4, rank 0 has 3"
                                            : "program version: rank 2 has '2.0', rank 0 has '1.0'"));
  }
}

TEST_CASE("a process that starts after the job has ended for another version is told so", "[backends][process]") {
  const Places places(3);
  std::atomic<bool> ended{false};
  const auto errors = run_processes(3, [&](int rank) {
    if (rank == 1) {
      ended.wait(false);
      std::this_thread::sleep_for(300ms);  // rank 0 would have left by now
    }
    sg::JobOptions mine = options();
    if (rank == 2) mine.version = "2.0";
    try {
      const sg::Job job(places.of(rank), mine);
    } catch (const sg::Error&) {
      if (rank == 2) {
        ended = true;
        ended.notify_all();
      }
      throw;
    }
  });
  for (int rank = 0; rank < 3; ++rank) {
    CAPTURE(rank);
    CHECK_THAT(errors[static_cast<std::size_t>(rank)], ContainsSubstring("rank 2 has '2.0', rank 0 has '1.0'"));
  }
}

TEST_CASE("a process that never starts is an error in all others", "[backends][process]") {
  const Places places(4);
  const auto errors = run_processes(4, [&](int rank) {
    if (rank != 2) const sg::Job job(places.of(rank), options(1s));
  });
  for (const int rank : {0, 1, 3}) {
    CAPTURE(rank);
    CHECK_THAT(errors[static_cast<std::size_t>(rank)], ContainsSubstring("rank 2 has not joined"));
  }
}

TEST_CASE("a process that leaves early ends the waits of all others with its name", "[backends][process]") {
  const int dead = GENERATE(0, 2);
  CAPTURE(dead);
  const Places places(4);
  const auto errors = run_processes(4, [&](int rank) {
    sg::Job job(places.of(rank), options());
    if (rank == dead) return;  // without close()
    if (rank == 1) {
      static_cast<void>(job.store().get("never", patient(&job.control().interrupt())));
    } else {
      job.peers().barrier("step");
    }
  });
  for (int rank = 0; rank < 4; ++rank) {
    CAPTURE(rank);
    if (rank == dead) continue;
    CHECK_THAT(errors[static_cast<std::size_t>(rank)],
               ContainsSubstring("rank " + std::to_string(dead) + " failed: has left the job"));
  }
}

TEST_CASE("a failure is reported by all with its text", "[backends][process]") {
  const Places places(3);
  const auto errors = run_processes(3, [&](int rank) {
    sg::Job job(places.of(rank), options());
    if (rank == 1) return job.control().fail("the data is shorter than a batch");
    job.peers().barrier("step");
  });
  for (const int rank : {0, 2}) {
    CAPTURE(rank);
    CHECK(errors[static_cast<std::size_t>(rank)] == "rank 1 failed: the data is shorter than a batch");
  }
}

TEST_CASE("two jobs on one port do not mix", "[backends][process]") {
  const Places places(2);
  std::atomic<bool> over = false;
  std::string taken, foreign;
  const auto errors = run_processes(3, [&](int thread) {
    if (thread < 2) {
      sg::Job job(places.of(thread), options());
      while (!over) std::this_thread::sleep_for(5ms);
      job.close();
      return;
    }
    sg::ProcessPlace first = places.of(0), second = places.of(1);
    first.listen_fd = -1;
    first.job = second.job = "another job";
    taken                  = error_of([&] { const sg::Job job(first, options(300ms)); });
    foreign                = error_of([&] { const sg::Job job(second, options(300ms)); });
    over                   = true;
  });
  CHECK(errors == std::vector<std::string>(3));
  CHECK_THAT(taken, ContainsSubstring("STEPGRAPH_PORT"));
  CHECK_THAT(foreign, ContainsSubstring("another job"));
}
