#pragma once
#include <cudnn.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

// The part of cuDNN's backend API that attention needs: describes a graph of operations on tensors with four dims, and
// creates a plan for it that can be run any number of times, with different pointers.
namespace stepgraph::cuda {

void check_dnn(cudnnStatus_t status, std::string_view doing);

// Owns a backend descriptor. Set the attributes, then finalize; it does not change afterwards.
class DnnDescriptor {
 public:
  explicit DnnDescriptor(cudnnBackendDescriptorType_t type);
  template <class Value>
  DnnDescriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const Value* values,
                     std::size_t count) {
    set_bytes(name, type, static_cast<std::int64_t>(count), values);
    return *this;
  }
  template <class Value>
  DnnDescriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const Value& value) {
    return set(name, type, &value, 1);
  }
  DnnDescriptor& set(cudnnBackendAttributeName_t name, const DnnDescriptor& other);
  DnnDescriptor& finalize(std::string_view what);  // throws Error(backend) with cuDNN's message
  [[nodiscard]] cudnnStatus_t try_finalize();
  [[nodiscard]] cudnnBackendDescriptor_t get() const { return raw_.get(); }

 private:
  void set_bytes(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, std::int64_t count,
                 const void* values);
  struct Destroy {
    void operator()(void* raw) const { (void)cudnnBackendDestroyDescriptor(raw); }
  };
  std::unique_ptr<void, Destroy> raw_;
};

// The device a plan is for: that of a handle, or an absent one, given by its serialized cuDNN properties.
class DnnDevice {
 public:
  explicit DnnDevice(cudnnHandle_t handle) : handle_(handle) {}
  explicit DnnDevice(std::string_view properties);

 private:
  friend class DnnGraph;
  cudnnHandle_t handle_ = nullptr;
  std::unique_ptr<DnnDescriptor> properties_;
};

// A plan that can be run.
class DnnPlan {
 public:
  [[nodiscard]] std::int64_t workspace_bytes() const { return workspace_bytes_; }
  // Tensors by number. A scalar's pointer is to host memory, which is read before this returns.
  void run(cudnnHandle_t handle, const std::vector<std::pair<std::int64_t, void*>>& tensors, void* workspace) const;

 private:
  friend class DnnGraph;
  explicit DnnPlan(DnnDescriptor plan);
  DnnDescriptor plan_;
  std::int64_t workspace_bytes_ = 0;
};

// Descriptors live as long as the graph. Computation is in f32.
class DnnGraph {
 public:
  using Dims   = std::array<std::int64_t, 4>;
  using Tensor = const DnnDescriptor*;

  // A tensor in memory, with a unique number.
  Tensor tensor(std::int64_t number, cudnnDataType_t type, const Dims& dims, const Dims& strides);
  Tensor scalar(std::int64_t number);  // f32
  // A virtual tensor, not in memory. Packed unless strides are given.
  Tensor inner(const Dims& dims, cudnnDataType_t type = CUDNN_DATA_FLOAT);
  Tensor inner(const Dims& dims, const Dims& strides, cudnnDataType_t type);

  void matmul(Tensor a, Tensor b, Tensor c);
  void reduce(cudnnReduceTensorOp_t how, Tensor x, Tensor y);
  void reshape(Tensor x, Tensor y);
  void pointwise(cudnnPointwiseMode_t mode, Tensor x, Tensor y);
  void pointwise(cudnnPointwiseMode_t mode, Tensor x, Tensor b, Tensor y, cudnnDataType_t in = CUDNN_DATA_FLOAT);
  void select(Tensor where, Tensor x, Tensor otherwise, Tensor y);
  void index(Tensor like, std::int64_t axis, Tensor y);

  // The first plan, in cuDNN's order of preference, that gives the same bits in every run. Null if there is none.
  [[nodiscard]] std::unique_ptr<DnnPlan> plan(const DnnDevice& device) const;

 private:
  Tensor add_tensor(std::int64_t number, cudnnDataType_t type, const Dims& dims, const Dims& strides, bool is_virtual,
                    bool by_value);
  void operation(cudnnBackendDescriptorType_t type, std::string_view name,
                 std::initializer_list<std::pair<cudnnBackendAttributeName_t, const DnnDescriptor*>> parts);
  DnnDescriptor& pointwise_kind(cudnnPointwiseMode_t mode, cudnnDataType_t in, std::int64_t axis = -1);

  std::vector<std::unique_ptr<DnnDescriptor>> tensors_, kinds_, operations_;
  std::int64_t next_inner_ = 1000;
};

}  // namespace stepgraph::cuda
