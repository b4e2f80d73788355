#include "backends/process/environment.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <optional>
#include <string>

#include "engine/base/error.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;

namespace {

sg::Environment with(sg::Environment base, const sg::Environment& more) {
  for (const auto& [name, value] : more) base[name] = value;
  return base;
}

sg::Environment without(sg::Environment base, std::string_view name) {
  base.erase(base.find(name));
  return base;
}

const sg::Environment torch   = {{"RANK", "5"},
                                 {"WORLD_SIZE", "8"},
                                 {"LOCAL_RANK", "1"},
                                 {"LOCAL_WORLD_SIZE", "4"},
                                 {"MASTER_ADDR", "node0"},
                                 {"MASTER_PORT", "29500"}};
const sg::Environment openmpi = {{"OMPI_COMM_WORLD_RANK", "2"},
                                 {"OMPI_COMM_WORLD_SIZE", "4"},
                                 {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                                 {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
const sg::Environment slurm   = {{"SLURM_PROCID", "3"},
                                 {"SLURM_STEP_NUM_TASKS", "7"},
                                 {"SLURM_LOCALID", "1"},
                                 {"SLURM_NODEID", "1"},
                                 {"SLURM_JOB_ID", "123456"},
                                 {"SLURM_STEP_ID", "0"},
                                 {"SLURM_STEP_TASKS_PER_NODE", "2(x2),3"},
                                 {"SLURM_STEP_NODELIST", "gpu[07-09]"}};

std::string refusal(const sg::Environment& environment, const sg::PlaceOverrides& overrides = {}) {
  try {
    static_cast<void>(sg::find_place(environment, overrides));
  } catch (const sg::Error& error) {
    CHECK(error.kind() == sg::ErrorKind::config);
    return error.what();
  }
  return "accepted";
}

}  // namespace

TEST_CASE("a place is read from the variables of torchrun", "[backends][process]") {
  const sg::ProcessPlace place = sg::find_place(with(torch, {{"STEPGRAPH_SECRET", "s"}}));
  CHECK(place.rank == 5);
  CHECK(place.size == 8);
  CHECK(place.local_rank == 1);
  CHECK(place.local_size == 4);
  CHECK(place.address == "node0");
  CHECK(place.port == 29500);
  CHECK(place.secret == "s");
  CHECK_FALSE(place.next_port_too);
  CHECK(place.listen_fd == -1);
}

TEST_CASE("a port that torchrun's store uses is left to it", "[backends][process]") {
  const sg::Environment run   = with(torch, {{"TORCHELASTIC_RUN_ID", "run7"}, {"TORCHELASTIC_RESTART_COUNT", "2"}});
  const sg::ProcessPlace both = sg::find_place(run);
  CHECK(both.port == 29500);
  CHECK(both.next_port_too);
  CHECK(both.job == "run7.2");

  const sg::ProcessPlace next = sg::find_place(with(run, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}}));
  CHECK(next.port == 29501);
  CHECK_FALSE(next.next_port_too);

  const sg::ProcessPlace ours =
      sg::find_place(with(run, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"STEPGRAPH_PORT", "4000"}}));
  CHECK(ours.port == 4000);
  CHECK_FALSE(ours.next_port_too);
}

TEST_CASE("a place is read from the variables of mpirun", "[backends][process]") {
  const sg::ProcessPlace place = sg::find_place(openmpi, {.needs_address = false});
  CHECK(place.rank == 2);
  CHECK(place.size == 4);
  CHECK(place.local_rank == 0);
  CHECK(place.local_size == 2);
  CHECK(place.address.empty());
  CHECK(place.port == 0);
  CHECK_THAT(refusal(openmpi), ContainsSubstring("MASTER_ADDR: is not set"));
  CHECK_THAT(refusal(with(openmpi, {{"MASTER_ADDR", "a"}})), ContainsSubstring("MASTER_PORT: is not set"));
}

