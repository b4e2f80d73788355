#include "backends/nccl/nccl_library.hpp"

#include <nccl.h>

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "backends/cuda/check.hpp"
#include "backends/cuda/kernels.hpp"
#include "backends/cuda/queues.hpp"
#include "engine/base/error.hpp"

namespace stepgraph::nccl {
namespace {

constexpr int oldest_version   = NCCL_VERSION(2, 27, 1);    // the first whose configs have names
constexpr auto time_of_aborts  = std::chrono::seconds(30);  // kernels end within milliseconds, threads within a second
constexpr auto time_of_leaving = std::chrono::seconds(2);   // of a process that ends after a failure
constexpr auto nap             = std::chrono::microseconds(50);
constexpr auto spin_time       = std::chrono::microseconds(500);  // of a wait, before it naps

static_assert(NCCL_VERSION_CODE >= oldest_version, "NCCL 2.27.1 or newer is needed");
static_assert(sizeof(ncclUniqueId) == sizeof(Library::Id));
static_assert(max_fold_members == static_cast<int>(cuda::max_members));

ncclDataType_t type_of(DType type) {
  switch (type) {
    case DType::u8:
      return ncclUint8;
    case DType::i32:
      return ncclInt32;
    case DType::i64:
      return ncclInt64;
    case DType::f16:
      return ncclFloat16;
    case DType::bf16:
      return ncclBfloat16;
    case DType::f32:
      return ncclFloat32;
    case DType::f64:
      return ncclFloat64;
  }
  throw Error(ErrorKind::backend, str("nccl: no type ", type));
}

ncclRedOp_t reduction_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
      return ncclSum;
    case Reduction::average:
      return ncclAvg;
    case Reduction::min:
      return ncclMin;
    case Reduction::max:
      return ncclMax;
    case Reduction::product:
      return ncclProd;
  }
  throw Error(ErrorKind::backend, str("nccl: no reduction ", to_string(reduction)));
}

std::string_view name_of(Call::Kind kind) {
  switch (kind) {
    case Call::Kind::copy:
      return "copy";
    case Call::Kind::fold:
      return "fold";
    case Call::Kind::send:
      return "ncclSend";
    case Call::Kind::recv:
      return "ncclRecv";
    case Call::Kind::all_reduce:
      return "ncclAllReduce";
    case Call::Kind::reduce:
      return "ncclReduce";
    case Call::Kind::reduce_scatter:
      return "ncclReduceScatter";
    case Call::Kind::all_gather:
      return "ncclAllGather";
    case Call::Kind::broadcast:
      return "ncclBroadcast";
  }
  return "?";
}

bool is_good(ncclResult_t result) { return result == ncclSuccess || result == ncclInProgress; }

// Sets a variable that NCCL reads once, at its first call, unless the user has set it.
void set_default(const char* name, const char* value) { static_cast<void>(::setenv(name, value, 0)); }

// What threads that abort communicators have in common with the library, which may end before them.
struct Aborts {
  std::mutex mutex;
  std::condition_variable changed;
  int under_way = 0;

  [[nodiscard]] bool wait_for_all(std::chrono::milliseconds time) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, time, [this] { return under_way == 0; });
  }
};

class NcclLibrary final : public Library {
 public:
  explicit NcclLibrary(int device) : device_(device) {}
  ~NcclLibrary() override {
    abort();
    static_cast<void>(aborts_->wait_for_all(time_of_leaving));
  }

  [[nodiscard]] Id make_id() override {
    ncclUniqueId made;
    const ncclResult_t result = ncclGetUniqueId(&made);
    if (result != ncclSuccess) throw Error(ErrorKind::backend, str("nccl: making an id: ", ncclGetErrorString(result)));
    Id id;
    std::memcpy(id.data(), &made, sizeof made);
    return id;
  }

  void make(std::span<const New> communicators, const Patience& patience) override {
    const cuda::OnDevice here(device_);
    for (const New& each : communicators) make(each, patience);
  }

