#include "backends/process/environment.hpp"

#include <unistd.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"

namespace stepgraph {
namespace {

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorKind::config, text); }

// Variables of the environment, as text and as numbers.
class Variables {
 public:
  explicit Variables(const Environment& environment) : environment_(environment) {}

  [[nodiscard]] bool has(std::string_view name) const { return environment_.contains(name); }
  [[nodiscard]] std::string text(std::string_view name) const {
    const auto at = environment_.find(name);
    return at == environment_.end() ? std::string() : at->second;
  }
  [[nodiscard]] std::optional<int> number(std::string_view name, int least, int most) const {
    if (!has(name)) return std::nullopt;
    const std::optional<int> value = to_number<int>(text(name));
    if (!value || *value < least || *value > most)
      refuse(str(name, ": is '", text(name), "' (a whole number from ", least,
                 most == largest ? " on" : str(" to ", most), ")"));
    return value;
  }
  [[nodiscard]] int required(std::string_view name, int least, std::string_view beside) const {
    if (!has(name)) refuse(str(name, ": is not set, but ", beside, " is (both, or none of them)"));
    return *number(name, least, largest);
  }

  static constexpr int largest = std::numeric_limits<int>::max();

 private:
  const Environment& environment_;
};

// A number and the name under which it was given.
struct Named {
  std::string name;
  int value = 0;
};

struct Ranks {
  Named rank, size;
  std::optional<Named> local_rank, local_size;
};

std::optional<Named> named(const Variables& variables, const std::string& name, int least) {
  const std::optional<int> value = variables.number(name, least, Variables::largest);
  return value ? std::optional<Named>({name, *value}) : std::nullopt;
}

std::optional<Ranks> ranks_of(const Variables& variables, const std::string& rank, const std::string& size,
                              const std::string& local_rank, const std::string& local_size) {
  if (!variables.has(rank) && !variables.has(size)) return std::nullopt;
  return Ranks{{rank, variables.required(rank, 0, size)},
               {size, variables.required(size, 1, rank)},
               named(variables, local_rank, 0),
               named(variables, local_size, 1)};
}

