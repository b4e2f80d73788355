// Worlds of real processes, which tests/support/processes/world_process_main.cc runs.
#include <signal.h>

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <filesystem>
#include <map>
#include <sstream>
#include <thread>

#include "backends/init_world.hpp"
#include "backends/process/flight.hpp"
#include "tests/support/paths.hpp"
#include "tests/support/processes/job_run.hpp"
#include "tests/support/processes/process.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using sg::testing::JobRun;
using sg::testing::TempFolder;
using sg::testing::world_process_path;

namespace {

// Times for a whole job, and until a job has begun or has ended after a failure. Long enough for a slow machine: tests
// that pass do not wait for them. The sum in one test is below its CTest limit, which is 300 s (1200 s for several
// tests in a sanitized build).
const std::chrono::seconds a_run  = 80s * sg::testing::slowness();
const std::chrono::seconds a_wait = 25s * sg::testing::slowness();

void require_gloo() {
  if (!sg::has_process_backend("gloo")) SKIP("this build has no Gloo");
}

// MPI itself is not instrumented. ThreadSanitizer reports it, AddressSanitizer does not.
void require_mpi() {
  if (!sg::has_process_backend("mpi") || sg::testing::run_command("command -v mpirun").exit_code != 0)
    SKIP("this build has no MPI, or there is no mpirun");
  if (sg::testing::sanitizer() == sg::testing::Sanitizer::thread) SKIP("ThreadSanitizer does not know MPI");
}

// The same job in other numbers: not in sanitized builds, where it takes long.
void require_time() {
  if (sg::testing::is_sanitized()) SKIP("too many processes for a sanitized build");
}

// Root may run mpirun if it insists. Each job has its own folder for Open MPI's files: a job that begins while another
// one removes them may wait forever.
JobRun::Variables mpi_variables(const TempFolder& folder) {
  return {{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}, {"TMPDIR", folder.path().string()}};
}
std::vector<std::string> mpirun(int size, const std::vector<std::string>& command) {
  std::vector<std::string> all{"/usr/bin/env", "mpirun", "--oversubscribe", "-n", std::to_string(size)};
  all.insert(all.end(), command.begin(), command.end());
  return all;
}

// Whether all processes of a job say that they begin.
bool begins(JobRun& job, int size) {
  const auto until = std::chrono::steady_clock::now() + a_wait;
  for (int rank = 0; rank < size; ++rank) {
    const auto left = until - std::chrono::steady_clock::now();
    if (!job.wait_for_text(rank, "begins", std::chrono::duration_cast<std::chrono::milliseconds>(left))) return false;
  }
  return true;
}

std::size_t count(const std::string& text, const std::string& what) {
  std::size_t number = 0;
  for (std::size_t at = text.find(what); at != text.npos; at = text.find(what, at + 1)) ++number;
  return number;
}

void check_gloo_conformance(int size) {
  require_gloo();
  CAPTURE(size);
  const char* const leaks = size == 2 ? "detect_leaks=1" : "detect_leaks=0";  // the search takes seconds
  JobRun job(size, {world_process_path(), "gloo", "conformance"}, {{"ASAN_OPTIONS", leaks}});
  const std::vector<int> codes = job.wait(a_run);
  for (int rank = 0; rank < size; ++rank) {
    CAPTURE(rank);
    CHECK(job.err(rank) == "");
    CHECK(codes[static_cast<std::size_t>(rank)] == 0);
  }
}

void check_mpi_conformance(int size) {
  require_mpi();
  CAPTURE(size);
  const TempFolder folder;
  JobRun job(mpirun(size, {world_process_path(), "mpi", "conformance"}), mpi_variables(folder));
  CHECK(job.wait(a_run) == std::vector<int>{0});
  CAPTURE(job.err(0));  // Open MPI may have warnings about the machine
  CHECK(count(job.out(0), "passed") == static_cast<std::size_t>(size));
}

}  // namespace

// Several tests, because each has a time-out.
TEST_CASE("Gloo passes the conformance suite with 2 processes", "[backends][gloo][jobs]") {
  if (sg::testing::sanitizer() == sg::testing::Sanitizer::thread && sg::testing::sanitized())
    SKIP("3 processes run the same code");
  check_gloo_conformance(2);
}
TEST_CASE("Gloo passes the conformance suite with 3 processes", "[backends][gloo][jobs]") { check_gloo_conformance(3); }
TEST_CASE("Gloo passes the conformance suite with 1, 5 and 8 processes", "[backends][gloo][jobs]") {
  require_time();
  check_gloo_conformance(GENERATE(1, 5, 8));
}

