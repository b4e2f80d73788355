#pragma once
#include <map>
#include <optional>
#include <string>
#include <string_view>

// The place of this process among those of its job, as a launcher tells it in the environment.
namespace stepgraph {

using Environment = std::map<std::string, std::string, std::less<>>;
[[nodiscard]] Environment process_environment();  // that of this process

struct ProcessPlace {
  int rank            = 0;
  int size            = 1;
  int local_rank      = 0;     // among the processes of this machine; 0 also if it is not known
  int local_size      = 1;     // 1 also if it is not known
  bool local_is_known = true;  // local_rank is
  std::string address = {};    // where process 0 listens; empty: not known yet (MPI tells it)
  int port            = 0;
  bool next_port_too  = false;  // process 0 takes port + 1 if `port` is taken; the others try both
  std::string secret  = {};     // empty: none, and only loopback addresses are allowed
  std::string job     = {};     // the launcher's name for the job; empty: it has none
  int listen_fd       = -1;     // a listening socket that process 0 has inherited
};

// What a config or flags say. It replaces what the environment says.
struct PlaceOverrides {
  std::optional<int> rank            = {};
  std::optional<int> size            = {};
  std::optional<int> local_rank      = {};
  std::optional<int> local_size      = {};
  std::optional<std::string> address = {};  // HOST, HOST:PORT or [IPV6]:PORT
  std::optional<int> port            = {};
  std::optional<std::string> secret  = {};
  bool needs_address                 = true;  // false: address and port may be missing
  std::string section                = {};    // before the names of these in messages: "world."
};

// Rank and size come from one source: the overrides, else RANK and WORLD_SIZE (torchrun), else OMPI_COMM_WORLD_*
// (mpirun), else SLURM_* (srun). Throws Error(config) that names a missing, wrong or contradicting variable.
//
// The port is the first of: the overrides, STEPGRAPH_PORT, MASTER_PORT, one that is computed from SLURM_JOB_ID. Under
// torchrun a store of torchrun can listen on MASTER_PORT: with TORCHELASTIC_USE_AGENT_STORE=True the port is
// MASTER_PORT + 1, else `next_port_too` is set.
[[nodiscard]] ProcessPlace find_place(const Environment& environment, const PlaceOverrides& overrides = {});

// Rank and size, if a launcher (stepgraph launch, torchrun or mpirun) has started several processes.
struct RankOfSize {
  int rank = 0;
  int size = 1;
};
[[nodiscard]] std::optional<RankOfSize> launched_among(const Environment& environment);

// The first host of a Slurm node list: "node07" of "node[07-09,12],login". Throws Error(config).
[[nodiscard]] std::string first_host(std::string_view node_list);

// "localhost", 127.x.x.x or ::1.
[[nodiscard]] bool is_loopback_name(std::string_view address);

}  // namespace stepgraph
