#include "ops/cuda/gemm/choice.cuh"

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "ops/cuda/common/workspace_bytes.hpp"
#include "ops/cuda/transfers/hash.hpp"

namespace stepgraph::cuda {
namespace {

struct Algorithm : cublasLtMatmulAlgo_t {};  // a named type: nvcc fails on a vector of the library's unnamed struct

constexpr int most_candidates = 16;
constexpr double short_run    = 3e10;  // flops: about 50 us
constexpr int num_rounds      = 3;
constexpr double most_ms      = 500;  // approximate limit per problem: slow problems try fewer candidates

double flops(const Problem& problem) {
  return 2 * static_cast<double>(problem.m) * static_cast<double>(problem.n) * static_cast<double>(problem.k);
}

cublasStatus_t run(const DeviceQueue& queue, const Problem& problem, Call& call, const Algorithm& algorithm) {
  const std::span<std::byte> workspace = library_workspace(queue, problem.workspace);
  return cublasLtMatmul(static_cast<cublasLtHandle_t>(queue.blas), &call.operation, call.one, call.b, &call.first,
                        call.a, &call.second, call.carried, call.base, &call.out, call.written.data(), &call.out,
                        &algorithm, workspace.data(), workspace.size(), stream_of(queue));
}

// The algorithms that the library proposes, the likely fastest first. Empty: it has none for the problem.
std::vector<Algorithm> ask_library(const DeviceQueue& queue, const Problem& problem, Call& call) {
  cublasLtMatmulPreferenceOpaque_t preference;
  check_blas(cublasLtMatmulPreferenceInit(&preference), "describing a preference");
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check_blas(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)),
               "describing a preference");
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(problem.workspace));
  // Partial sums are combined in the workspace, in the compute type, or there is only one.
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, problem.alignments[1]);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, problem.alignments[0]);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, problem.alignments[2]);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, problem.alignments[3]);
  std::array<cublasLtMatmulHeuristicResult_t, most_candidates> found;
  int num_found               = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      static_cast<cublasLtHandle_t>(queue.blas), &call.operation, &call.first, &call.second, &call.out, &call.out,
      &preference, most_candidates, found.data(), &num_found);
  if (status != CUBLAS_STATUS_NOT_SUPPORTED) check_blas(status, "choosing an algorithm for a product");
  std::vector<Algorithm> usable;
  for (const auto& each : std::span(found).first(static_cast<std::size_t>(num_found))) {
    if (each.state == CUBLAS_STATUS_SUCCESS && each.workspaceSize <= problem.workspace) usable.push_back({each.algo});
  }
  return usable;
}

// --- measuring -------------------------------------------------------------------------------------------------------

// Results of kernels, stored behind the library's part of the workspace.
struct Notes {
  std::int64_t hash = 0, hash_beside = 0;
  std::int32_t numbers_of_a = 0, numbers_of_b = 0;
};
static_assert(sizeof(Notes) <= product_notes_bytes);

constexpr int sample_threads = 256, samples_of_thread = 16, num_samples = sample_threads * samples_of_thread;

// Whether sums of such numbers round: their last bit is set. Small integers have the same sum in any order.
__device__ bool rounds(__nv_bfloat16 x) { return isfinite(widen(x)) && (__bfloat16_as_ushort(x) & 1) != 0; }
__device__ bool rounds(__half x) { return isfinite(widen(x)) && (__half_as_ushort(x) & 1) != 0; }
__device__ bool rounds(float x) { return isfinite(x) && (__float_as_uint(x) & 1) != 0; }
__device__ bool rounds(double x) { return isfinite(x) && (__double_as_longlong(x) & 1) != 0; }

// Counts, in a sample of the elements, those that make sums round.
template <class N>
__global__ void __launch_bounds__(sample_threads)
    count_numbers(const N* elements, std::uint64_t size, std::int32_t* count) {
  std::int32_t mine = 0;
  for (int i = 0; i < samples_of_thread; ++i) {
    std::uint64_t at = static_cast<std::uint64_t>(i * sample_threads + threadIdx.x + 1) * 0x9e3779b97f4a7c15ull;
    at               = (at ^ (at >> 29)) * 0xbf58476d1ce4e5b9ull;
    mine += rounds(elements[(at ^ (at >> 32)) % size]) ? 1 : 0;
  }
  atomicAdd(count, mine);
}

