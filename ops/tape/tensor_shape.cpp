#include "ops/tape/tensor_shape.hpp"

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"

namespace stepgraph {

std::string to_string(const TensorShape& shape) {
  if (shape.empty()) return "scalar";
  return join_text(shape, "x", [](std::int64_t size) { return str(size); });
}

TensorShape parse_tensor_shape(std::string_view text) {
  TensorShape shape;
  if (text == "scalar") return shape;
  for (const std::string_view piece : split_text(text, 'x')) {
    const auto size = to_number<std::int64_t>(piece);
    if (!size) throw Error(ErrorKind::config, str("shape '", text, "': '", piece, "' is not a size (as in 4x10)"));
    shape.push_back(*size);
  }
  check_shape(shape, "shape");
  return shape;
}

std::int64_t num_elements(const TensorShape& shape) {
  std::int64_t elements = 1;
  for (const std::int64_t size : shape) elements *= size;
  return elements;
}

void check_shape(const TensorShape& shape, std::string_view subject) {
  // The product ignores dims of 0: other code multiplies subsets of the dims, even of an empty tensor.
  constexpr std::int64_t most = (std::int64_t{1} << 60) - 1;
  std::int64_t elements       = 1;
  for (const std::int64_t size : shape) {
    if (size < 0)
      throw Error(ErrorKind::config,
                  str(subject, ": shape ", to_string(shape), " has a dim of ", size, " (0 or more)"));
    if (size == 0) continue;
    if (elements > most / size)
      throw Error(ErrorKind::config,
                  str(subject, ": shape ", to_string(shape), " has too many elements (fewer than 2^60)"));
    elements *= size;
  }
}

}  // namespace stepgraph