TEST_CASE("a place is read from the variables of srun", "[backends][process]") {
  const sg::ProcessPlace place = sg::find_place(slurm);
  CHECK(place.rank == 3);
  CHECK(place.size == 7);
  CHECK(place.local_rank == 1);
  CHECK(place.local_size == 2);
  CHECK(place.address == "gpu07");
  CHECK(place.port == 20000 + 123456 % 20000);
  CHECK(place.job == "123456.0");
  CHECK(sg::find_place(with(slurm, {{"SLURM_NODEID", "2"}})).local_size == 3);
  CHECK(sg::find_place(with(slurm, {{"MASTER_ADDR", "login"}, {"MASTER_PORT", "77"}})).address == "login");
  CHECK(sg::find_place(with(slurm, {{"SLURM_STEP_TASKS_PER_NODE", "7"}, {"SLURM_NODEID", "0"}})).address ==
        "127.0.0.1");
  CHECK_THAT(refusal(with(slurm, {{"SLURM_NODEID", "3"}})),
             ContainsSubstring("SLURM_STEP_TASKS_PER_NODE: is '2(x2),3'"));
  CHECK_THAT(refusal(without(slurm, "SLURM_STEP_NUM_TASKS")), ContainsSubstring("srun"));
}

TEST_CASE("one source is taken, and SLURM_PROCID of a batch script is ignored", "[backends][process]") {
  const sg::Environment batch = {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "9"}, {"SLURM_JOB_ID", "1"}};
  CHECK(sg::find_place(with(torch, batch)).rank == 5);
  CHECK(sg::find_place(with(openmpi, batch), {.needs_address = false}).rank == 2);

  CHECK_THAT(refusal(with(torch, openmpi)), ContainsSubstring("RANK: is 5, but OMPI_COMM_WORLD_RANK is 2"));
  CHECK_THAT(refusal(with(with(torch, openmpi), {{"OMPI_COMM_WORLD_RANK", "5"}, {"OMPI_COMM_WORLD_SIZE", "9"}})),
             ContainsSubstring("WORLD_SIZE: is 8, but OMPI_COMM_WORLD_SIZE is 9"));
  CHECK(
      sg::find_place(with(with(torch, openmpi), {{"OMPI_COMM_WORLD_RANK", "5"}, {"OMPI_COMM_WORLD_SIZE", "8"}})).rank ==
      5);
}

TEST_CASE("overrides replace the environment", "[backends][process]") {
  const sg::ProcessPlace place = sg::find_place(with(torch, {{"STEPGRAPH_PORT", "9"}, {"STEPGRAPH_SECRET", "a"}}),
                                                {.rank = 1, .size = 2, .address = "127.0.0.1:4711", .secret = "b"});
  CHECK(place.rank == 1);
  CHECK(place.size == 2);
  CHECK(place.local_rank == 1);  // all on this machine
  CHECK(place.local_size == 2);
  CHECK(place.address == "127.0.0.1");
  CHECK(place.port == 4711);
  CHECK(place.secret == "b");
  CHECK(sg::find_place(torch, {.address = "[::1]:80"}).address == "::1");
  CHECK(sg::find_place(torch, {.address = "[::1]:80"}).port == 80);
  CHECK(sg::find_place(torch, {.address = "fe80::1"}).address == "fe80::1");
  CHECK(sg::find_place({}, {.rank = 0, .size = 1}).address == "127.0.0.1");
  CHECK_THAT(refusal({}, {.rank = 0}), ContainsSubstring("size: is not given"));
  CHECK_THAT(refusal({}, {.size = 2}), ContainsSubstring("rank: is not given"));
  CHECK_THAT(refusal({}, {.rank = 2, .size = 2, .address = "a:1"}), ContainsSubstring("rank: is 2, but size is 2"));
  CHECK_THAT(refusal({}, {.rank = -1, .size = 2}), ContainsSubstring("rank: is -1"));
  CHECK_THAT(refusal({}, {.rank = 0, .size = 0}), ContainsSubstring("size: is 0"));
  CHECK_THAT(refusal(torch, {.address = "a:1", .port = 2}), ContainsSubstring("port: is 2, but the address is 'a:1'"));
  const std::string wrong = GENERATE("a:b", ":1", "a:65536", "[::1", "[::1]x", "[::1]:");
  CAPTURE(wrong);
  CHECK_THAT(refusal(torch, {.address = wrong}), ContainsSubstring("address: is '" + wrong + "'"));
}

