#include "backends/cuda/marks.hpp"

#include <cuda.h>

#include <algorithm>
#include <map>
#include <utility>

#include "backends/cuda/check.hpp"
#include "backends/cuda/driver.hpp"

namespace stepgraph::cuda {
namespace {

constexpr std::size_t nodes_per_stretch = 32;

// The device writes `value` to a word of pinned memory when the stream gets here, also in a captured run.
void write_word(cudaStream_t stream, std::uint32_t* word, std::uint32_t value) {
  static const auto write = driver_function<decltype(&cuStreamWriteValue32)>("cuStreamWriteValue32");
  if (write == nullptr)
    throw Error(ErrorKind::backend, "cuda: the driver has no cuStreamWriteValue32 (a newer driver)");
  const CUresult status = write(stream, reinterpret_cast<CUdeviceptr>(word), value, CU_STREAM_WRITE_VALUE_DEFAULT);
  if (status != CUDA_SUCCESS)
    throw Error(ErrorKind::backend, str("cuda: writing a marker: error ", static_cast<int>(status), " of the driver"));
}

}  // namespace

Marks::Marks(const Graph& graph, const StreamPlan& plan, Heap& heap)
    : stretch_of_(graph.num_nodes(), none), by_stream_(graph.ranks().size() * num_lane_kinds), heap_(heap) {
  cut(graph, plan);
  std::byte* const here = heap_.pin(by_stream_.size() * sizeof(std::uint32_t), "the markers of a program");
  words_                = reinterpret_cast<std::uint32_t*>(here);
  reset();
  void* there = nullptr;
  if (const cudaError_t status = cudaHostGetDevicePointer(&there, here, 0); status != cudaSuccess) {
    heap_.unpin(here);
    check(status, "asking for the address of markers");
  }
  there_ = static_cast<std::uint32_t*>(there);
}

Marks::~Marks() { heap_.unpin(reinterpret_cast<std::byte*>(words_)); }

void Marks::cut(const Graph& graph, const StreamPlan& plan) {
  std::map<std::pair<int, std::int32_t>, std::uint32_t> batch_at;  // by rank and issue position
  const auto batch_of = [&](Node node) {
    const auto next  = static_cast<std::uint32_t>(batches_.size());
    const auto batch = batch_at.try_emplace({index(graph.rank(node)), graph.part(node).issue}, next).first->second;
    if (batch == next) batches_.emplace_back();
    return batch;
  };
  place_.resize(graph.num_nodes());
  std::uint32_t next_place = 0;
  for (const std::uint32_t node : plan.issue_order) {
    const std::uint32_t stream = plan.stream[node];
    if (stream == none) continue;
    const std::uint32_t batch = graph.has_part(Node{node}) ? batch_of(Node{node}) : none;
    const bool waits          = !plan.waits_of(Node{node}).empty() || !plan.loop_waits_of(Node{node}).empty();
    auto& there               = by_stream_[stream];
    Stretch* last             = there.empty() ? nullptr : &stretches_[there.back()];
    const bool joins          = last != nullptr && last->batch == batch &&
                       (batch != none || (!waits && last->nodes.size() < nodes_per_stretch));
    if (!joins) {
      const std::uint64_t before = last == nullptr ? 0 : last->num_before + last->nodes.size();
      const auto number          = static_cast<std::uint32_t>(there.size());
      if (last != nullptr) last->leaves = waits || batch != none || last->batch != none;
      there.push_back(static_cast<std::uint32_t>(stretches_.size()));
      if (batch != none) batches_[batch].push_back(there.back());
      stretches_.push_back(
          {.stream = stream, .number = number, .batch = batch, .nodes = {}, .leaves = true, .num_before = before});
      last = &stretches_.back();
    }
    last->nodes.push_back(node);
    place_[node]      = next_place++;
    stretch_of_[node] = there.back();
  }
}

void Marks::reset() {
  for (std::size_t stream = 0; stream < by_stream_.size(); ++stream)
    std::atomic_ref(words_[stream]).store(0, std::memory_order_relaxed);
  for (Stretch& stretch : stretches_) stretch.num_begun = stretch.num_ended = 0;
}

// Parts of a batch are entered together: when the last of them has come, and with it all their waits.
void Marks::before(std::uint32_t node, cudaStream_t stream) {
  Stretch& stretch = stretches_[stretch_of_[node]];
  ++stretch.num_begun;
  if (stretch.num_begun == (stretch.batch == none ? 1 : stretch.nodes.size()))
    write_word(stream, there_ + stretch.stream, 2 * stretch.number + 1);
}

void Marks::after(std::uint32_t node, cudaStream_t stream) {
  Stretch& stretch = stretches_[stretch_of_[node]];
  if (++stretch.num_ended == stretch.nodes.size() && stretch.leaves)
    write_word(stream, there_ + stretch.stream, 2 * stretch.number + 2);
}

std::uint32_t Marks::word(std::uint32_t stream) const {
  return std::atomic_ref(words_[stream]).load(std::memory_order_relaxed);
}

bool Marks::is_busy(std::uint32_t stream) const { return word(stream) % 2 != 0; }

DeviceProgress Marks::progress() const {
  DeviceProgress progress;
  std::vector<std::uint32_t> words(by_stream_.size());
  for (std::uint32_t stream = 0; stream < words.size(); ++stream) words[stream] = word(stream);
  const auto is_entered = [&](std::uint32_t other) {
    return words[stretches_[other].stream] > 2 * stretches_[other].number;
  };
  for (std::uint32_t stream = 0; stream < words.size(); ++stream) {
    const auto& there = by_stream_[stream];
    if (const std::uint32_t left = words[stream] / 2; left > 0) {
      const Stretch& last = stretches_[there[left - 1]];
      progress.num_done += last.num_before + last.nodes.size();
      const Node node{last.nodes.back()};
      if (!progress.last_done || place_[progress.last_done->id] < place_[node.id]) progress.last_done = node;
    }
    if (words[stream] % 2 == 0) continue;
    const Stretch& at = stretches_[there[words[stream] / 2]];
    if (at.batch == none) {
      progress.computes = true;
    } else if (std::ranges::all_of(batches_[at.batch], is_entered)) {
      for (const std::uint32_t node : at.nodes) progress.parts_entered.push_back(Node{node});
    }
  }
  return progress;
}

}  // namespace stepgraph::cuda
