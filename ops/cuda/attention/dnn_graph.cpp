#include "ops/cuda/attention/dnn_graph.cuh"

#include <string>

#include "engine/base/error.hpp"

namespace stepgraph::cuda {

void check_dnn(cudnnStatus_t status, std::string_view doing) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  std::string more(1024, '\0');
  cudnnGetLastErrorString(more.data(), more.size());
  more.resize(more.find('\0'));
  throw Error(ErrorKind::backend,
              str("cudnn: ", doing, ": ", cudnnGetErrorString(status), more.empty() ? "" : "; ", more));
}

DnnDescriptor::DnnDescriptor(cudnnBackendDescriptorType_t type) {
  cudnnBackendDescriptor_t raw = nullptr;
  check_dnn(cudnnBackendCreateDescriptor(type, &raw), "making a descriptor");
  raw_.reset(raw);
}

void DnnDescriptor::set_bytes(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, std::int64_t count,
                              const void* values) {
  check_dnn(cudnnBackendSetAttribute(raw_.get(), name, type, count, values), "setting an attribute");
}

DnnDescriptor& DnnDescriptor::set(cudnnBackendAttributeName_t name, const DnnDescriptor& other) {
  const cudnnBackendDescriptor_t raw = other.get();
  return set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, raw);
}

DnnDescriptor& DnnDescriptor::finalize(std::string_view what) {
  check_dnn(cudnnBackendFinalize(raw_.get()), what);
  return *this;
}

cudnnStatus_t DnnDescriptor::try_finalize() { return cudnnBackendFinalize(raw_.get()); }

DnnDevice::DnnDevice(std::string_view properties)
    : properties_(std::make_unique<DnnDescriptor>(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR)) {
  properties_->set(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, properties.data(), properties.size())
      .finalize("device properties");
}

DnnPlan::DnnPlan(DnnDescriptor plan) : plan_(std::move(plan)) {
  std::int64_t count = 0;
  check_dnn(cudnnBackendGetAttribute(plan_.get(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &count,
                                     &workspace_bytes_),
            "asking for the workspace of a plan");
}

void DnnPlan::run(cudnnHandle_t handle, const std::vector<std::pair<std::int64_t, void*>>& tensors,
                  void* workspace) const {
  std::vector<std::int64_t> numbers;
  std::vector<void*> pointers;
  for (const auto& [number, pointer] : tensors) {
    numbers.push_back(number);
    pointers.push_back(pointer);
  }
  DnnDescriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, numbers.data(), numbers.size())
      .set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, pointers.data(), pointers.size())
      .set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, workspace)
      .finalize("tensors of a plan");
  check_dnn(cudnnBackendExecute(handle, plan_.get(), pack.get()), "running a plan");
}

DnnGraph::Tensor DnnGraph::add_tensor(std::int64_t number, cudnnDataType_t type, const Dims& dims, const Dims& strides,
                                      bool is_virtual, bool by_value) {
  auto made                    = std::make_unique<DnnDescriptor>(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  const std::int64_t alignment = 16;
  made->set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, number)
      .set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type)
      .set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, dims.data(), dims.size())
      .set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, strides.data(), strides.size())
      .set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, alignment)
      .set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, is_virtual)
      .set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, by_value)
      .finalize("a tensor");
  tensors_.push_back(std::move(made));
  return tensors_.back().get();
}
DnnGraph::Tensor DnnGraph::tensor(std::int64_t number, cudnnDataType_t type, const Dims& dims, const Dims& strides) {
  return add_tensor(number, type, dims, strides, false, false);
}
DnnGraph::Tensor DnnGraph::scalar(std::int64_t number) {
  return add_tensor(number, CUDNN_DATA_FLOAT, {1, 1, 1, 1}, {1, 1, 1, 1}, false, true);
}
DnnGraph::Tensor DnnGraph::inner(const Dims& dims, const Dims& strides, cudnnDataType_t type) {
  return add_tensor(next_inner_++, type, dims, strides, true, false);
}
DnnGraph::Tensor DnnGraph::inner(const Dims& dims, cudnnDataType_t type) {
  return inner(dims, {dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1}, type);
}

void DnnGraph::operation(cudnnBackendDescriptorType_t type, std::string_view name,
                         std::initializer_list<std::pair<cudnnBackendAttributeName_t, const DnnDescriptor*>> parts) {
  auto made = std::make_unique<DnnDescriptor>(type);
  for (const auto& [attribute, part] : parts) made->set(attribute, *part);
  made->finalize(name);
  operations_.push_back(std::move(made));
}

void DnnGraph::matmul(Tensor a, Tensor b, Tensor c) {
  const cudnnDataType_t in = CUDNN_DATA_FLOAT;
  kinds_.push_back(std::make_unique<DnnDescriptor>(CUDNN_BACKEND_MATMUL_DESCRIPTOR));
  kinds_.back()->set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, in).finalize("a kind of product");
  operation(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, "a product",
            {{CUDNN_ATTR_OPERATION_MATMUL_ADESC, a},
             {CUDNN_ATTR_OPERATION_MATMUL_BDESC, b},
             {CUDNN_ATTR_OPERATION_MATMUL_CDESC, c},
             {CUDNN_ATTR_OPERATION_MATMUL_DESC, kinds_.back().get()}});
}