TEST_CASE("MPI passes the conformance suite with 2 processes", "[backends][mpi][jobs]") { check_mpi_conformance(2); }
TEST_CASE("MPI passes the conformance suite with 1, 3 and 5 processes", "[backends][mpi][jobs]") {
  require_time();
  check_mpi_conformance(GENERATE(1, 3, 5));
}
TEST_CASE("MPI passes the conformance suite with 8 processes", "[backends][mpi][jobs]") {
  require_time();
  check_mpi_conformance(8);
}

TEST_CASE("a process of a Gloo world that is killed is named by all others, which end", "[backends][gloo][jobs]") {
  require_gloo();
  const int dead = GENERATE(0, 2);
  if (dead == 0) require_time();
  CAPTURE(dead);
  const TempFolder folder;
  const std::string flights = (folder / "flights").string();
  JobRun job(4, {world_process_path(), "gloo", "sums", "100000000"}, {{"FLIGHT", flights}});
  REQUIRE(begins(job, 4));
  job.signal(dead, SIGKILL);
  const std::vector<int> codes  = job.wait(a_wait);
  const sg::FlightReport report = sg::read_flights(flights);
  CHECK(report.missing == std::vector<int>{dead});
  CHECK(report.unread.empty());
  for (int rank = 0; rank < 4; ++rank) {
    CAPTURE(rank, job.err(rank));
    CHECK(codes[static_cast<std::size_t>(rank)] == (rank == dead ? 128 + SIGKILL : 3));
    if (rank != dead) CHECK_THAT(job.err(rank), ContainsSubstring("rank " + std::to_string(dead) + " is gone"));
  }
}

TEST_CASE("a process of an MPI world that is killed is named by all others, which end", "[backends][mpi][jobs]") {
  require_mpi();
  require_time();
  const int dead = GENERATE(0, 2);
  CAPTURE(dead);
  const TempFolder folder;
  JobRun::Variables variables = mpi_variables(folder);
  // Once one process has ended, mpirun gives the others one second by default: on a busy machine too few to report.
  variables["OMPI_MCA_odls_base_sigkill_timeout"] = "4";
  JobRun job(mpirun(4, {world_process_path(), "mpi", "sums", "100000000"}), variables);
  std::map<int, pid_t> processes;
  for (const auto until = std::chrono::steady_clock::now() + a_wait;
       processes.size() < 4 && std::chrono::steady_clock::now() < until;) {
    std::this_thread::sleep_for(10ms);
    const std::string out = job.out(0);
    std::istringstream text(out.substr(0, out.rfind('\n') + 1));  // a line may not be whole yet
    std::string word;
    int rank  = 0;
    pid_t pid = 0;
    while (text >> word >> rank >> pid) processes[rank] = pid;
  }
  REQUIRE(processes.size() == 4);
  ::kill(processes.at(dead), SIGKILL);
  // mpirun ends with the code of the process whose end it sees first. Survivors can be faster than the killed process.
  const std::vector<int> codes = job.wait(a_wait);
  CAPTURE(codes, job.err(0));
  CHECK((codes == std::vector<int>{128 + SIGKILL} || codes == std::vector<int>{3}));
  CHECK(count(job.err(0), "stepgraph: rank " + std::to_string(dead) + " is gone") == 3);
  // mpirun does not wait until its processes have gone.
  const auto some_left = [&] {
    return std::any_of(processes.begin(), processes.end(),
                       [](const auto& each) { return ::kill(each.second, 0) == 0; });
  };
  for (int attempt = 0; attempt < 1000 && some_left(); ++attempt) std::this_thread::sleep_for(10ms);
  CHECK_FALSE(some_left());
}

