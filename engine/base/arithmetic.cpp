#include "engine/base/arithmetic.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "engine/base/dispatch.hpp"
#include "engine/base/error.hpp"
#include "engine/base/reduce_element.hpp"
#include "engine/base/watched.hpp"

namespace stepgraph {
namespace {

using namespace reduce_element;

constexpr std::size_t block = 1024;  // elements: intermediate values stay in the L1 cache

// The loops. Elements can be at any address.
template <class Element, class Op, bool divides = false>
struct Kernel {
  using Stored = typename Element::Stored;
  using Wide   = typename Element::Wide;
  struct [[gnu::packed, gnu::may_alias]] Loose {
    Stored value;
  };

  static const Loose* at(const std::byte* bytes, std::size_t i) { return reinterpret_cast<const Loose*>(bytes) + i; }
  static Loose* at(std::byte* bytes, std::size_t i) { return reinterpret_cast<Loose*>(bytes) + i; }
  static Wide load(const Loose& from) { return Element::load(from.value); }
  static Stored finish(Wide value, std::int64_t count) {
    return Element::store(Op::finish(divides ? quotient(value, count) : value));
  }

  // All inputs in one pass, for the most common numbers of inputs: intermediate values stay in registers.
  template <std::size_t num_in, std::size_t num_out>
  static void fused(const std::byte* const* in, std::byte* const* out, std::size_t count) {
    std::array<const Loose*, num_in> from;
    std::array<Loose*, num_out> to;
    for (std::size_t k = 0; k < num_in; ++k) from[k] = at(in[k], 0);
    for (std::size_t k = 0; k < num_out; ++k) to[k] = at(out[k], 0);
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) {
      Wide total = load(from[0][i]);
#pragma GCC unroll 4
      for (std::size_t k = 1; k < num_in; ++k) total = Op::apply(total, load(from[k][i]));
      const Stored result = finish(total, num_in);
#pragma GCC unroll 4
      for (std::size_t k = 0; k < num_out; ++k) to[k][i].value = result;
    }
  }

  // total = total op in[0] op ... , or without a total yet.
  template <std::size_t num_in, bool first>
  static void pass(Wide* total, const std::byte* const* in, std::size_t begin, std::size_t count) {
    std::array<const Loose*, num_in> from;
    for (std::size_t k = 0; k < num_in; ++k) from[k] = at(in[k], begin);
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) {
      Wide sum = first ? load(from[0][i]) : Op::apply(total[i], load(from[0][i]));
#pragma GCC unroll 4
      for (std::size_t k = 1; k < num_in; ++k) sum = Op::apply(sum, load(from[k][i]));
      total[i] = sum;
    }
  }
  template <bool first>
  static std::size_t pass(Wide* total, std::span<const std::byte* const> in, std::size_t begin, std::size_t count) {
    if (in.size() >= 4) return pass<4, first>(total, in.data(), begin, count), 4;
    if (in.size() >= 2) return pass<2, first>(total, in.data(), begin, count), 2;
    return pass<1, first>(total, in.data(), begin, count), 1;
  }

  static void blocked(std::span<const std::byte* const> in, std::span<std::byte* const> out, std::size_t count) {
    std::array<Wide, block> total;
    for (std::size_t begin = 0; begin < count; begin += block) {
      const std::size_t size = std::min(block, count - begin);
      std::size_t done       = pass<true>(total.data(), in, begin, size);
      while (done < in.size()) done += pass<false>(total.data(), in.subspan(done), begin, size);
      Loose* const result = at(out[0], begin);
#pragma GCC ivdep
      for (std::size_t i = 0; i < size; ++i) result[i].value = finish(total[i], static_cast<std::int64_t>(in.size()));
      for (std::size_t k = 1; k < out.size(); ++k) std::memcpy(at(out[k], begin), result, size * sizeof(Stored));
    }
  }

  static void reduce(std::span<const std::byte* const> in, std::span<std::byte* const> out, std::size_t num_bytes) {
    const std::size_t count = num_bytes / sizeof(Stored);
    if (in.size() == 2 && out.size() == 2) return fused<2, 2>(in.data(), out.data(), count);
    if (in.size() == 2 && out.size() == 1) return fused<2, 1>(in.data(), out.data(), count);
    if (in.size() == 4 && out.size() == 4) return fused<4, 4>(in.data(), out.data(), count);
    if (in.size() == 4 && out.size() == 1) return fused<4, 1>(in.data(), out.data(), count);
    blocked(in, out, count);
  }

  static void divide(std::byte* values, std::size_t num_bytes, std::int64_t by) {
    const std::size_t count = num_bytes / sizeof(Stored);
    Loose* const list       = at(values, 0);
    for (std::size_t i = 0; i < count; ++i) list[i].value = Element::store(quotient(load(list[i]), by));
  }
};

void check_whole(std::size_t num_bytes, DType type) {
  if (num_bytes % size_bytes(type) == 0) return;
  throw Error(ErrorKind::config, str("arithmetic: ", num_bytes, " bytes are not whole elements of ", type, " (",
                                     size_bytes(type), " bytes each)"));
}

}  // namespace

void reduce(std::span<const std::byte* const> in, std::span<std::byte* const> out, std::size_t num_bytes, DType type,
            Reduction reduction) {
  check_whole(num_bytes, type);
  if (in.empty() || out.empty() || num_bytes == 0) return;
  for (const std::byte* from : in) watch_read(from, num_bytes);
  for (std::byte* to : out) watch_write(to, num_bytes);
  dispatch(type, [&]<class T>(T) {
    choose<T>(reduction, [&]<class Element, class Op, bool divides>(Element, Op, std::bool_constant<divides>) {
      Kernel<Element, Op, divides>::reduce(in, out, num_bytes);
    });
  });
}

void reduce_into(std::span<std::byte> into, std::span<const std::byte> from, DType type, Reduction reduction) {
  if (into.size() != from.size())
    throw Error(ErrorKind::config, str("arithmetic: ", from.size(), " bytes into ", into.size(), " (equal sizes)"));
  const std::array<const std::byte*, 2> in{into.data(), from.data()};
  const std::array<std::byte*, 1> out{into.data()};
  reduce(in, out, into.size(), type, reduction == Reduction::average ? Reduction::sum : reduction);
}

void divide(std::span<std::byte> values, DType type, std::int64_t count) {
  check_whole(values.size(), type);
  if (count < 1) throw Error(ErrorKind::config, str("arithmetic: a sum divided by ", count, " (at least 1)"));
  watch_write(values.data(), values.size());
  dispatch(type,
           [&]<class T>(T) { Kernel<typename Elements<T>::Exact, Add>::divide(values.data(), values.size(), count); });
}

}  // namespace stepgraph
