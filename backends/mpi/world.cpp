#include "backends/mpi/world.hpp"

#include <fcntl.h>
#include <mpi.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <utility>

#include "backends/mpi/network.hpp"
#include "backends/process/watchdog.hpp"
#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

void check(int code, const char* doing) {
  if (code != MPI_SUCCESS) throw Error(ErrorKind::backend, str("mpi: ", doing, ": error ", code));
}

// Whether this process may read the memory of another one, as Open MPI does for messages between processes of one
// machine. Containers can forbid it; Open MPI then complains about each message and takes a slow path.
bool may_read_other_memory() {
  static const int theirs = 1;  // static: the child has it from its start
  std::array<int, 2> ready{};
  if (::pipe2(ready.data(), O_CLOEXEC) != 0) return false;
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    char byte = 0;
    static_cast<void>(!::read(ready[0], &byte, 1));  // for ever: the parent kills it
    ::_exit(0);
  }
  bool may = false;
  if (child > 0) {
    int mine = 0;
    const iovec to{&mine, sizeof mine}, from{const_cast<int*>(&theirs), sizeof theirs};
    may = ::process_vm_readv(child, &to, 1, &from, 1, 0) == static_cast<ssize_t>(sizeof mine) && mine == theirs;
  }
  ::close(ready[0]);
  ::close(ready[1]);
  if (child > 0) {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
  return may;
}

std::string variable(const char* name) {
  const char* const text = std::getenv(name);
  return text != nullptr ? text : "";
}

// Without a launcher MPI would make a world of one process.
void check_launcher(const PlaceOverrides& overrides) {
  if (!variable("OMPI_COMM_WORLD_SIZE").empty() || !variable("PMIX_RANK").empty() || !variable("PMI_RANK").empty())
    return;
  const std::string size = overrides.size ? str(*overrides.size) : variable("WORLD_SIZE");
  if (!size.empty() && size != "1")
    throw Error(ErrorKind::config, str("mpi: the world has ", size,
                                       " processes, but this one was not started by MPI (start it with mpirun, or use "
                                       "backend gloo)"));
}

// Returns whether it has started MPI.
bool start_mpi(const PlaceOverrides& overrides) {
  int initialized = 0, finalized = 0, provided = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (finalized != 0)
    throw Error(ErrorKind::config, "mpi: MPI has been ended in this process, and cannot be started again");
  if (initialized != 0) {
    MPI_Query_thread(&provided);
  } else {
    check_launcher(overrides);
    constexpr const char* mechanism = "OMPI_MCA_btl_vader_single_copy_mechanism";
    if (!may_read_other_memory()) ::setenv(mechanism, "none", 0);
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
  }
  if (provided < MPI_THREAD_SERIALIZED)
    throw Error(ErrorKind::backend, "mpi: this MPI does not allow calls from several threads (MPI_THREAD_SERIALIZED)");
  check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "setting the error handler");
  return initialized == 0;
}

// Process 0 tells the others.
std::string told_by_first(const std::string& mine) {
  std::array<char, 512> text{};
  mine.copy(text.data(), text.size() - 1);
  check(MPI_Bcast(text.data(), static_cast<int>(text.size()), MPI_CHAR, 0, MPI_COMM_WORLD), "telling the address");
  return text.data();
}

}  // namespace

