#include "ops/cuda/attention/dnn_attention.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <type_traits>

#include "engine/base/error.hpp"
#include "ops/cuda/attention/dnn_attention_graph.cuh"
#include "ops/cuda/common/workspace_bytes.hpp"

namespace stepgraph::cuda {
namespace {

cudnnHandle_t handle_of(const DeviceQueue& queue) { return static_cast<cudnnHandle_t>(queue.dnn); }

template <class T>
constexpr cudnnDataType_t dnn_type = std::is_same_v<T, bf16> ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF;

// Creating a plan compiles and loads code, which must not become part of a graph being captured.
class OutsideCapture {
 public:
  OutsideCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~OutsideCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideCapture(const OutsideCapture&)            = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// The handle with which the plans for a device are made. A plan refers to its handle, and plans are kept beyond the
// world whose queue asks for them first; so this is not the handle of a queue. With the lock of the plans.
cudnnHandle_t planning_handle(int device) {
  static auto& handles       = *new std::map<int, cudnnHandle_t>;
  const auto [found, is_new] = handles.try_emplace(device, nullptr);
  if (is_new) {
    const cudnnStatus_t status = cudnnCreate(&found->second);
    if (status != CUDNN_STATUS_SUCCESS) handles.erase(found);
    check_dnn(status, "starting cuDNN to make plans");
  }
  return found->second;
}

// The plans of this process; null where cuDNN has none. Neither they nor their handles are ever destroyed: the driver
// may be unloaded first at process exit.
using MakePlan = std::unique_ptr<DnnPlan> (*)(const DnnDevice&, const AttentionShape&, std::int64_t, cudnnDataType_t);
const DnnPlan* kept_plan(MakePlan make, const AttentionShape& shape, std::int64_t sequences, cudnnDataType_t type) {
  using Key =
      std::tuple<MakePlan, int, cudnnDataType_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
  static auto& mutex = *new std::mutex;
  static auto& plans = *new std::map<Key, std::unique_ptr<DnnPlan>>;
  int device         = 0;
  if (cudaGetDevice(&device) != cudaSuccess) throw Error(ErrorKind::backend, "cuda: asking for the current device");
  const Key key{make, device, type, sequences, shape.seq, shape.heads, shape.kv_heads, shape.head_size};
  const std::lock_guard lock(mutex);
  auto found = plans.find(key);
  if (found == plans.end()) {
    const OutsideCapture outside;
    found = plans.emplace(key, make(DnnDevice(planning_handle(device)), shape, sequences, type)).first;
  }
  return found->second.get();
}

// The scalars of a plan.
struct Scalars {
  float scale, nothing, one = 1;
  explicit Scalars(const AttentionShape& shape)
      : scale(static_cast<float>(shape.scale)),
        // Kernels before 9.10 subtract two of these.
        nothing(cudnnGetVersion() < 91000 ? std::numeric_limits<float>::lowest()
                                          : -std::numeric_limits<float>::infinity()) {}
};

template <class T>
void* at(const T* data, std::int64_t offset) {
  return const_cast<std::remove_const_t<T>*>(data) + offset;  // NOLINT: variant packs do not tell them apart
}

}  // namespace

template <class T>
bool dnn_attends(const DeviceQueue& queue, const AttentionShape& shape, std::int64_t sequences, const T* qkv,
                 const T* out, const AttentionDropout& dropout) {
  const auto aligned = [](const T* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; };
  if (queue.dnn == nullptr || dropout.step != nullptr || sequences == 0) return false;
  if (!is_dnn_attention(shape.seq, shape.head_size, sizeof(T)) || !aligned(qkv) || !aligned(out)) return false;
  const DnnPlan* plan = kept_plan(plan_attention_forward, shape, sequences, dnn_type<T>);
  return plan != nullptr && plan->workspace_bytes() <= dnn_forward_workspace(sequences, shape.seq, shape.heads);
}

template <class T>
void dnn_attention_forward(const DeviceQueue& queue, const AttentionForward<T>& attention) {
  const AttentionShape& shape = attention.shape;
  const DnnPlan* plan         = kept_plan(plan_attention_forward, shape, attention.sequences, dnn_type<T>);
  if (plan->workspace_bytes() > static_cast<std::int64_t>(queue.workspace.size())) {
    throw Error(ErrorKind::backend, str("cudnn: attention needs a workspace of ", plan->workspace_bytes(),
                                        " bytes (this lane has ", queue.workspace.size(), ")"));
  }
  Scalars scalars(shape);
  const std::int64_t keys = shape.heads * shape.head_size, values = keys + shape.kv_heads * shape.head_size;
  plan->run(handle_of(queue),
            {{dnn_queries, at(attention.qkv, 0)},
             {dnn_keys, at(attention.qkv, keys)},
             {dnn_values, at(attention.qkv, values)},
             {dnn_out, attention.out},
             {dnn_log_sums, attention.log_sums},
             {dnn_scale, &scalars.scale},
             {dnn_nothing, &scalars.nothing}},
            queue.workspace.data());
}

template <class T>
bool dnn_attention_backward(const DeviceQueue& queue, const AttentionBackward<T>& attention, const Into<T>& d_qkv) {
  const AttentionShape& shape = attention.shape;
  const auto plan_for         = [&](std::int64_t sequences) {
    return kept_plan(plan_attention_backward, shape, sequences, dnn_type<T>);
  };
  const auto aligned = [](const T* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; };
  if (d_qkv.base != nullptr || !aligned(d_qkv.out) || !aligned(attention.d_out)) return false;
  const DnnPlan* one      = plan_for(1);
  const std::int64_t all  = attention.sequences;
  const std::int64_t room = dnn_backward_workspace(all, shape.seq, shape.heads, shape.head_size);
  if (one == nullptr || one->workspace_bytes() > room) return false;
  if (static_cast<std::int64_t>(queue.workspace.size()) < room) {
    throw Error(ErrorKind::backend, str("cudnn: gradients of attention need a workspace of ", room,
                                        " bytes (this lane has ", queue.workspace.size(), ")"));
  }
  // Nearly equal parts of at most as many sequences as the workspace allows.
  const std::int64_t most = std::min(all, room / std::max<std::int64_t>(1, one->workspace_bytes()));
  const auto fit          = [&](std::int64_t in_parts) {
    for (const std::int64_t size : {all / in_parts, (all + in_parts - 1) / in_parts}) {
      const DnnPlan* plan = plan_for(size);
      if (plan == nullptr || plan->workspace_bytes() > room) return false;
    }
    return true;
  };
  std::int64_t parts = (all + most - 1) / most;
  for (int more = 0; more < 2 && parts < all && !fit(parts); ++more) ++parts;  // a plan may need more than its share
  if (!fit(parts)) return false;
  Scalars scalars(shape);
  const std::int64_t keys = shape.heads * shape.head_size, values = keys + shape.kv_heads * shape.head_size;
  for (std::int64_t part = 0; part < parts; ++part) {
    const std::int64_t first = part * all / parts, row = first * shape.seq;
    const std::int64_t qkv = row * shape.qkv_row(), out = row * shape.out_row(), sums = row * shape.heads;
    plan_for((part + 1) * all / parts - first)
        ->run(handle_of(queue),
              {{dnn_queries, at(attention.qkv, qkv)},
               {dnn_keys, at(attention.qkv, qkv + keys)},
               {dnn_values, at(attention.qkv, qkv + values)},
               {dnn_out, at(attention.out, out)},
               {dnn_log_sums, at(attention.log_sums, sums)},
               {dnn_scale, &scalars.scale},
               {dnn_nothing, &scalars.nothing},
               {dnn_one, &scalars.one},
               {dnn_d_out, at(attention.d_out, out)},
               {dnn_products, at(attention.products, sums)},
               {dnn_d_queries, at(d_qkv.out, qkv)},
               {dnn_d_keys, at(d_qkv.out, qkv + keys)},
               {dnn_d_values, at(d_qkv.out, qkv + values)}},
              queue.workspace.data());
  }
  return true;
}

template bool dnn_attends<bf16>(const DeviceQueue&, const AttentionShape&, std::int64_t, const bf16*, const bf16*,
                                const AttentionDropout&);
template bool dnn_attends<f16>(const DeviceQueue&, const AttentionShape&, std::int64_t, const f16*, const f16*,
                               const AttentionDropout&);
template void dnn_attention_forward<bf16>(const DeviceQueue&, const AttentionForward<bf16>&);
template void dnn_attention_forward<f16>(const DeviceQueue&, const AttentionForward<f16>&);
template bool dnn_attention_backward<bf16>(const DeviceQueue&, const AttentionBackward<bf16>&, const Into<bf16>&);
template bool dnn_attention_backward<f16>(const DeviceQueue&, const AttentionBackward<f16>&, const Into<f16>&);

}  // namespace stepgraph::cuda
