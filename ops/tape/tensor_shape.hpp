#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace stepgraph {

// The sizes of a tensor's dims, slowest first. No dims: a scalar. A dim of size 0 makes an empty tensor.
using TensorShape = std::vector<std::int64_t>;

[[nodiscard]] std::string to_string(const TensorShape& shape);        // "4x10"; a scalar: "scalar"
[[nodiscard]] TensorShape parse_tensor_shape(std::string_view text);  // inverse of to_string
[[nodiscard]] std::int64_t num_elements(const TensorShape& shape);    // requires a valid shape
// Throws Error(config), starting with `subject`, if a dim is negative or there are 2^60 or more elements: at 8 bytes
// each, they could not be addressed.
void check_shape(const TensorShape& shape, std::string_view subject);

}  // namespace stepgraph
