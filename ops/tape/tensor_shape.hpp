#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace stepgraph {

// The sizes of a tensor's dims, slowest first; none: a scalar. A dim of size 0 makes an empty tensor.
using TensorShape = std::vector<std::int64_t>;

[[nodiscard]] std::string to_string(const TensorShape& shape);        // "4x10"; a scalar: "scalar"
[[nodiscard]] TensorShape parse_tensor_shape(std::string_view text);  // what to_string wrote
[[nodiscard]] std::int64_t num_elements(const TensorShape& shape);    // shape is valid
// Throws Error(config) that begins with `subject` when a dim is negative, or when there are 2^60 elements or more: of 8
// bytes each, they could not be addressed.
void check_shape(const TensorShape& shape, std::string_view subject);

}  // namespace stepgraph
