#pragma once
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/base/types.hpp"
#include "ops/tape/tensor_shape.hpp"

namespace stepgraph {

struct Parameter {
  std::string name  = {};
  TensorShape shape = {};  // none: a scalar
  DType type        = DType::f32;

  [[nodiscard]] std::int64_t num_elements() const { return stepgraph::num_elements(shape); }
  [[nodiscard]] std::int64_t num_bytes() const { return num_elements() * static_cast<std::int64_t>(size_bytes(type)); }
  friend auto operator<=>(const Parameter&, const Parameter&) = default;
};

// The parameters of a model, in their order. Names are there once, and shapes have elements. Valid once made.
class ParameterInventory {
 public:
  explicit ParameterInventory(std::vector<Parameter> parameters = {});
  void add(Parameter parameter);

  [[nodiscard]] std::span<const Parameter> parameters() const noexcept { return parameters_; }
  [[nodiscard]] std::size_t size() const noexcept { return parameters_.size(); }
  [[nodiscard]] bool contains(std::string_view name) const;
  [[nodiscard]] const Parameter& find(std::string_view name) const;  // refuses a name that is not there
  [[nodiscard]] std::vector<std::string> names() const;

  [[nodiscard]] std::int64_t num_elements() const noexcept { return num_elements_; }
  [[nodiscard]] std::int64_t num_bytes() const noexcept { return num_bytes_; }

  // Over the numbers of elements; each refuses an empty inventory. The median of an even number of parameters is the
  // mean of the two in the middle. Of equals, the first is the smallest or the largest.
  [[nodiscard]] double mean_elements() const;
  [[nodiscard]] double median_elements() const;
  [[nodiscard]] const Parameter& smallest() const;
  [[nodiscard]] const Parameter& largest() const;

  friend bool operator==(const ParameterInventory& a, const ParameterInventory& b) {
    return a.parameters_ == b.parameters_;
  }

 private:
  void check_any(const char* what) const;

  std::vector<Parameter> parameters_;
  std::unordered_map<std::string, std::size_t> by_name_;
  std::int64_t num_elements_ = 0;
  std::int64_t num_bytes_    = 0;
};
// A table with a line for each parameter, then the figures above.
[[nodiscard]] std::string to_string(const ParameterInventory& inventory);
inline std::ostream& operator<<(std::ostream& out, const ParameterInventory& inventory) {
  return out << to_string(inventory);
}

}  // namespace stepgraph