struct MpiWorld::Started {
  explicit Started(const PlaceOverrides& overrides) : starts_mpi(start_mpi(overrides)) {
    MPI_Comm local = MPI_COMM_NULL;
    check(MPI_Comm_rank(MPI_COMM_WORLD, &place.rank), "asking for the rank");
    check(MPI_Comm_size(MPI_COMM_WORLD, &place.size), "asking for the size");
    check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, place.rank, MPI_INFO_NULL, &local),
          "asking for the processes of this machine");
    MPI_Comm_rank(local, &place.local_rank);
    MPI_Comm_size(local, &place.local_size);
    MPI_Comm_free(&local);
    if (overrides.rank && *overrides.rank != place.rank)
      throw Error(ErrorKind::config, str(overrides.section, "rank: is ", *overrides.rank, ", but MPI says ", place.rank,
                                         " (leave it out)"));
    if (overrides.size && *overrides.size != place.size)
      throw Error(ErrorKind::config, str(overrides.section, "size: is ", *overrides.size, ", but MPI says ", place.size,
                                         " (leave it out)"));
    meet(overrides);
  }

  // The address of process 0: the loopback address if all are on its machine.
  void meet(const PlaceOverrides& overrides) {
    int all_here = place.local_size == place.size ? 1 : 0;
    check(MPI_Bcast(&all_here, 1, MPI_INT, 0, MPI_COMM_WORLD), "telling where processes are");
    std::string problem;
    Descriptor listener;
    if (place.rank == 0) {
      try {
        PlaceOverrides mine = overrides;
        mine.rank           = 0;
        mine.size           = place.size;
        mine.needs_address  = false;
        Environment environment;
        if (const std::string port = variable("STEPGRAPH_PORT"); !port.empty())
          environment.emplace("STEPGRAPH_PORT", port);
        const ProcessPlace by = find_place(environment, mine);
        std::array<char, 256> host{};
        ::gethostname(host.data(), host.size() - 1);
        place.address = !by.address.empty() && overrides.address ? by.address
                        : all_here != 0                          ? "127.0.0.1"
                                                                 : host.data();
        place.secret  = overrides.secret ? *overrides.secret : variable("STEPGRAPH_SECRET");
        if (place.secret.empty()) place.secret = random_secret();
        listener   = listen_on({.address = place.address, .port = by.port});
        place.port = port_of(listener.get());
      } catch (const Error& error) {
        problem = error.what();
      }
    }
    problem = told_by_first(problem);
    if (!problem.empty()) throw Error(ErrorKind::config, problem);
    place.address = told_by_first(place.address);
    place.secret  = told_by_first(place.secret);
    place.port    = std::atoi(told_by_first(str(place.port)).c_str());
    if (place.rank == 0) place.listen_fd = listener.release();
  }

  ProcessPlace place;
  bool starts_mpi;
};

MpiWorld::MpiWorld(const PlaceOverrides& overrides, const ProcessWorldOptions& options)
    : MpiWorld(Started(overrides), options) {}

MpiWorld::MpiWorld(const Started& started, const ProcessWorldOptions& options)
    : MessageWorld(started.place, options,
                   [](Job& job, Hooks hooks) { return std::make_unique<MpiNetwork>(job, std::move(hooks)); }),
      ends_mpi_(started.starts_mpi) {}

namespace {

class MpiAllReduce final : public LibraryAllReduce {
 public:
  MpiAllReduce() { check(MPI_Comm_dup(MPI_COMM_WORLD, &comm_), "copying the communicator"); }
  ~MpiAllReduce() override {  // after a failure MPI is not called any more
    if (std::uncaught_exceptions() == num_exceptions_) MPI_Comm_free(&comm_);
  }
  MpiAllReduce(const MpiAllReduce&)            = delete;
  MpiAllReduce& operator=(const MpiAllReduce&) = delete;

  void run(std::span<float> values) override {
    check(MPI_Allreduce(MPI_IN_PLACE, values.data(), static_cast<int>(values.size()), MPI_FLOAT, MPI_SUM, comm_),
          "MPI_Allreduce");
  }

 private:
  const int num_exceptions_ = std::uncaught_exceptions();
  MPI_Comm comm_            = MPI_COMM_NULL;
};

}  // namespace

std::unique_ptr<LibraryAllReduce> MpiWorld::library_all_reduce() { return std::make_unique<MpiAllReduce>(); }

MpiWorld::~MpiWorld() {
  if (!end() || !ends_mpi_) return;
  const Watchdog watchdog("MPI_Finalize", timeout());  // the control channel has ended
  MPI_Finalize();
}

}  // namespace stepgraph