std::optional<Ranks> torchrun_ranks(const Variables& variables) {
  return ranks_of(variables, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE");
}

std::optional<Ranks> openmpi_ranks(const Variables& variables) {
  return ranks_of(variables, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                  "OMPI_COMM_WORLD_LOCAL_SIZE");
}

// The tasks of a node, of a list such as "4(x2),3": 4, 4, 3.
std::optional<int> tasks_of_node(std::string_view list, int node) {
  for (const std::string_view item : split_text(list, ',')) {
    const std::size_t bracket      = item.find("(x");
    const std::optional<int> tasks = to_number<int>(item.substr(0, bracket));
    std::optional<int> times       = 1;
    if (bracket != item.npos && item.ends_with(')'))
      times = to_number<int>(item.substr(bracket + 2, item.size() - bracket - 3));
    if (!tasks || !times) return std::nullopt;
    if (node < *times) return tasks;
    node -= *times;
  }
  return std::nullopt;
}

std::optional<Ranks> slurm_ranks(const Variables& variables) {
  if (!variables.has("SLURM_PROCID")) return std::nullopt;
  // A batch script has SLURM_PROCID=0 as well.
  if (!variables.has("SLURM_STEP_NUM_TASKS"))
    refuse(
        "SLURM_STEP_NUM_TASKS: is not set, but SLURM_PROCID is: this is a batch script or an allocation, not a task "
        "of a step (start the program with srun)");
  Ranks ranks{{"SLURM_PROCID", variables.required("SLURM_PROCID", 0, "SLURM_STEP_NUM_TASKS")},
              {"SLURM_STEP_NUM_TASKS", variables.required("SLURM_STEP_NUM_TASKS", 1, "SLURM_PROCID")},
              named(variables, "SLURM_LOCALID", 0),
              std::nullopt};
  const std::string list        = variables.text("SLURM_STEP_TASKS_PER_NODE");
  const std::optional<int> node = variables.number("SLURM_NODEID", 0, Variables::largest);
  if (ranks.local_rank && node && !list.empty()) {
    const std::optional<int> tasks = tasks_of_node(list, *node);
    if (!tasks) refuse(str("SLURM_STEP_TASKS_PER_NODE: is '", list, "', without node ", *node, " (such as 4(x2),3)"));
    ranks.local_size = Named{"SLURM_STEP_TASKS_PER_NODE", *tasks};
  } else {
    ranks.local_rank.reset();
  }
  return ranks;
}

void require_equal(const Named& a, const Named& b) {
  if (a.value == b.value) return;
  refuse(str(a.name, ": is ", a.value, ", but ", b.name, " is ", b.value, " (equal, or only one of them set)"));
}

void require_below(const Named& a, const Named& b) {
  if (a.value < b.value) return;
  refuse(str(a.name, ": is ", a.value, ", but ", b.name, " is ", b.value, " (0 to ", b.value - 1, ")"));
}

// Where rank and size come from.
enum class Source { overrides, torchrun, openmpi, slurm };

std::pair<Ranks, Source> find_ranks(const Variables& variables, const PlaceOverrides& overrides) {
  if (overrides.rank || overrides.size) {
    const std::string rank = overrides.section + "rank", size = overrides.section + "size";
    if (!overrides.rank) refuse(str(rank, ": is not given, but size is (both, or none of them)"));
    if (!overrides.size) refuse(str(size, ": is not given, but rank is (both, or none of them)"));
    if (*overrides.rank < 0) refuse(str(rank, ": is ", *overrides.rank, " (0 or more)"));
    if (*overrides.size < 1) refuse(str(size, ": is ", *overrides.size, " (1 or more)"));
    return {Ranks{{rank, *overrides.rank}, {size, *overrides.size}, {}, {}}, Source::overrides};
  }
  if (const std::optional<Ranks> ranks = torchrun_ranks(variables)) {
    if (const std::optional<Ranks> other = openmpi_ranks(variables)) {
      require_equal(ranks->rank, other->rank);
      require_equal(ranks->size, other->size);
    }
    return {*ranks, Source::torchrun};
  }
  if (const std::optional<Ranks> ranks = openmpi_ranks(variables)) return {*ranks, Source::openmpi};
  if (const std::optional<Ranks> ranks = slurm_ranks(variables)) return {*ranks, Source::slurm};
  refuse(
      "RANK and WORLD_SIZE: are not set, nor the variables of mpirun or srun (start the program with mpirun, torchrun, "
      "srun or stepgraph launch, or give rank and size; in a config: world.rank, world.size)");
}

// Sets rank, size and their local counterparts.
void place_ranks(ProcessPlace& place, Ranks ranks, const PlaceOverrides& overrides) {
  if (overrides.local_rank) ranks.local_rank = Named{"local_rank", *overrides.local_rank};
  if (overrides.local_size) ranks.local_size = Named{"local_size", *overrides.local_size};
  require_below(ranks.rank, ranks.size);
  place.rank = ranks.rank.value;
  place.size = ranks.size.value;
  if (ranks.local_size && !ranks.local_rank)
    refuse(str("local rank: is not known, but ", ranks.local_size->name, " is set (both, or none of them)"));
  if (!ranks.local_rank) return;
  if (ranks.local_rank->value < 0)
    refuse(str(ranks.local_rank->name, ": is ", ranks.local_rank->value, " (0 or more)"));
  place.local_rank = ranks.local_rank->value;
  if (!ranks.local_size) return require_below(*ranks.local_rank, ranks.size);  // their number is not known
  require_below(*ranks.local_rank, *ranks.local_size);
  if (ranks.local_size->value > ranks.size.value)
    refuse(str(ranks.local_size->name, ": is ", ranks.local_size->value, ", but ", ranks.size.name, " is ",
               ranks.size.value, " (no more than that)"));
  place.local_size = ranks.local_size->value;
}

// HOST, HOST:PORT or [IPV6]:PORT.
std::pair<std::string, std::optional<int>> split_address(const std::string& text, const std::string& name) {
  std::string host = text;
  std::string port;
  if (text.starts_with('[')) {
    const std::size_t end = text.find(']');
    if (end == text.npos || (end + 1 < text.size() && text[end + 1] != ':'))
      refuse(str(name, ": is '", text, "' (HOST, HOST:PORT or [IPV6]:PORT)"));
    host = text.substr(1, end - 1);
    if (end + 1 < text.size()) port = text.substr(end + 2);
    if (end + 1 == text.size()) return {host, std::nullopt};
  } else if (std::count(text.begin(), text.end(), ':') == 1) {
    host = text.substr(0, text.find(':'));
    port = text.substr(text.find(':') + 1);
  } else {
    return {host, std::nullopt};
  }
  const std::optional<int> number = to_number<int>(port);
  if (host.empty() || !number || *number < 0 || *number > 65535)
    refuse(str(name, ": is '", text, "' (HOST, HOST:PORT or [IPV6]:PORT, with a port up to 65535)"));
  return {host, number};
}

void place_address(ProcessPlace& place, const Variables& variables, const PlaceOverrides& overrides, Source source) {
  std::optional<int> port = overrides.port;
  if (port && (*port < 0 || *port > 65535)) refuse(str("port: is ", *port, " (0 to 65535)"));
  if (overrides.address) {
    const auto [host, given] = split_address(*overrides.address, overrides.section + "address");
    place.address            = host;
    if (port && given && *port != *given)
      refuse(str("port: is ", *port, ", but the address is '", *overrides.address, "' (one port)"));
    if (given) port = given;
  } else if (variables.has("MASTER_ADDR")) {
    place.address = variables.text("MASTER_ADDR");
    if (place.address.empty()) refuse("MASTER_ADDR: is empty (the host of process 0)");
  } else if (source == Source::slurm) {
    place.address = place.local_size == place.size ? "127.0.0.1" : first_host(variables.text("SLURM_STEP_NODELIST"));
  } else if (place.size == 1) {
    place.address = "127.0.0.1";
  } else if (overrides.needs_address) {
    refuse(str("MASTER_ADDR: is not set (the host of process 0, or give ",
               overrides.section.empty() ? "an address" : overrides.section + "address", ")"));
  }
  if (!port) port = variables.number("STEPGRAPH_PORT", 1, 65535);
  if (!port && variables.has("MASTER_PORT")) {
    // The agent's store always listens on MASTER_PORT. Without it, the first process of PyTorch would.
    const bool agent_store = variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
    const bool torchrun    = variables.has("TORCHELASTIC_RUN_ID");
    port                   = *variables.number("MASTER_PORT", 1, agent_store || torchrun ? 65534 : 65535) + agent_store;
    place.next_port_too    = torchrun && !agent_store;
  }
  if (!port && source == Source::slurm) {
    const std::optional<int> job = variables.number("SLURM_JOB_ID", 0, Variables::largest);
    if (!job) refuse("SLURM_JOB_ID: is not set (or set STEPGRAPH_PORT)");
    port = 20000 + *job % 20000;
  }
  if (!port && place.size > 1 && overrides.needs_address)
    refuse(str(
        "MASTER_PORT: is not set (a free port of process 0's host, or ",
        overrides.section.empty() ? "set STEPGRAPH_PORT" : str(overrides.section, "address=", place.address, ":PORT"),
        ")"));
  place.port = port.value_or(0);
}

}  // namespace

