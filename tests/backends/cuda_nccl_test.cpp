// Worlds of processes over NCCL, which share the first GPU: NCCL takes them for several machines.
#ifdef STEPGRAPH_WITH_CUDA
#include <cuda_runtime_api.h>
#endif
#include <signal.h>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <filesystem>
#include <thread>

#include "backends/init_world.hpp"
#include "engine/base/error.hpp"
#include "tests/support/ops/device_case.hpp"
#include "tests/support/paths.hpp"
#include "tests/support/processes/job_run.hpp"
#include "tests/support/processes/process.hpp"

namespace sg = stepgraph;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using sg::testing::JobRun;
using sg::testing::world_process_path;

namespace {

constexpr auto a_run = 240s, a_wait = 60s;

void require_nccl() {
  if (!sg::has_process_backend("nccl")) SKIP("this build has no NCCL");
  sg::testing::need_device();
}

// After a process has ended, the driver frees its memory.
std::size_t free_bytes() {
  std::size_t free = 0;
#ifdef STEPGRAPH_WITH_CUDA
  std::size_t all = 0;
  REQUIRE(cudaMemGetInfo(&free, &all) == cudaSuccess);
#endif
  return free;
}

bool begins(JobRun& job, int size) {
  for (int rank = 0; rank < size; ++rank) {
    if (!job.wait_for_text(rank, "begins", a_wait)) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("NCCL passes the conformance suite with 2 and 4 processes", "[backends][cuda][nccl][jobs]") {
  require_nccl();
  const int size          = GENERATE(2, 4);
  const std::string exact = GENERATE("0", "1");
  CAPTURE(size, exact);
  JobRun job(size, {world_process_path(), "nccl", "conformance"}, {{"EXACT", exact}, {"TIMEOUT_MS", "60000"}});
  const std::vector<int> codes = job.wait(a_run);
  for (int rank = 0; rank < size; ++rank) {
    CAPTURE(rank, job.err(rank));
    CHECK(codes[static_cast<std::size_t>(rank)] == 0);
    CHECK_THAT(job.out(rank), ContainsSubstring("passed"));
  }
}

TEST_CASE("a process over NCCL that is killed or stopped is named by all others, and the GPU's memory is free again",
          "[backends][cuda][nccl][jobs]") {
  require_nccl();
  const int signal         = GENERATE(SIGKILL, SIGSTOP);
  const int dead           = GENERATE(0, 1, 2);
  const std::size_t before = free_bytes();
  CAPTURE(signal, dead);
  {
    JobRun job(3, {world_process_path(), "nccl", "sums", "100000000"}, {{"TIMEOUT_MS", "5000"}});
    REQUIRE(begins(job, 3));
    std::this_thread::sleep_for(500ms);  // some steps, captured ones among them
    job.signal(dead, signal);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == dead) continue;
      const int code = job.wait_for(rank, a_wait);
      CAPTURE(rank, job.err(rank));
      CHECK(code == 3);
      CHECK_THAT(job.err(rank),
                 ContainsSubstring(sg::str("rank ", dead, signal == SIGKILL ? " is gone" : " is silent")));
    }
    if (signal == SIGSTOP) job.signal(dead, SIGCONT);
    CHECK(job.wait_for(dead, a_wait) == (signal == SIGKILL ? 128 + SIGKILL : 3));
  }
  const auto until = std::chrono::steady_clock::now() + a_wait;
  while (free_bytes() < before && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(100ms);
  CHECK(free_bytes() >= before);
}

TEST_CASE("after an aborted step, NCCL worlds make new communicators and go on", "[backends][cuda][nccl][jobs]") {
  require_nccl();
  JobRun job(2, {world_process_path(), "nccl", "aborts", "3"}, {{"TIMEOUT_MS", "30000"}});
  const std::vector<int> codes = job.wait(a_run);
  for (int rank = 0; rank < 2; ++rank) {
    CAPTURE(rank, job.err(rank));
    CHECK(codes[static_cast<std::size_t>(rank)] == 0);
    CHECK_THAT(job.out(rank), ContainsSubstring("done"));
  }
}

TEST_CASE("a process over NCCL without a GPU of its own says so", "[backends][cuda][nccl][jobs]") {
  require_nccl();
  JobRun job(2, {world_process_path(), "nccl", "sums", "1"},
             {{"OWN_GPUS", "1"}, {"CUDA_VISIBLE_DEVICES", "0"}, {"TIMEOUT_MS", "5000"}});
  const std::vector<int> codes = job.wait(a_wait);
  CAPTURE(job.err(0), job.err(1));
  CHECK(codes[1] == 2);
  CHECK_THAT(job.err(1), ContainsSubstring("no GPU for process 1 of this machine"));
  CHECK(codes[0] != 0);
}
