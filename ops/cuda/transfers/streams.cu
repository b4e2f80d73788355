#include "ops/cuda/transfers/streams.hpp"

#include <limits>
#include <type_traits>

#include "engine/base/dispatch.hpp"
#include "engine/base/reduce_element.hpp"
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

// Elements in memory, several at a time.
template <class Stored>
struct InVectors {
  View<Stored> view;
  template <int n>
  using Values = Pack<Stored, n>;
  template <int n>
  __device__ Values<n> load(std::int64_t i) const {
    return load_pack<n>(view.at(i));
  }
  template <int n>
  __device__ void store(std::int64_t i, const Values<n>& values) const {
    store_pack<n>(view.at(i), values);
  }
};
// Elements at any addresses. No row ends inside an element.
template <class Stored>
struct InBytes {
  View<std::byte> view;
  template <int n>
  struct Values {
    Stored at[n];
  };
  template <int n>
  __device__ Values<n> load(std::int64_t i) const {
    Values<n> values;
    for (int k = 0; k < n; ++k) values.at[k] = reduce_element::load_bytes<Stored>(view.at((i + k) * sizeof(Stored)));
    return values;
  }
  template <int n>
  __device__ void store(std::int64_t i, const Values<n>& values) const {
    for (int k = 0; k < n; ++k) reduce_element::store_bytes(view.at((i + k) * sizeof(Stored)), values.at[k]);
  }
};

template <class Element, class Op, class Memory>
struct Reduce {
  Memory into, from;
  template <int n>
  struct Loaded {
    typename Memory::template Values<n> a, b;
  };
  template <int n>
  __device__ Loaded<n> load(std::int64_t i) const {
    return {into.template load<n>(i), from.template load<n>(i)};
  }
  template <int n>
  __device__ void finish(std::int64_t i, const Loaded<n>& in) const {
    typename Memory::template Values<n> to;
#pragma unroll
    for (int k = 0; k < n; ++k)
      to.at[k] = Element::store(Op::finish(Op::apply(Element::load(in.a.at[k]), Element::load(in.b.at[k]))));
    into.template store<n>(i, to);
  }
};

template <class Element, class Memory>
struct Divide {
  Memory values;
  std::int64_t count;
  template <int n>
  using Loaded = typename Memory::template Values<n>;
  template <int n>
  __device__ Loaded<n> load(std::int64_t i) const {
    return values.template load<n>(i);
  }
  template <int n>
  __device__ void finish(std::int64_t i, const Loaded<n>& in) const {
    Loaded<n> to;
#pragma unroll
    for (int k = 0; k < n; ++k) to.at[k] = Element::store(reduce_element::quotient(Element::load(in.at[k]), count));
    values.template store<n>(i, to);
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

template <class N>
View<const N> read_only(const View<N>& of) {
  return {of.data, of.length, of.stride, of.begin};
}

template <class N>
View<N> elements(const View<std::byte>& bytes) {
  constexpr auto size = static_cast<std::int64_t>(sizeof(N));
  return {reinterpret_cast<N*>(bytes.data), bytes.length / size, bytes.stride / size, bytes.begin / size};
}

template <class Element, class Op>
void reduce_elements(const DeviceQueue& queue, const View<std::byte>& into, const View<std::byte>& from,
                     std::int64_t size_bytes) {
  using Stored             = typename Element::Stored;
  constexpr int n          = elements_per_vector<Stored>;
  const std::int64_t count = size_bytes / static_cast<std::int64_t>(sizeof(Stored));
  if ((bits_of(into) | bits_of(from)) % sizeof(Stored) != 0) {
    using Memory = InBytes<Stored>;
    return map<1>(queue, "reduce_into", Reduce<Element, Op, Memory>{{into}, {from}}, count, false);
  }
  using Memory          = InVectors<Stored>;
  const View<Stored> to = elements<Stored>(into), of = elements<Stored>(from);
  map<n>(queue, "reduce_into", Reduce<Element, Op, Memory>{{to}, {of}}, count, to.fits(n) && of.fits(n));
}

template <class Element>
void divide_elements(const DeviceQueue& queue, const View<std::byte>& values, std::int64_t size_bytes,
                     std::int64_t by) {
  using Stored             = typename Element::Stored;
  constexpr int n          = elements_per_vector<Stored>;
  const std::int64_t count = size_bytes / static_cast<std::int64_t>(sizeof(Stored));
  if (bits_of(values) % sizeof(Stored) != 0) {
    return map<1>(queue, "divide", Divide<Element, InBytes<Stored>>{{values}, by}, count, false);
  }
  const View<Stored> list = elements<Stored>(values);
  map<n>(queue, "divide", Divide<Element, InVectors<Stored>>{{list}, by}, count, list.fits(n));
}

__global__ void scaled_sum_kernel(const double* values, std::int64_t count, const SumScale scale, double* to) {
  double factor = scale.factor;
  if (scale.all > 0) {
    const std::int64_t counted = scale.all - *scale.ignored;
    factor                     = counted > 0 ? factor / static_cast<double>(counted) : 0;
  }
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
  const View<std::byte> to = view(into.rows, into.begin, size_bytes), of = view(from.rows, from.begin, size_bytes);
  const Reduction step = reduction == Reduction::average ? Reduction::sum : reduction;  // divided afterwards
  dispatch(type, [&]<class T>(T) {
    reduce_element::choose<T>(step, [&]<class Element, class Op>(Element, Op, auto) {
      reduce_elements<Element, Op>(queue, to, of, size_bytes);
    });
  });
}

void divide(const DeviceQueue& queue, const Stretch& values, std::int64_t size_bytes, DType type, std::int64_t count) {
  if (size_bytes == 0) return;
  const View<std::byte> bytes = view(values.rows, values.begin, size_bytes);
  dispatch(type, [&]<class T>(T) {
    divide_elements<typename reduce_element::Elements<T>::Exact>(queue, bytes, size_bytes, count);
  });
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

void scaled_sum(const DeviceQueue& queue, std::span<const double> values, const SumScale& scale, double* to) {
  scaled_sum_kernel<<<1, 1, 0, stream_of(queue)>>>(values.data(), static_cast<std::int64_t>(values.size()), scale, to);
  check_launch("scaled_sum");
}

}  // namespace stepgraph::cuda