TEST_CASE("missing, wrong and contradicting variables are named", "[backends][process]") {
  CHECK_THAT(refusal({}), ContainsSubstring("RANK and WORLD_SIZE: are not set"));
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    CAPTURE(name);
    CHECK_THAT(refusal(without(torch, name)), ContainsSubstring(std::string(name) + ": is not set"));
  }
  CHECK_THAT(refusal(without(torch, "LOCAL_RANK")), ContainsSubstring("LOCAL_WORLD_SIZE is set"));
  CHECK_THAT(refusal(with(without(torch, "LOCAL_WORLD_SIZE"), {{"LOCAL_RANK", "8"}})),
             ContainsSubstring("LOCAL_RANK: is 8, but WORLD_SIZE is 8"));
  CHECK_THAT(refusal(with(torch, {{"RANK", "8"}})), ContainsSubstring("RANK: is 8, but WORLD_SIZE is 8 (0 to 7)"));
  CHECK_THAT(refusal(with(torch, {{"LOCAL_RANK", "4"}})),
             ContainsSubstring("LOCAL_RANK: is 4, but LOCAL_WORLD_SIZE is 4"));
  CHECK_THAT(refusal(with(torch, {{"LOCAL_WORLD_SIZE", "9"}})),
             ContainsSubstring("LOCAL_WORLD_SIZE: is 9, but WORLD_SIZE is 8"));
  const std::string wrong = GENERATE("", "x", "-1", "1.5", "3 ", "99999999999");
  CAPTURE(wrong);
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "STEPGRAPH_PORT"}) {
    CAPTURE(name);
    CHECK_THAT(refusal(with(torch, {{name, wrong}})), ContainsSubstring(std::string(name) + ": is '" + wrong + "'"));
  }
  CHECK_THAT(refusal(with(torch, {{"MASTER_PORT", "65536"}})), ContainsSubstring("1 to 65535"));
  CHECK_THAT(refusal(with(torch, {{"MASTER_PORT", "65535"}, {"TORCHELASTIC_RUN_ID", "r"}})),
             ContainsSubstring("1 to 65534"));
  CHECK_THAT(refusal(with(torch, {{"STEPGRAPH_PORT", "0"}})), ContainsSubstring("STEPGRAPH_PORT: is '0'"));
}

TEST_CASE("LOCAL_RANK is enough, and on a loopback address all processes are on the machine", "[backends][process]") {
  const sg::Environment alone = without(torch, "LOCAL_WORLD_SIZE");
  CHECK(sg::find_place(alone).local_rank == 1);
  const sg::ProcessPlace here = sg::find_place(with(alone, {{"MASTER_ADDR", "127.0.0.1"}}));
  CHECK(here.local_rank == 1);
  CHECK(here.local_size == 8);
}

TEST_CASE("only rank 0 inherits a listening socket", "[backends][process]") {
  const sg::Environment environment = with(torch, {{"STEPGRAPH_LISTEN_FD", "7"}});
  CHECK(sg::find_place(environment).listen_fd == -1);
  CHECK(sg::find_place(with(environment, {{"RANK", "0"}})).listen_fd == 7);
  CHECK_THAT(refusal(with(environment, {{"RANK", "0"}, {"STEPGRAPH_LISTEN_FD", "x"}})),
             ContainsSubstring("STEPGRAPH_LISTEN_FD: is 'x'"));
}

TEST_CASE("the first host of a Slurm node list is found", "[backends][process]") {
  CHECK(sg::first_host("node7") == "node7");
  CHECK(sg::first_host("node7,node9") == "node7");
  CHECK(sg::first_host("node[07-09,12],login") == "node07");
  CHECK(sg::first_host("node[3,5]") == "node3");
  CHECK(sg::first_host("rack[2-3]-n[010-020].cluster,x") == "rack2-n010.cluster");
  for (const char* wrong : {"", ",a", "node[", "node[]", "node[x-y]", "node]"}) {
    CAPTURE(wrong);
    CHECK_THROWS_AS(sg::first_host(wrong), sg::Error);
  }
}