void enqueue_count(const DeviceQueue& queue, int type, const void* elements, std::int64_t size, std::int32_t* count) {
  const auto launch = [&]<class N>(N) {
    count_numbers<<<1, sample_threads, 0, stream_of(queue)>>>(static_cast<const N*>(elements),
                                                              static_cast<std::uint64_t>(size), count);
  };
  switch (type) {
    case CUDA_R_64F:
      launch(double{});
      break;
    case CUDA_R_16BF:
      launch(__nv_bfloat16{});
      break;
    case CUDA_R_16F:
      launch(__half{});
      break;
    default:
      launch(float{});
  }
  check_launch("count_numbers");
}

class Event {
 public:
  Event() { check_cuda(cudaEventCreate(&event_), "making an event"); }
  ~Event() { static_cast<void>(cudaEventDestroy(event_)); }
  Event(const Event&)            = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) { check_cuda(cudaEventRecord(event_, stream), "timing a product"); }
  [[nodiscard]] float ms_since(const Event& begin) const {
    float ms = 0;
    check_cuda(cudaEventSynchronize(event_), "timing a product");
    check_cuda(cudaEventElapsedTime(&ms, begin.event_, event_), "timing a product");
    return ms;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Measures one problem on the actual operands. An in-place output is restored; any other output is left undefined.
class Measurement {
 public:
  Measurement(const DeviceQueue& queue, const Problem& problem, Call& call)
      : queue_(queue), problem_(problem), call_(call) {
    if (queue.workspace.size() < problem.workspace + product_notes_bytes) return;
    const std::span<std::byte> rest = queue.workspace.subspan(problem.workspace);
    notes_                          = reinterpret_cast<Notes*>(rest.data());
    saved_                          = rest.subspan(product_notes_bytes);
  }

  [[nodiscard]] bool has_room() const {
    return notes_ != nullptr && (!problem_.in_place || saved_.size() >= call_.written.size());
  }

  // Whether results on these operands distinguish algorithms with different bits.
  [[nodiscard]] bool tells() {
    check_cuda(cudaMemsetAsync(notes_, 0, sizeof(Notes), stream_of(queue_)), "clearing notes");
    enqueue_count(queue_, problem_.type, call_.a, problem_.m * problem_.k, &notes_->numbers_of_a);
    enqueue_count(queue_, problem_.type, call_.b, problem_.k * problem_.n, &notes_->numbers_of_b);
    const Notes found = read_notes();
    return std::min(found.numbers_of_a, found.numbers_of_b) >= num_samples / 8;  // for random numbers it is half
  }

  // The fastest of the algorithms whose result has the bits of the first one's.
  [[nodiscard]] Algorithm fastest(std::span<const Algorithm> candidates) {
    copy(saved_.data(), call_.written.data());
    std::vector<Timed> alike;
    Notes expected;
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      copy(call_.written.data(), saved_.data());
      if (const cublasStatus_t status = run(queue_, problem_, call_, candidates[i]); status != CUBLAS_STATUS_SUCCESS) {
        if (i == 0) check_blas(status, "a product");
        static_cast<void>(cudaGetLastError());
        continue;
      }
      const Notes found = hashes();
      if (i == 0) {
        expected              = found;
        const double each_ms  = (1 + num_rounds) * ms_of(candidates[0]);
        const auto affordable = static_cast<std::size_t>(std::max(1.0, most_ms / std::max(each_ms, 1e-3)));
        candidates            = candidates.first(std::min(candidates.size(), affordable));
      }
      if (found.hash == expected.hash && found.hash_beside == expected.hash_beside) alike.push_back({candidates[i]});
    }
    // Round-robin, so that no algorithm has the cooler device.
    for (int round = 0; round < num_rounds && alike.size() > 1; ++round) {
      for (Timed& each : alike) each.ms = std::min(each.ms, ms_of(each.algorithm));
    }
    copy(call_.written.data(), saved_.data());
    return std::min_element(alike.begin(), alike.end(), [](const Timed& x, const Timed& y) { return x.ms < y.ms; })
        ->algorithm;
  }

 private:
  struct Timed {
    Algorithm algorithm;
    float ms = std::numeric_limits<float>::infinity();
  };

  // Repeats short runs, whose time would otherwise be that of the host.
  [[nodiscard]] float ms_of(const Algorithm& algorithm) {
    const int repeats = flops(problem_) < short_run ? 8 : 1;
    begin_.record(stream_of(queue_));
    for (int i = 0; i < repeats; ++i) check_blas(run(queue_, problem_, call_, algorithm), "a product");
    end_.record(stream_of(queue_));
    return end_.ms_since(begin_) / static_cast<float>(repeats);
  }

  // Saves and restores an in-place output around the trials.
  void copy(std::byte* to, const std::byte* from) {
    if (!problem_.in_place) return;
    check_cuda(cudaMemcpyAsync(to, from, call_.written.size(), cudaMemcpyDeviceToDevice, stream_of(queue_)),
               "saving the output of a product");
  }

  [[nodiscard]] Notes hashes() {
    hash_bytes(queue_, call_.written, &notes_->hash);
    if (!call_.written_beside.empty()) hash_bytes(queue_, call_.written_beside, &notes_->hash_beside);
    return read_notes();
  }

  [[nodiscard]] Notes read_notes() const {
    Notes notes;
    check_cuda(cudaMemcpyAsync(&notes, notes_, sizeof(notes), cudaMemcpyDeviceToHost, stream_of(queue_)),
               "reading notes of a product");
    check_cuda(cudaStreamSynchronize(stream_of(queue_)), "measuring a product");
    return notes;
  }

  const DeviceQueue& queue_;
  const Problem& problem_;
  Call& call_;
  Notes* notes_               = nullptr;
  std::span<std::byte> saved_ = {};
  Event begin_, end_;
};

