#include "ops/cuda/layers/residual.hpp"

#include "ops/cuda/common/drop.cuh"
#include "ops/cuda/common/map.cuh"

namespace stepgraph::cuda {
namespace {

template <class N, class D>
struct Residual {
  const N *x, *branch, *bias;
  N* y;
  std::int64_t width;
  D drop;
  template <int n>
  struct Loaded {
    Pack<N, n> x, branch, bias;
  };
  template <int n>
  __device__ Loaded<n> load(std::int64_t i) const {
    return {load_pack<n>(x + i), load_pack<n>(branch + i),
            bias == nullptr ? Pack<N, n>{} : load_pack<n>(bias + split(i, width).rest)};
  }
  template <int n>
  __device__ void finish(std::int64_t i, const Loaded<n>& in) const {
    Computed<N> added[n];
#pragma unroll
    for (int k = 0; k < n; ++k) {
      added[k] = widen(in.branch.at[k]);
      if (bias != nullptr) added[k] += widen(in.bias.at[k]);
    }
    drop_values<n>(drop, i, added);
    Pack<N, n> to;
#pragma unroll
    for (int k = 0; k < n; ++k) to.at[k] = narrow_to<N>(widen(in.x.at[k]) + added[k]);
    store_pack<n>(y + i, to);
  }
};

template <class N, class D>
struct PutDropped {
  const N* from;
  Sum<N> into;
  D drop;
  template <int n>
  struct Loaded {
    Pack<N, n> from, was;
  };
  template <int n>
  __device__ Loaded<n> load(std::int64_t i) const {
    return {load_pack<n>(from + i), into.template before<n>(i)};
  }
  template <int n>
  __device__ void finish(std::int64_t i, const Loaded<n>& in) const {
    Computed<N> values[n];
#pragma unroll
    for (int k = 0; k < n; ++k) values[k] = widen(in.from.at[k]);
    drop_values<n>(drop, i, values);
    into.template put<n>(i, in.was, values);
  }
};

template <class T, class D>
void put_values(const DeviceQueue& queue, const char* name, const D& drop, const T* from, const Into<T>& into) {
  constexpr int n = elements_per_vector<T>;
  map<n>(queue, name, PutDropped<Native<T>, D>{native(from), sum_of(into), drop}, into.size,
         vectors_fit(from, into.out, into.base));
}

}  // namespace

template <class T>
void residual_forward(const DeviceQueue& queue, const ResidualRows<T>& rows) {
  constexpr int n = elements_per_vector<T>;
  const bool vectors =
      vectors_fit(rows.x, rows.branch, rows.bias, rows.y) && (rows.bias == nullptr || rows.width % n == 0);
  with_drop(rows.drop, [&]<class D>(const D& drop) {
    map<n>(queue, "residual",
           Residual<Native<T>, D>{native(rows.x), native(rows.branch), native(rows.bias), native(rows.y), rows.width,
                                  drop},
           rows.rows * rows.width, vectors);
  });
}

template <class T>
void put_dropped(const DeviceQueue& queue, const Drop& drop, const T* from, const Into<T>& into) {
  put_values(queue, "dropout", drop, from, into);
}

template <class T>
void put(const DeviceQueue& queue, const T* from, const Into<T>& into) {
  put_values(queue, "add", NoDrop{}, from, into);
}

#define STEPGRAPH_RESIDUAL(T)                                                           \
  template void residual_forward(const DeviceQueue&, const ResidualRows<T>&);           \
  template void put_dropped(const DeviceQueue&, const Drop&, const T*, const Into<T>&); \
  template void put(const DeviceQueue&, const T*, const Into<T>&)
STEPGRAPH_RESIDUAL(float);
STEPGRAPH_RESIDUAL(double);
STEPGRAPH_RESIDUAL(bf16);
STEPGRAPH_RESIDUAL(f16);
#undef STEPGRAPH_RESIDUAL

}  // namespace stepgraph::cuda
