#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

#include "engine/base/error.hpp"
#include "engine/graph/part.hpp"

// The kernels of communications on a device. All work is enqueued on `stream`, a cudaStream_t.
namespace stepgraph::cuda {

inline constexpr std::size_t max_members       = 64;  // of a reduction
inline constexpr std::size_t max_element_bytes = 8;

// One value for each member of a reduction. Communications are issued without allocations, so it is kept inline.
template <class T>
class PerMember {
 public:
  explicit PerMember(std::size_t count) : count_(checked(count)) {}
  [[nodiscard]] std::size_t size() const noexcept { return count_; }
  [[nodiscard]] T& operator[](std::size_t member) { return values_[member]; }
  [[nodiscard]] T* begin() noexcept { return values_.data(); }
  [[nodiscard]] T* end() noexcept { return values_.data() + count_; }
  [[nodiscard]] const T* begin() const noexcept { return values_.data(); }
  [[nodiscard]] const T* end() const noexcept { return values_.data() + count_; }

 private:
  static std::size_t checked(std::size_t count) {
    if (count <= max_members) return count;
    throw Error(ErrorKind::backend, str("cuda: a reduction of ", count, " members (at most ", max_members, ")"));
  }
  std::size_t count_;
  std::array<T, max_members> values_ = {};
};

// Writes the reduction of all of `in`, in order, to each of `out`, as engine/base/arithmetic.hpp defines it. Addresses
// need not be aligned. An output may be an input. `num_bytes` are whole elements.
void reduce(void* stream, const PerMember<const std::byte*>& in, const PerMember<std::byte*>& out,
            std::int64_t num_bytes, DType type, Reduction reduction);

// The same for one element whose bytes do not lie together: the address of each.
using SplitElement = std::array<std::byte*, max_element_bytes>;
void reduce(void* stream, const PerMember<SplitElement>& in, const PerMember<SplitElement>& out, DType type,
            Reduction reduction);

// to_a = from_b and to_b = from_a, `num_bytes` bytes. from_a may be to_a, and from_b may be to_b.
void exchange(void* stream, const std::byte* from_a, std::byte* to_a, const std::byte* from_b, std::byte* to_b,
              std::int64_t num_bytes);

}  // namespace stepgraph::cuda
