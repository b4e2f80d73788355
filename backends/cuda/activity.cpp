#include "backends/cuda/activity.hpp"

#include "engine/base/error.hpp"

#if __has_include(<cupti.h>)
#include <cupti.h>
#endif

#if defined(CUPTI_API_VERSION) && CUPTI_API_VERSION >= 130000  // the record types below are those of this version
#include <dlfcn.h>

#include <cstdlib>
#include <mutex>
#include <type_traits>
#include <utility>

namespace stepgraph {
namespace {

// CUPTI is loaded at run time, so that the program also runs without it.
class Library {
 public:
  static const Library& get() {
    static const Library library;
    return library;
  }

  decltype(&cuptiActivityRegisterCallbacks) register_callbacks;
  decltype(&cuptiActivityEnable) enable;
  decltype(&cuptiActivityDisable) disable;
  decltype(&cuptiActivityFlushAll) flush_all;
  decltype(&cuptiActivityGetNextRecord) next_record;
  decltype(&cuptiActivityGetNumDroppedRecords) num_dropped;
  decltype(&cuptiGetResultString) result_string;

  void check(CUptiResult status, const char* doing) const {
    if (status == CUPTI_SUCCESS) return;
    const char* why = nullptr;
    result_string(status, &why);
    throw Error(ErrorKind::backend, str("cupti: ", doing, ": ",
                                        why != nullptr ? std::string(why) : str("error ", static_cast<int>(status))));
  }

 private:
  Library() {
    const std::string name = str("libcupti.so.", CUPTI_API_VERSION / 10000);
    void* handle           = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
#ifdef STEPGRAPH_CUPTI
    if (handle == nullptr) handle = dlopen(STEPGRAPH_CUPTI, RTLD_NOW | RTLD_LOCAL);
#endif
    if (handle == nullptr) {
      throw Error(ErrorKind::backend, str("cupti: ", name,
                                          " was not found (it comes with the CUDA Toolkit; "
                                          "LD_LIBRARY_PATH may name its folder)"));
    }
    const auto load = [&](auto& function, const char* symbol) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, symbol));
      if (function == nullptr) throw Error(ErrorKind::backend, str("cupti: ", name, " has no ", symbol));
    };
    load(register_callbacks, "cuptiActivityRegisterCallbacks");
    load(enable, "cuptiActivityEnable");
    load(disable, "cuptiActivityDisable");
    load(flush_all, "cuptiActivityFlushAll");
    load(next_record, "cuptiActivityGetNextRecord");
    load(num_dropped, "cuptiActivityGetNumDroppedRecords");
    load(result_string, "cuptiGetResultString");
  }
};

// CUPTI's callbacks take no user data, so the records are global. Callbacks may come as late as process exit, so the
// records are never destroyed.
struct Records {
  std::mutex mutex;
  std::vector<CudaInterval> intervals;
  std::size_t num_lost = 0;
  bool taken           = false;
};
Records& records() {
  static auto* const all = new Records;
  return *all;
}

constexpr CUpti_ActivityKind kinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                                        CUPTI_ACTIVITY_KIND_MEMCPY2, CUPTI_ACTIVITY_KIND_MEMSET};

template <class Record>
CudaInterval interval(const CUpti_Activity* record) {
  const auto* of = reinterpret_cast<const Record*>(record);
  return {static_cast<std::int64_t>(of->start), static_cast<std::int64_t>(of->end)};
}

// Returns false for other kinds of records and for records without times.
bool read(const CUpti_Activity* record, CudaInterval& out) {
  switch (record->kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:
      out = interval<CUpti_ActivityKernel10>(record);
      break;
    case CUPTI_ACTIVITY_KIND_MEMCPY:
      out = interval<CUpti_ActivityMemcpy6>(record);
      break;
    case CUPTI_ACTIVITY_KIND_MEMCPY2:
      out = interval<CUpti_ActivityMemcpyPtoP4>(record);
      break;
    case CUPTI_ACTIVITY_KIND_MEMSET:
      out = interval<CUpti_ActivityMemset4>(record);
      break;
    default:
      return false;
  }
  return out.end_ns > out.begin_ns;
}

void CUPTIAPI request_buffer(std::uint8_t** buffer, std::size_t* size, std::size_t* max_records) {
  constexpr std::size_t buffer_bytes = std::size_t{8} << 20;
  *buffer                            = static_cast<std::uint8_t*>(std::aligned_alloc(64, buffer_bytes));
  *size                              = *buffer != nullptr ? buffer_bytes : 0;
  *max_records                       = 0;  // as many as fit
}

void CUPTIAPI complete_buffer(CUcontext, std::uint32_t, std::uint8_t* buffer, std::size_t, std::size_t valid_bytes) {
  const Library& cupti = Library::get();
  {
    const std::lock_guard lock(records().mutex);
    CUpti_Activity* record = nullptr;
    CudaInterval found;
    while (valid_bytes > 0 && cupti.next_record(buffer, valid_bytes, &record) == CUPTI_SUCCESS) {
      if (read(record, found)) records().intervals.push_back(found);
    }
    std::size_t lost = 0;
    if (cupti.num_dropped(nullptr, 0, &lost) == CUPTI_SUCCESS) records().num_lost += lost;
  }
  std::free(buffer);
}

void stop() noexcept {
  for (const CUpti_ActivityKind kind : kinds) static_cast<void>(Library::get().disable(kind));
  static_cast<void>(Library::get().flush_all(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED));
  const std::lock_guard lock(records().mutex);
  records().intervals.clear();
  records().num_lost = 0;
  records().taken    = false;
}

}  // namespace

CudaActivity::CudaActivity() {
  const Library& cupti = Library::get();
  {
    const std::lock_guard lock(records().mutex);
    if (records().taken) throw Error(ErrorKind::backend, "cupti: is in use by another CudaActivity (one at a time)");
    records().taken = true;
  }
  try {
    cupti.check(cupti.register_callbacks(request_buffer, complete_buffer), "registering callbacks");
    for (const CUpti_ActivityKind kind : kinds) cupti.check(cupti.enable(kind), "beginning to record");
  } catch (...) {
    stop();
    throw;
  }
}

CudaActivity::~CudaActivity() { stop(); }

std::vector<CudaInterval> CudaActivity::take() {
  const Library& cupti = Library::get();
  cupti.check(cupti.flush_all(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "flushing activity records");
  const std::lock_guard lock(records().mutex);
  if (const std::size_t lost = std::exchange(records().num_lost, 0); lost > 0)
    throw Error(ErrorKind::backend, str("cupti: ", lost, " records were lost (fewer steps between two calls of take)"));
  return std::exchange(records().intervals, {});
}

}  // namespace stepgraph

#else

namespace stepgraph {

CudaActivity::CudaActivity() {
  throw Error(ErrorKind::backend, "cupti: not in this build (the CUDA Toolkit had no headers of CUPTI 13)");
}
CudaActivity::~CudaActivity() = default;
std::vector<CudaInterval> CudaActivity::take() { return {}; }

}  // namespace stepgraph

#endif