Environment process_environment() {
  Environment environment;
  for (char** entry = ::environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::size_t equals    = text.find('=');
    if (equals != text.npos) environment.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return environment;
}

std::optional<RankOfSize> launched_among(const Environment& environment) {
  using Names = std::pair<std::string_view, std::string_view>;
  for (const auto& [rank_name, size_name] :
       {Names{"RANK", "WORLD_SIZE"}, Names{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}}) {
    const auto rank_at = environment.find(rank_name), size_at = environment.find(size_name);
    if (rank_at == environment.end() || size_at == environment.end()) continue;
    const std::optional<int> rank = to_number<int>(rank_at->second), size = to_number<int>(size_at->second);
    if (rank && size && *size > 1) return RankOfSize{*rank, *size};
  }
  return std::nullopt;
}

bool is_loopback_name(std::string_view address) {
  return address == "localhost" || address == "::1" || address.starts_with("127.");
}

std::string first_host(std::string_view node_list) {
  const auto wrong = [&] { refuse(str("node list: is '", node_list, "' (such as node[01-04,7],login)")); };
  std::string host;
  for (std::size_t i = 0; i < node_list.size() && node_list[i] != ',';) {
    if (node_list[i] != '[') {
      host += node_list[i++];
      continue;
    }
    const std::size_t end = node_list.find(']', i);
    if (end == node_list.npos) wrong();
    const std::string_view numbers = node_list.substr(i + 1, end - i - 1);
    const std::string_view first   = numbers.substr(0, numbers.find_first_of("-,"));
    if (!to_number<unsigned long>(first)) wrong();
    host += first;
    i = end + 1;
  }
  if (host.empty() || host.find(']') != host.npos) wrong();
  return host;
}

ProcessPlace find_place(const Environment& environment, const PlaceOverrides& overrides) {
  const Variables variables(environment);
  ProcessPlace place;
  const auto [ranks, source] = find_ranks(variables, overrides);
  place_ranks(place, ranks, overrides);
  place_address(place, variables, overrides, source);
  place.local_is_known = ranks.local_rank || overrides.local_rank || place.size == 1;
  if (is_loopback_name(place.address)) {  // all are on this machine
    place.local_is_known = true;
    if (!ranks.local_rank && !overrides.local_rank) place.local_rank = place.rank;
    if (!ranks.local_size && !overrides.local_size) place.local_size = place.size;
  }
  place.secret = overrides.secret.value_or(variables.text("STEPGRAPH_SECRET"));
  if (source == Source::torchrun && variables.has("TORCHELASTIC_RUN_ID"))
    place.job = str(variables.text("TORCHELASTIC_RUN_ID"), ".", variables.text("TORCHELASTIC_RESTART_COUNT"));
  if (source == Source::slurm) place.job = str(variables.text("SLURM_JOB_ID"), ".", variables.text("SLURM_STEP_ID"));
  // The socket of launch is at launch's address.
  if (place.rank == 0 && !overrides.address)
    place.listen_fd = variables.number("STEPGRAPH_LISTEN_FD", 0, Variables::largest).value_or(-1);
  return place;
}

}  // namespace stepgraph
