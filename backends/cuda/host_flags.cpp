#include "backends/cuda/host_flags.hpp"

#include <cuda.h>

#include <atomic>
#include <map>

#include "backends/cuda/check.hpp"
#include "backends/cuda/driver.hpp"

namespace stepgraph::cuda {
namespace {

auto wait_function() {
  static const auto wait = driver_function<decltype(&cuStreamWaitValue32)>("cuStreamWaitValue32");
  return wait;
}

}  // namespace

bool HostFlags::supported(int device) {
  static const auto ask = driver_function<decltype(&cuDeviceGetAttribute)>("cuDeviceGetAttribute");
  int can_map           = 0;
  return wait_function() != nullptr && ask != nullptr &&
         ask(&can_map, CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, device) == CUDA_SUCCESS && can_map != 0;
}

HostFlags::HostFlags(const Graph& graph, const StreamPlan& plan, Heap& heap) : place_(graph.num_nodes()), heap_(heap) {
  std::map<Rank, std::uint32_t> word_of;
  for (const std::uint32_t node : plan.issue_order) {
    const auto lane = graph.lane(Node{node});
    if (graph.kind(Node{node}) != NodeKind::host || !lane || lane->kind != LaneKind::host) continue;
    const auto word =
        word_of.try_emplace(graph.rank(Node{node}), static_cast<std::uint32_t>(word_of.size())).first->second;
    if (word == counts_.size()) counts_.push_back(0);
    place_[node] = {word, ++counts_[word]};
  }
  bases_.resize(counts_.size(), 0);
  if (counts_.empty()) return;
  std::byte* const here = heap_.pin(counts_.size() * sizeof(std::uint32_t), "the flags of host lanes");
  words_                = reinterpret_cast<std::uint32_t*>(here);
  for (std::size_t word = 0; word < counts_.size(); ++word) std::atomic_ref(words_[word]).store(0);
  void* there = nullptr;
  if (const cudaError_t status = cudaHostGetDevicePointer(&there, here, 0); status != cudaSuccess) {
    heap_.unpin(here);
    check(status, "asking for the address of the flags of host lanes");
  }
  there_ = static_cast<std::uint32_t*>(there);
}

HostFlags::~HostFlags() {
  if (words_ != nullptr) heap_.unpin(reinterpret_cast<std::byte*>(words_));
}

void HostFlags::begin() noexcept {
  for (std::size_t word = 0; word < bases_.size(); ++word) bases_[word] = std::atomic_ref(words_[word]).load();
}

// A word never falls: a host node may end after release().
void HostFlags::raise(std::uint32_t word, std::uint32_t to) noexcept {
  std::atomic_ref<std::uint32_t> flag(words_[word]);
  std::uint32_t seen = flag.load(std::memory_order_relaxed);
  while (static_cast<std::int32_t>(to - seen) > 0 && !flag.compare_exchange_weak(seen, to)) {
  }
}

void HostFlags::set_done(std::uint32_t node) noexcept {
  const Place& place = place_[node];
  if (place.word != none) raise(place.word, bases_[place.word] + place.number);
}

void HostFlags::release() noexcept {
  for (std::uint32_t word = 0; word < bases_.size(); ++word) raise(word, bases_[word] + counts_[word]);
}

void HostFlags::wait(cudaStream_t stream, std::uint32_t node) const {
  const Place& place    = place_[node];
  const CUresult status = wait_function()(stream, reinterpret_cast<CUdeviceptr>(there_ + place.word),
                                          bases_[place.word] + place.number, CU_STREAM_WAIT_VALUE_GEQ);
  if (status != CUDA_SUCCESS)
    throw Error(ErrorKind::backend,
                str("cuda: waiting for a host node: error ", static_cast<int>(status), " of the driver"));
}

}  // namespace stepgraph::cuda