  void group(std::span<const Grouped> calls) override {
    {
      const std::lock_guard lock(mutex_);
      check_usable();
      start(ncclGroupStart(), "ncclGroupStart");
      ncclResult_t first = ncclSuccess;
      const Grouped* bad = nullptr;
      for (const Grouped& each : calls) {
        const ncclResult_t result = enqueue(each);
        if (is_good(result) || bad != nullptr) continue;
        first = result;
        bad   = &each;
      }
      const ncclResult_t end = ncclGroupEnd();
      if (bad != nullptr) refuse(first, *bad);
      if (!is_good(end)) refuse(end, calls.front());
    }
    // The kernels are launched by a thread of NCCL: what follows on these streams must come after that.
    for (const Grouped& each : calls) wait_until_launched(each);
  }

  void local(const Call& call, const DeviceQueue& queue) override {
    call.kind == Call::Kind::fold ? fold(call, queue) : copy(call, queue);
  }

  [[nodiscard]] std::optional<std::string> failure() override {
    const std::lock_guard lock(mutex_);
    if (aborted_) return std::nullopt;
    for (const auto& [number, each] : communicators_) {
      const ncclResult_t state = state_of(each);
      if (!is_good(state)) return describe(state, each);
    }
    return std::nullopt;
  }

  void abort() noexcept override {
    const std::lock_guard lock(mutex_);
    if (aborted_) return;
    aborted_ = true;
    for (auto& [number, each] : communicators_) end_apart(std::move(each), &ncclCommAbort);
    communicators_.clear();
  }

  void reset() override {
    abort();
    wait_for_ends();
    const std::lock_guard lock(mutex_);
    aborted_ = false;
  }

  // Finalizing waits for the peers' calls, so that none of them finds a closed connection. Each is finalized and then
  // destroyed, on threads of their own.
  void close() override {
    {
      const std::lock_guard lock(mutex_);
      check_usable();
      for (auto& [number, each] : communicators_) end_apart(std::move(each), &finish);
      communicators_.clear();
    }
    wait_for_ends();
  }

 private:
  struct Communicator {
    ncclComm_t handle                       = nullptr;
    std::shared_ptr<const std::string> name = {};  // NCCL keeps its address
    int rank = 0, size = 0;
  };

  void make(const New& what, const Patience& patience) {
    Communicator* made = nullptr;
    {
      const std::lock_guard lock(mutex_);
      check_usable();
      const auto [at, is_new] = communicators_.try_emplace(what.number);
      if (!is_new) throw Error(ErrorKind::backend, str("nccl: communicator ", what.number, " is made twice"));
      made                = &at->second;
      *made               = {nullptr, std::make_shared<const std::string>(what.name), what.rank, what.size};
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking     = 0;
      config.commName     = made->name->c_str();
      ncclUniqueId id;
      std::memcpy(&id, what.id.data(), sizeof id);
      const ncclResult_t result = ncclCommInitRankConfig(&made->handle, what.size, id, what.rank, &config);
      if (!is_good(result) || made->handle == nullptr) {
        const std::string why = describe(result, *made);
        communicators_.erase(at);
        throw Error(ErrorKind::backend, why);
      }
    }
    wait(*made, [&] {
      const auto fail = [&](const std::string& why) {
        throw Error(ErrorKind::backend, str("nccl: the communicator of group '", what.name, "' is not ready: ", why));
      };
      if (patience.interrupt != nullptr && patience.interrupt->raised()) fail(patience.interrupt->why());
      if (Clock::now() >= patience.deadline) fail("a member has not come in time");
    });
  }

  // Until the calls of a communicator are done, as far as the host is concerned. `check` may throw.
  template <class Check>
  void wait(const Communicator& communicator, const Check& check) {
    const Deadline spin_until = Clock::now() + spin_time;
    while (true) {
      {
        const std::lock_guard lock(mutex_);  // held for the call only: abort() needs it
        check_usable();
        const ncclResult_t state = state_of(communicator);
        if (state == ncclSuccess) return;
        if (state != ncclInProgress) throw Error(ErrorKind::backend, describe(state, communicator));
      }
      check();
      Clock::now() < spin_until ? std::this_thread::yield() : std::this_thread::sleep_for(nap);
    }
  }

  void wait_until_launched(const Grouped& grouped) {
    const Communicator* communicator = nullptr;
    {
      const std::lock_guard lock(mutex_);
      check_usable();
      communicator = &communicators_.at(grouped.communicator);
    }
    wait(*communicator, [] {});
  }