// --- choices ---------------------------------------------------------------------------------------------------------

struct Choice {
  std::optional<Algorithm> algorithm = {};  // none: the library has no algorithm for the problem
  int trials_left                    = 0;   // 0: final
};
constexpr int most_trials = 8;  // operands that do not distinguish algorithms use up trials

bool is_captured(const DeviceQueue& queue) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream_of(queue), &status), "asking whether a stream is captured");
  return status != cudaStreamCaptureStatusNone;
}

Choice first_choice(const Problem& problem, const std::vector<Algorithm>& candidates) {
  if (candidates.empty()) return {};
  return {candidates.front(), is_measured(problem.m, problem.n, problem.k) && candidates.size() > 1 ? most_trials : 0};
}

// Shared by all threads. The mutex is not held while measuring: the stream may wait for work that other threads are
// about to enqueue.
std::optional<Algorithm> choose(const DeviceQueue& queue, const Problem& problem, Call& call) {
  static std::mutex mutex;
  static std::map<Problem, Choice> choices;
  {
    const std::lock_guard lock(mutex);
    auto found = choices.find(problem);
    if (found == choices.end())
      found = choices.emplace(problem, first_choice(problem, ask_library(queue, problem, call))).first;
    if (found->second.trials_left == 0 || is_captured(queue)) return found->second.algorithm;
  }
  Measurement measurement(queue, problem, call);
  const bool possible = measurement.has_room();
  std::optional<Algorithm> best;
  if (possible && measurement.tells()) best = measurement.fastest(ask_library(queue, problem, call));
  const std::lock_guard lock(mutex);
  Choice& choice = choices.at(problem);
  if (choice.trials_left == 0) return choice.algorithm;  // another thread has decided
  if (best) choice.algorithm = best;
  choice.trials_left = best || !possible ? 0 : choice.trials_left - 1;
  return choice.algorithm;
}

}  // namespace

std::span<std::byte> library_workspace(const DeviceQueue& queue, std::size_t bytes) {
  if (queue.workspace.size() < bytes)
    throw Error(ErrorKind::backend, str("cuda: a product needs ", bytes, " bytes of workspace, but its stream has ",
                                        queue.workspace.size(), " (NodeSpec::workspace_bytes of its node)"));
  return queue.workspace.first(bytes);
}

bool enqueue_call(const DeviceQueue& queue, const Problem& problem, Call& call) {
  const auto chosen = choose(queue, problem, call);
  if (chosen) check_blas(run(queue, problem, call, *chosen), "a product");
  return chosen.has_value();
}

}  // namespace stepgraph::cuda
