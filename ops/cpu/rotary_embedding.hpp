#pragma once
#include <cstdint>
#include <memory>
#include <vector>

namespace stepgraph::cpu {

// Rotates the first `turned_heads` heads of each row of `row` elements by the row's position in its sequence.
struct Rotation {
  std::int64_t seq                                       = 1;
  std::int64_t row                                       = 0;
  std::int64_t turned_heads                              = 0;
  std::int64_t head_size                                 = 2;
  bool backward                                          = false;  // by the negative angle
  std::shared_ptr<const std::vector<double>> frequencies = {};     // head_size / 2
};

// out = rotated in; both may be the same. `angles`: scratch for 4 * (head_size / 2) numbers.
template <class T>
void rotate(const Rotation& rotation, std::int64_t rows, const T* in, T* out, double* angles);

}  // namespace stepgraph::cpu