  // With mutex_.
  void check_usable() const {
    if (aborted_) throw Error(ErrorKind::backend, "nccl: the communicators were aborted");
  }

  [[nodiscard]] static ncclResult_t state_of(const Communicator& communicator) {
    ncclResult_t state        = ncclSuccess;
    const ncclResult_t result = ncclCommGetAsyncError(communicator.handle, &state);
    return result == ncclSuccess ? state : result;
  }

  [[nodiscard]] static std::string describe(ncclResult_t result, const Communicator& communicator) {
    const char* const detail = ncclGetLastError(communicator.handle);
    const bool has_detail    = detail != nullptr && *detail != '\0';
    return str("nccl: group '", *communicator.name, "' (member ", communicator.rank, " of ", communicator.size,
               "): ", ncclGetErrorString(result), has_detail ? str(": ", detail) : "");
  }

  static void start(ncclResult_t result, std::string_view what) {
    if (!is_good(result)) throw Error(ErrorKind::backend, str("nccl: ", what, ": ", ncclGetErrorString(result)));
  }

  [[noreturn]] void refuse(ncclResult_t result, const Grouped& at) const {
    const auto found = communicators_.find(at.communicator);
    const std::string why =
        found == communicators_.end() ? str("nccl: ", ncclGetErrorString(result)) : describe(result, found->second);
    throw Error(ErrorKind::backend, str(why, " [", name_of(at.call->kind), " of ", at.call->bytes, " bytes]"));
  }

  // With mutex_.
  [[nodiscard]] ncclResult_t enqueue(const Grouped& grouped) {
    const Call& call = *grouped.call;
    const auto found = communicators_.find(grouped.communicator);
    if (found == communicators_.end()) return ncclInvalidArgument;
    const ncclComm_t comm   = found->second.handle;
    const auto stream       = static_cast<cudaStream_t>(grouped.queue->stream);
    const auto type         = type_of(call.type);
    const std::size_t count = static_cast<std::size_t>(call.bytes) / size_bytes(call.type);
    switch (call.kind) {
      case Call::Kind::send:
        return ncclSend(call.from, count, type, call.peer, comm, stream);
      case Call::Kind::recv:
        return ncclRecv(call.to, count, type, call.peer, comm, stream);
      case Call::Kind::all_reduce:
        return ncclAllReduce(call.from, call.to, count, type, reduction_of(call.reduction), comm, stream);
      case Call::Kind::reduce:
        return ncclReduce(call.from, call.to, count, type, reduction_of(call.reduction), call.peer, comm, stream);
      case Call::Kind::reduce_scatter:
        return ncclReduceScatter(call.from, call.to, count, type, reduction_of(call.reduction), comm, stream);
      case Call::Kind::all_gather:
        return ncclAllGather(call.from, call.to, count, type, comm, stream);
      case Call::Kind::broadcast:
        return ncclBroadcast(call.from, call.to, count, type, call.peer, comm, stream);
      case Call::Kind::copy:
      case Call::Kind::fold:
        break;
    }
    return ncclInvalidArgument;
  }

  static void copy(const Call& call, const DeviceQueue& queue) {
    const auto stream = static_cast<cudaStream_t>(queue.stream);
    const auto bytes  = static_cast<std::size_t>(call.bytes);
    const cudaError_t status =
        call.rows == 1 ? cudaMemcpyAsync(call.to, call.from, bytes, cudaMemcpyDeviceToDevice, stream)
                       : cudaMemcpy2DAsync(call.to, static_cast<std::size_t>(call.to_stride), call.from,
                                           static_cast<std::size_t>(call.from_stride), bytes,
                                           static_cast<std::size_t>(call.rows), cudaMemcpyDeviceToDevice, stream);
    check(status, [&] { return str("copying ", call.rows, " rows of ", call.bytes, " bytes"); });
  }

  static void fold(const Call& call, const DeviceQueue& queue) {
    cuda::PerMember<const std::byte*> in(static_cast<std::size_t>(call.num_members));
    for (int place = 0; place < call.num_members; ++place) in[static_cast<std::size_t>(place)] = call.fold_input(place);
    cuda::PerMember<std::byte*> out(1);
    out[0] = call.to;
    cuda::reduce(queue.stream, in, out, call.bytes, call.type, call.reduction);
  }