TEST_CASE("a process that hangs is ended after a failure, and leaves no partial file", "[backends][gloo][jobs]") {
  require_gloo();
  const TempFolder folder;
  JobRun job(3, {world_process_path(), "gloo", "hang", (folder / "file").string()});
  REQUIRE(begins(job, 3));
  job.signal(1, SIGKILL);
  CHECK(job.wait(a_wait) == std::vector<int>{3, 128 + SIGKILL, 3});
  std::vector<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) left.push_back(entry.path().filename());
  CHECK(left.size() <= 1);  // that of the process that was killed, where the file system has no files without a name
}

TEST_CASE("a process of a world that is stopped is named by all others after the time-out", "[backends][gloo][jobs]") {
  require_gloo();
  const int stopped = GENERATE(0, 1);
  if (stopped == 0) require_time();
  CAPTURE(stopped);
  // The set-up has this time too.
  const std::string timeout_ms = sg::testing::is_sanitized() ? "8000" : "2000";
  JobRun job(3, {world_process_path(), "gloo", "sums", "100000000"}, {{"TIMEOUT_MS", timeout_ms}});
  REQUIRE(begins(job, 3));
  job.signal(stopped, SIGSTOP);
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == stopped) continue;
    const int code = job.wait_for(rank, a_wait);
    CAPTURE(rank, job.err(rank));
    CHECK(code == 3);
    CHECK_THAT(job.err(rank), ContainsSubstring("rank " + std::to_string(stopped) + " is silent"));
  }
  job.signal(stopped, SIGCONT);  // it learns that the job has gone on without it
  CHECK(job.wait_for(stopped, a_wait) == 3);
}

TEST_CASE("a world that cannot be made says why", "[backends][gloo][jobs]") {
  require_gloo();
  const std::string short_timeout = sg::testing::is_sanitized() ? "3000" : "1000";
  SECTION("an address without an answer") {
    JobRun job({world_process_path(), "gloo", "sums", "1"}, {{"RANK", "1"},
                                                             {"WORLD_SIZE", "2"},
                                                             {"MASTER_ADDR", "127.0.0.1"},
                                                             {"MASTER_PORT", "1"},
                                                             {"STEPGRAPH_SECRET", "s"},
                                                             {"TIMEOUT_MS", short_timeout}});
    CHECK(job.wait(a_wait) == std::vector<int>{3});
    CHECK_THAT(job.err(0), ContainsSubstring("127.0.0.1") && ContainsSubstring("port 1"));
  }
  SECTION("a taken port") {
    const sg::Descriptor taken = sg::listen_on({.address = "127.0.0.1"});
    JobRun job({world_process_path(), "gloo", "sums", "1"}, {{"RANK", "0"},
                                                             {"WORLD_SIZE", "2"},
                                                             {"MASTER_ADDR", "127.0.0.1"},
                                                             {"MASTER_PORT", std::to_string(sg::port_of(taken.get()))},
                                                             {"STEPGRAPH_SECRET", "s"}});
    CHECK(job.wait(a_wait) == std::vector<int>{2});
    CHECK_THAT(job.err(0), ContainsSubstring("STEPGRAPH_PORT"));
  }
  SECTION("no place") {
    JobRun job({world_process_path(), "gloo", "sums", "1"});
    CHECK(job.wait(a_wait) == std::vector<int>{2});
    CHECK_THAT(job.err(0), ContainsSubstring("RANK and WORLD_SIZE: are not set"));
  }
  SECTION("a missing process") {
    JobRun job(2, {"/bin/bash", "-c", "[ $RANK = 1 ] || exec " + world_process_path() + " gloo sums 1"},
               {{"TIMEOUT_MS", short_timeout}});
    CHECK(job.wait(a_wait) == std::vector<int>{3, 0});
    CHECK_THAT(job.err(0), ContainsSubstring("rank 1 has not joined"));
  }
  SECTION("an MPI world without mpirun") {
    if (!sg::has_process_backend("mpi")) SKIP("this build has no MPI");
    JobRun job({world_process_path(), "mpi", "sums", "1"}, {{"RANK", "0"}, {"WORLD_SIZE", "2"}});
    CHECK(job.wait(a_wait) == std::vector<int>{2});
    CHECK_THAT(job.err(0), ContainsSubstring("start it with mpirun"));
  }
}

TEST_CASE("init_world names a backend that has no processes", "[backends]") {
  CHECK_THROWS_WITH(sg::init_world("loopback"), ContainsSubstring("known: gloo, mpi, nccl"));
}
