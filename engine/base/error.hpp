#pragma once
#include <charconv>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace stepgraph {

// The cause of an error.
enum class ErrorKind {
  config,   // a wrong argument, option or plan of the caller
  graph,    // a race or a cycle in the graph, or parts that do not match
  run,      // a node's body failed, or the step was cancelled or ran out of time
  backend,  // CUDA, NCCL, MPI or the operating system returned an error
};

// The one exception type. A message reads `subject: what is wrong, with the values (what would be right)`.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  [[nodiscard]] ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

[[nodiscard]] std::string_view to_string(ErrorKind kind) noexcept;

namespace detail {
template <class Part>
void append(std::string& out, const Part& part) {
  if constexpr (std::is_convertible_v<const Part&, std::string_view>) {
    out += std::string_view(part);
  } else if constexpr (std::is_same_v<Part, char>) {
    out += part;
  } else if constexpr (std::is_integral_v<Part> && !std::is_same_v<Part, bool>) {
    char digits[24];
    out.append(digits, std::to_chars(digits, digits + sizeof digits, part).ptr);
  } else {
    std::ostringstream stream;
    stream << part;
    out += std::move(stream).str();
  }
}
}  // namespace detail

// All arguments, as a stream would print them, in one string: str("rank ", 3). Strings and integers use no stream, so
// that naming a node is cheap.
template <class... Parts>
[[nodiscard]] std::string str(const Parts&... parts) {
  std::string out;
  (detail::append(out, parts), ...);
  return out;
}

}  // namespace stepgraph