  void wait_for_ends() {
    if (aborts_->wait_for_all(time_of_aborts)) return;
    throw Error(ErrorKind::backend, str("nccl: communicators are not freed after ",
                                        std::chrono::seconds(time_of_aborts).count(), " s (start a new process)"));
  }

  // Non-blocking, as the communicator: asks until it is done.
  static ncclResult_t finish(ncclComm_t handle) {
    const Deadline end  = Clock::now() + time_of_aborts;
    ncclResult_t result = ncclCommFinalize(handle);
    while (result == ncclInProgress && Clock::now() < end) {
      std::this_thread::sleep_for(nap);
      if (ncclCommGetAsyncError(handle, &result) != ncclSuccess) break;
    }
    return result == ncclSuccess ? ncclCommDestroy(handle) : ncclCommAbort(handle);
  }

  // Ends a communicator on a thread of its own: that waits for its kernels, and for captured graphs that hold it. With
  // mutex_.
  void end_apart(Communicator what, ncclResult_t (*end)(ncclComm_t)) noexcept {
    if (what.handle == nullptr) return;
    // NCCL may use the name until the end, so the thread keeps it.
    const auto run = [aborts = aborts_, kept = std::make_shared<Communicator>(std::move(what)), end, device = device_] {
      static_cast<void>(cudaSetDevice(device));
      static_cast<void>(end(kept->handle));
      const std::lock_guard lock(aborts->mutex);
      --aborts->under_way;
      aborts->changed.notify_all();
    };
    {
      const std::lock_guard lock(aborts_->mutex);
      ++aborts_->under_way;
    }
    try {
      std::thread(run).detach();
    } catch (const std::exception&) {  // no thread can be made: its memory is lost, and the peers notice the time-out
      const std::lock_guard lock(aborts_->mutex);
      --aborts_->under_way;
    }
  }

  const int device_;
  const std::shared_ptr<Aborts> aborts_ = std::make_shared<Aborts>();
  std::mutex mutex_;  // held during each call of NCCL, and never during a wait
  bool aborted_ = false;
  std::map<std::uint32_t, Communicator> communicators_;  // by number
};

}  // namespace

std::optional<Algorithm> algorithm_of(std::string_view name) noexcept {
  if (name == "direct") return Algorithm::any;
  if (name == "ring") return Algorithm::ring;
  if (name == "tree") return Algorithm::tree;
  return std::nullopt;
}

std::string nccl_version() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "unknown";
  return str(version / 10000, ".", version % 10000 / 100, ".", version % 100);
}

void set_variables(Algorithm algorithm) {
  static std::optional<Algorithm> chosen;  // by the first world of this process
  const char* const given = std::getenv("NCCL_ALGO");
  if (chosen.value_or(algorithm) != algorithm)
    throw Error(ErrorKind::config, str("comm.algorithm: another world of this process has chosen ",
                                       given != nullptr ? given : "direct", " (the same in all of them)"));
  if (!chosen && algorithm != Algorithm::any) {
    const char* const wanted = algorithm == Algorithm::ring ? "allreduce:ring" : "allreduce:tree";
    if (given != nullptr && std::string_view(given) != wanted)
      throw Error(ErrorKind::config, str("comm.algorithm: the variable NCCL_ALGO is '", given,
                                         "', but the config asks for '", wanted, "' (unset it, or use direct)"));
    set_default("NCCL_ALGO", wanted);
  }
  chosen = algorithm;
  // Memory of a captured graph would be registered during the capture, which may change the algorithm.
  set_default("NCCL_GRAPH_REGISTER", "0");
}

std::unique_ptr<Library> make_nccl_library(int device) {
  int version = 0;
  static_cast<void>(ncclGetVersion(&version));
  if (version < oldest_version)
    throw Error(ErrorKind::backend,
                str("nccl: the library that is loaded is ", nccl_version(), ", this program was built with ",
                    NCCL_MAJOR, ".", NCCL_MINOR, ".", NCCL_PATCH, " (2.27.1 or newer)"));
  return std::make_unique<NcclLibrary>(device);
}

}  // namespace stepgraph::nccl
