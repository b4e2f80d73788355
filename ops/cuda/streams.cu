#include "ops/cuda/streams.hpp"

#include <concepts>
#include <limits>
#include <type_traits>

#include "engine/base/dispatch.hpp"
#include "ops/cuda/common/map.cuh"
#include "ops/cuda/common/view.cuh"

namespace stepgraph::cuda {
namespace {

// --- copies ----------------------------------------------------------------------------------------------------------

template <class Unit>
struct CopyUnits {
  View<Unit> to;
  View<const Unit> from;
  template <int n>
  using Loaded = Unit;
  template <int n>
  __device__ Unit load(std::int64_t i) const {
    return *from.at(i);
  }
  template <int n>
  __device__ void finish(std::int64_t i, const Unit& unit) const {
    *to.at(i) = unit;
  }
};

template <class Unit, class Byte>
auto in_units(const View<Byte>& bytes) {
  constexpr auto size = static_cast<std::int64_t>(sizeof(Unit));
  using Element       = std::conditional_t<std::is_const_v<Byte>, const Unit, Unit>;
  return View<Element>{reinterpret_cast<Element*>(bytes.data), bytes.length / size, bytes.stride / size,
                       bytes.begin / size};
}

// Calls `call` with the largest unit whose size divides `all`.
template <class Call>
void with_unit(std::uint64_t all, const Call& call) {
  if (all % 16 == 0) return call(uint4{});
  if (all % 8 == 0) return call(std::uint64_t{});
  if (all % 4 == 0) return call(std::uint32_t{});
  if (all % 2 == 0) return call(std::uint16_t{});
  call(std::uint8_t{});
}

template <class Byte>
std::uint64_t bits_of(const View<Byte>& view) {
  return reinterpret_cast<std::uintptr_t>(view.data) | static_cast<std::uint64_t>(view.length | view.stride) |
         static_cast<std::uint64_t>(view.begin);
}

// The common row length if a 2D copy can do it, else 0.
std::int64_t row_of_both(const View<std::byte>& to, const View<const std::byte>& from, std::int64_t size) {
  const std::int64_t row      = to.length == 0 ? from.length : to.length;
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();  // the driver's limit for strides
  if (row == 0 || (from.length != 0 && from.length != row)) return 0;
  if (size % row != 0 || to.begin % row != 0 || from.begin % row != 0) return 0;
  return to.stride > most || from.stride > most || row > most ? 0 : row;
}

// --- arithmetic ------------------------------------------------------------------------------------------------------

// Integers are used as they are.
template <class N>
__device__ auto computed(N x) {
  if constexpr (std::is_integral_v<N>) {
    return x;
  } else {
    return widen(x);
  }
}
template <class N, class W>
__device__ N stored(W x) {
  if constexpr (std::is_integral_v<N>) {
    return static_cast<N>(x);
  } else {
    return narrow_to<N>(x);
  }
}

struct Add {
  template <class W>
  __device__ static W apply(W a, W b) {
    return static_cast<W>(a + b);
  }
};
struct Multiply {
  template <class W>
  __device__ static W apply(W a, W b) {
    return static_cast<W>(a * b);
  }
};
struct Min {
  template <class W>
  __device__ static W apply(W a, W b) {
    return (a < b) | (a != a) ? a : b;
  }
};
struct Max {
  template <class W>
  __device__ static W apply(W a, W b) {
    return (a > b) | (a != a) ? a : b;
  }
};

template <class N, class Op>
struct Reduce {
  View<N> into;
  View<const N> from;
  template <int n>
  struct Loaded {
    Pack<N, n> a, b;
  };
  template <int n>
  __device__ Loaded<n> load(std::int64_t i) const {
    return {load_pack<n>(into.at(i)), load_pack<n>(from.at(i))};
  }
  template <int n>
  __device__ void finish(std::int64_t i, const Loaded<n>& in) const {
    Pack<N, n> to;
#pragma unroll
    for (int k = 0; k < n; ++k) to.at[k] = stored<N>(Op::apply(computed(in.a.at[k]), computed(in.b.at[k])));
    store_pack<n>(into.at(i), to);
  }
};

template <class N>
struct Divide {
  View<N> values;
  std::int64_t count;
  template <int n>
  using Loaded = Pack<N, n>;
  template <int n>
  __device__ Loaded<n> load(std::int64_t i) const {
    return load_pack<n>(values.at(i));
  }
  template <int n>
  __device__ void finish(std::int64_t i, const Loaded<n>& in) const {
    Pack<N, n> to;
#pragma unroll
    for (int k = 0; k < n; ++k) {
      if constexpr (std::is_integral_v<N>) {
        to.at[k] = static_cast<N>(static_cast<std::int64_t>(in.at[k]) / count);
      } else {
        const auto sum = widen(in.at[k]);
        to.at[k]       = narrow_to<N>(sum / static_cast<decltype(sum + sum)>(count));
      }
    }
    store_pack<n>(values.at(i), to);
  }
};

template <class To, class From>
struct ConvertElements {
  View<To> to;
  View<const From> from;
  template <int n>
  using Loaded = Pack<From, n>;
  template <int n>
  __device__ Loaded<n> load(std::int64_t i) const {
    return load_pack<n>(from.at(i));
  }
  template <int n>
  __device__ void finish(std::int64_t i, const Loaded<n>& in) const {
    Pack<To, n> out;
#pragma unroll
    for (int k = 0; k < n; ++k) out.at[k] = narrow_to<To>(widen(in.at[k]));
    store_pack<n>(to.at(i), out);
  }
};

// A stretch as elements of N.
template <class N>
View<N> elements(const Stretch& stretch, std::int64_t size_bytes) {
  constexpr auto size         = static_cast<std::int64_t>(sizeof(N));
  const View<std::byte> bytes = view(stretch.rows, stretch.begin, size_bytes);
  if (bits_of(bytes) % sizeof(N) != 0) {
    throw Error(ErrorKind::backend, str("cuda: elements of ", size, " bytes are not at multiples of ", size, " bytes"));
  }
  return {reinterpret_cast<N*>(bytes.data), bytes.length / size, bytes.stride / size, bytes.begin / size};
}
template <class N>
View<const N> read_only(const View<N>& of) {
  return {of.data, of.length, of.stride, of.begin};
}

template <class N, class Op>
void reduce_elements(const DeviceQueue& queue, const Stretch& into, const Stretch& from, std::int64_t size_bytes) {
  constexpr int n  = elements_per_vector<N>;
  const View<N> to = elements<N>(into, size_bytes);
  const auto of    = read_only(elements<N>(from, size_bytes));
  map<n>(queue, "reduce_into", Reduce<N, Op>{to, of}, size_bytes / static_cast<std::int64_t>(sizeof(N)),
         to.fits(n) && of.fits(n));
}

// Sums and products of integers are unsigned: they wrap around.
template <class N>
struct BitsOf {
  using type = N;
};
template <std::integral N>
struct BitsOf<N> {
  using type = std::make_unsigned_t<N>;
};

template <class N>
void reduce_type(const DeviceQueue& queue, const Stretch& into, const Stretch& from, std::int64_t size_bytes,
                 Reduction reduction) {
  using Bits = typename BitsOf<N>::type;
  switch (reduction) {
    case Reduction::sum:
    case Reduction::average:  // divided afterwards
      return reduce_elements<Bits, Add>(queue, into, from, size_bytes);
    case Reduction::product:
      return reduce_elements<Bits, Multiply>(queue, into, from, size_bytes);
    case Reduction::min:
      return reduce_elements<N, Min>(queue, into, from, size_bytes);
    case Reduction::max:
      return reduce_elements<N, Max>(queue, into, from, size_bytes);
  }
}

template <class N>
void divide_type(const DeviceQueue& queue, const Stretch& values, std::int64_t size_bytes, std::int64_t count) {
  constexpr int n    = elements_per_vector<N>;
  const View<N> list = elements<N>(values, size_bytes);
  map<n>(queue, "divide", Divide<N>{list, count}, size_bytes / static_cast<std::int64_t>(sizeof(N)), list.fits(n));
}

__global__ void scaled_sum_kernel(const double* values, std::int64_t count, double factor, double* to) {
  double sum = 0;
#pragma unroll 8
  for (std::int64_t i = 0; i < count; ++i) sum += values[i];
  *to = sum * factor;
}

}  // namespace

void clear(const DeviceQueue& queue, std::span<std::byte> bytes) {
  if (bytes.empty()) return;
  check_cuda(cudaMemsetAsync(bytes.data(), 0, bytes.size(), stream_of(queue)), "cudaMemsetAsync");
}

void copy(const DeviceQueue& queue, const Stretch& to, const Stretch& from, std::int64_t size_bytes) {
  if (size_bytes == 0) return;
  const View<std::byte> out      = view(to.rows, to.begin, size_bytes);
  const View<const std::byte> in = read_only(view(from.rows, from.begin, size_bytes));
  const auto bytes               = static_cast<std::size_t>(size_bytes);
  if (out.length == 0 && in.length == 0) {
    check_cuda(cudaMemcpyAsync(out.data, in.data, bytes, cudaMemcpyDefault, stream_of(queue)), "cudaMemcpyAsync");
    return;
  }
  if (const std::int64_t row = row_of_both(out, in, size_bytes); row > 0) {
    const auto first = [row](const auto& view) {
      return view.data + (view.length == 0 ? 0 : view.begin / row * view.stride);
    };
    const auto pitch = [row](const auto& view) {
      return static_cast<std::size_t>(view.length == 0 ? row : view.stride);
    };
    check_cuda(cudaMemcpy2DAsync(first(out), pitch(out), first(in), pitch(in), static_cast<std::size_t>(row),
                                 static_cast<std::size_t>(size_bytes / row), cudaMemcpyDefault, stream_of(queue)),
               "cudaMemcpy2DAsync");
    return;
  }
  with_unit(bits_of(out) | bits_of(in) | bytes, [&]<class Unit>(Unit) {
    map<1>(queue, "copy", CopyUnits<Unit>{in_units<Unit>(out), in_units<Unit>(in)},
           size_bytes / static_cast<std::int64_t>(sizeof(Unit)), false);
  });
}

void reduce_into(const DeviceQueue& queue, const Stretch& into, const Stretch& from, std::int64_t size_bytes,
                 DType type, Reduction reduction) {
  if (size_bytes == 0) return;
  dispatch(type, [&]<class T>(T) { reduce_type<Native<T>>(queue, into, from, size_bytes, reduction); });
}

void divide(const DeviceQueue& queue, const Stretch& values, std::int64_t size_bytes, DType type, std::int64_t count) {
  if (size_bytes == 0) return;
  dispatch(type, [&]<class T>(T) { divide_type<Native<T>>(queue, values, size_bytes, count); });
}

template <class To, class From>
void convert(const DeviceQueue& queue, const Rows<To>& to, const Rows<const From>& from, std::int64_t size) {
  if (size == 0) return;
  constexpr int n = std::max(elements_per_vector<To>, elements_per_vector<From>);
  const auto out  = view(Rows<Native<To>>{native(to.data), to.length, to.stride, to.count}, 0, size);
  const auto in   = view(Rows<const Native<From>>{native(from.data), from.length, from.stride, from.count}, 0, size);
  map<n>(queue, "convert", ConvertElements<Native<To>, Native<From>>{out, in}, size, out.fits(n) && in.fits(n));
}
template void convert(const DeviceQueue&, const Rows<bf16>&, const Rows<const float>&, std::int64_t);
template void convert(const DeviceQueue&, const Rows<f16>&, const Rows<const float>&, std::int64_t);
template void convert(const DeviceQueue&, const Rows<float>&, const Rows<const bf16>&, std::int64_t);
template void convert(const DeviceQueue&, const Rows<float>&, const Rows<const f16>&, std::int64_t);

void scaled_sum(const DeviceQueue& queue, std::span<const double> values, double factor, double* to) {
  scaled_sum_kernel<<<1, 1, 0, stream_of(queue)>>>(values.data(), static_cast<std::int64_t>(values.size()), factor, to);
  check_launch("scaled_sum");
}

}  // namespace stepgraph::cuda
