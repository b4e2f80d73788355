#include "backends/process/siblings.hpp"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch_test_macros.hpp>
#include <optional>
#include <string>

#include "backends/process/secret.hpp"
#include "tests/support/processes/killed_child.hpp"

namespace sg = stepgraph;

TEST_CASE("a process sees which others of its job are gone or stopped", "[backends][process]") {
  const std::string job = sg::random_secret().substr(0, 16);
  const sg::Siblings first(job, 0, 3);
  CHECK(first.missing() == "rank 1 is gone or has not started, rank 2 is gone or has not started");
  const pid_t child = sg::testing::fork_when_quiet();
  if (child == 0) {
    const sg::Siblings second(job, 1, 3);
    ::raise(SIGSTOP);
    ::raise(SIGSTOP);
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, WUNTRACED) == child);
  std::optional<sg::Siblings> third(std::in_place, job, 2, 3);
  CHECK(first.missing() == "rank 1 is stopped");
  CHECK(third->missing() == "rank 1 is stopped");
  third.reset();
  CHECK(first.missing() == "rank 1 is stopped, rank 2 is gone or has not started");
  ::kill(child, SIGKILL);
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(first.missing() == "rank 1 is gone or has not started, rank 2 is gone or has not started");
}

TEST_CASE("processes of other jobs and machines are not looked for", "[backends][process]") {
  const sg::Environment here{{"OMPI_COMM_WORLD_RANK", "0"},
                             {"OMPI_COMM_WORLD_SIZE", "2"},
                             {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                             {"PMIX_NAMESPACE", sg::random_secret().substr(0, 16)}};
  CHECK(sg::Siblings::of_mpirun(here)->missing() == "rank 1 is gone or has not started");
  sg::Environment elsewhere = here, other = here;
  elsewhere["OMPI_COMM_WORLD_LOCAL_SIZE"] = "1";
  CHECK_FALSE(sg::Siblings::of_mpirun(elsewhere));
  CHECK_FALSE(sg::Siblings::of_mpirun({}));
  other["PMIX_NAMESPACE"]       = "another";
  other["OMPI_COMM_WORLD_RANK"] = "1";
  const auto stranger           = sg::Siblings::of_mpirun(other);
  CHECK(sg::Siblings::of_mpirun(here)->missing() == "rank 1 is gone or has not started");
}
