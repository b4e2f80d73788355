#include "backends/cuda/kernels.hpp"

#include <algorithm>
#include <type_traits>

#include "backends/cuda/check.hpp"
#include "engine/base/dispatch.hpp"
#include "engine/base/reduce_element.hpp"

namespace stepgraph::cuda {
namespace {

constexpr int threads_per_block = 256;

unsigned blocks_for(std::int64_t count) {
  return static_cast<unsigned>(std::min<std::int64_t>((count + threads_per_block - 1) / threads_per_block, 1 << 16));
}

__device__ std::int64_t first_index() { return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ std::int64_t index_stride() { return static_cast<std::int64_t>(gridDim.x) * blockDim.x; }

// Element i of each member at its natural address.
template <class Stored>
struct Aligned {
  const void* in[max_members];
  void* out[max_members];
  int num_in, num_out;
  __device__ Stored load(int member, std::int64_t i) const { return static_cast<const Stored*>(in[member])[i]; }
  __device__ void store(int member, std::int64_t i, Stored value) const {
    static_cast<Stored*>(out[member])[i] = value;
  }
};

// Element i of each member at any address.
template <class Stored>
struct Unaligned : Aligned<Stored> {
  __device__ Stored load(int member, std::int64_t i) const {
    return reduce_element::load_bytes<Stored>(static_cast<const std::byte*>(this->in[member]) + i * sizeof(Stored));
  }
  __device__ void store(int member, std::int64_t i, Stored value) const {
    reduce_element::store_bytes(static_cast<std::byte*>(this->out[member]) + i * sizeof(Stored), value);
  }
};

// One element whose bytes lie apart.
template <class Stored>
struct Split {
  SplitElement in[max_members], out[max_members];
  int num_in, num_out;
  __device__ Stored load(int member, std::int64_t) const {
    std::byte bytes[sizeof(Stored)];
    for (std::size_t k = 0; k < sizeof(Stored); ++k) bytes[k] = *in[member][k];
    return reduce_element::load_bytes<Stored>(bytes);
  }
  __device__ void store(int member, std::int64_t, Stored value) const {
    std::byte bytes[sizeof(Stored)];
    reduce_element::store_bytes(bytes, value);
    for (std::size_t k = 0; k < sizeof(Stored); ++k) *out[member][k] = bytes[k];
  }
};

template <class Element, class Op, bool divides, class Lists>
__global__ void reduce_kernel(const __grid_constant__ Lists lists, std::int64_t count) {
  for (std::int64_t i = first_index(); i < count; i += index_stride()) {
    auto total = Element::load(lists.load(0, i));
    for (int k = 1; k < lists.num_in; ++k) total = Op::apply(total, Element::load(lists.load(k, i)));
    if constexpr (divides) total = reduce_element::quotient(total, static_cast<std::int64_t>(lists.num_in));
    const auto result = Element::store(Op::finish(total));
    for (int k = 0; k < lists.num_out; ++k) lists.store(k, i, result);
  }
}

template <template <class> class Lists, class In, class Out>
void launch(void* stream, const In& in, const Out& out, std::int64_t count, DType type, Reduction reduction) {
  dispatch(type, [&]<class T>(T) {
    reduce_element::choose<T>(reduction, [&]<class E, class Op, bool divides>(E, Op, std::bool_constant<divides>) {
      Lists<typename E::Stored> lists{};
      std::copy(in.begin(), in.end(), lists.in);
      std::copy(out.begin(), out.end(), lists.out);
      lists.num_in  = static_cast<int>(in.size());
      lists.num_out = static_cast<int>(out.size());
      reduce_kernel<E, Op, divides>
          <<<blocks_for(count), threads_per_block, 0, static_cast<cudaStream_t>(stream)>>>(lists, count);
    });
  });
  check(cudaGetLastError(), "launching a reduction");
}

template <class Unit>
__global__ void exchange_kernel(const Unit* from_a, Unit* to_a, const Unit* from_b, Unit* to_b, std::int64_t count) {
  for (std::int64_t i = first_index(); i < count; i += index_stride()) {
    const Unit a = from_a[i], b = from_b[i];
    to_a[i] = b;
    to_b[i] = a;
  }
}

}  // namespace

void reduce(void* stream, const PerMember<const std::byte*>& in, const PerMember<std::byte*>& out,
            std::int64_t num_bytes, DType type, Reduction reduction) {
  if (num_bytes == 0) return;
  const std::size_t size   = size_bytes(type);
  const auto aligned       = [size](const std::byte* at) { return reinterpret_cast<std::uintptr_t>(at) % size == 0; };
  const std::int64_t count = num_bytes / static_cast<std::int64_t>(size);
  if (std::all_of(in.begin(), in.end(), aligned) && std::all_of(out.begin(), out.end(), aligned)) {
    launch<Aligned>(stream, in, out, count, type, reduction);
  } else {
    launch<Unaligned>(stream, in, out, count, type, reduction);
  }
}

void reduce(void* stream, const PerMember<SplitElement>& in, const PerMember<SplitElement>& out, DType type,
            Reduction reduction) {
  launch<Split>(stream, in, out, 1, type, reduction);
}

void exchange(void* stream, const std::byte* from_a, std::byte* to_a, const std::byte* from_b, std::byte* to_b,
              std::int64_t num_bytes) {
  if (num_bytes == 0) return;
  const auto bits = reinterpret_cast<std::uintptr_t>(from_a) | reinterpret_cast<std::uintptr_t>(to_a) |
                    reinterpret_cast<std::uintptr_t>(from_b) | reinterpret_cast<std::uintptr_t>(to_b) |
                    static_cast<std::uintptr_t>(num_bytes);
  const auto run = [&]<class Unit>(Unit) {
    const std::int64_t count = num_bytes / static_cast<std::int64_t>(sizeof(Unit));
    exchange_kernel<<<blocks_for(count), threads_per_block, 0, static_cast<cudaStream_t>(stream)>>>(
        reinterpret_cast<const Unit*>(from_a), reinterpret_cast<Unit*>(to_a), reinterpret_cast<const Unit*>(from_b),
        reinterpret_cast<Unit*>(to_b), count);
  };
  if (bits % sizeof(uint4) == 0) {
    run(uint4{});
  } else {
    run(std::uint8_t{});
  }
  check(cudaGetLastError(), "launching an exchange");
}

}  // namespace stepgraph::cuda