void DnnGraph::reduce(cudnnReduceTensorOp_t how, Tensor x, Tensor y) {
  const cudnnDataType_t in = CUDNN_DATA_FLOAT;
  kinds_.push_back(std::make_unique<DnnDescriptor>(CUDNN_BACKEND_REDUCTION_DESCRIPTOR));
  kinds_.back()
      ->set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, how)
      .set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, in)
      .finalize("a kind of reduction");
  operation(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, "a reduction",
            {{CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x},
             {CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y},
             {CUDNN_ATTR_OPERATION_REDUCTION_DESC, kinds_.back().get()}});
}

void DnnGraph::reshape(Tensor x, Tensor y) {
  operation(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, "a reshape",
            {{CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x}, {CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y}});
}

DnnDescriptor& DnnGraph::pointwise_kind(cudnnPointwiseMode_t mode, cudnnDataType_t in, std::int64_t axis) {
  kinds_.push_back(std::make_unique<DnnDescriptor>(CUDNN_BACKEND_POINTWISE_DESCRIPTOR));
  DnnDescriptor& kind = *kinds_.back();
  kind.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, mode)
      .set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, in);
  if (axis >= 0) kind.set(CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, axis);
  return kind.finalize("a kind of pointwise operation");
}
void DnnGraph::pointwise(cudnnPointwiseMode_t mode, Tensor x, Tensor y) {
  operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, "a pointwise operation",
            {{CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, &pointwise_kind(mode, CUDNN_DATA_FLOAT)},
             {CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x},
             {CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y}});
}
void DnnGraph::pointwise(cudnnPointwiseMode_t mode, Tensor x, Tensor b, Tensor y, cudnnDataType_t in) {
  operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, "a pointwise operation",
            {{CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, &pointwise_kind(mode, in)},
             {CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x},
             {CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b},
             {CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y}});
}
void DnnGraph::select(Tensor where, Tensor x, Tensor otherwise, Tensor y) {
  operation(
      CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, "a selection",
      {{CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, &pointwise_kind(CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT)},
       {CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x},
       {CUDNN_ATTR_OPERATION_POINTWISE_BDESC, otherwise},
       {CUDNN_ATTR_OPERATION_POINTWISE_TDESC, where},
       {CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y}});
}
void DnnGraph::index(Tensor like, std::int64_t axis, Tensor y) {
  operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, "an index",
            {{CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR,
              &pointwise_kind(CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_INT32, axis)},
             {CUDNN_ATTR_OPERATION_POINTWISE_XDESC, like},
             {CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y}});
}

namespace {

// Whether an engine configuration gives the same bits in every run.
bool is_deterministic(const DnnDescriptor& config) {
  DnnDescriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  cudnnBackendDescriptor_t raw = engine.get();
  std::int64_t count           = 0;
  check_dnn(cudnnBackendGetAttribute(config.get(), CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                                     &count, &raw),
            "asking for an engine");
  std::array<cudnnBackendNumericalNote_t, CUDNN_NUMERICAL_NOTE_TYPE_COUNT> notes = {};
  check_dnn(cudnnBackendGetAttribute(engine.get(), CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                                     static_cast<std::int64_t>(notes.size()), &count, notes.data()),
            "asking for an engine's notes");
  for (std::int64_t i = 0; i < count; ++i) {
    if (notes[static_cast<std::size_t>(i)] == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) return false;
  }
  return true;
}

}  // namespace

std::unique_ptr<DnnPlan> DnnGraph::plan(const DnnDevice& device) const {
  std::vector<cudnnBackendDescriptor_t> operations;
  for (const auto& each : operations_) operations.push_back(each->get());
  DnnDescriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, operations.data(), operations.size());
  if (device.handle_ != nullptr) graph.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, device.handle_);
  if (graph.try_finalize() != CUDNN_STATUS_SUCCESS) return nullptr;

  const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
  DnnDescriptor proposals(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  proposals.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph)
      .set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, mode);
  if (device.properties_) proposals.set(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, *device.properties_);
  if (proposals.try_finalize() != CUDNN_STATUS_SUCCESS) return nullptr;
  std::int64_t count = 0;
  check_dnn(cudnnBackendGetAttribute(proposals.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 0,
                                     &count, nullptr),
            "asking for engines");
  std::vector<DnnDescriptor> configs;
  std::vector<cudnnBackendDescriptor_t> raw;
  for (std::int64_t i = 0; i < count; ++i)
    raw.push_back(configs.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR).get());
  if (count > 0) {
    check_dnn(cudnnBackendGetAttribute(proposals.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                       count, &count, raw.data()),
              "asking for engines");
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const DnnDescriptor& config = configs[static_cast<std::size_t>(i)];
    if (!is_deterministic(config)) continue;
    DnnDescriptor plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
    if (device.handle_ != nullptr) plan.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, device.handle_);
    if (device.properties_) plan.set(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, *device.properties_);
    if (plan.try_finalize() == CUDNN_STATUS_SUCCESS) return std::unique_ptr<DnnPlan>(new DnnPlan(std::move(plan)));
  }
  return nullptr;
}

}  // namespace stepgraph::cuda
