#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "engine/base/types.hpp"
#include "ops/tape/tensor_shape.hpp"

namespace stepgraph {

class InputFile;

// One tensor of a file.
struct TensorInfo {
  std::string dtype         = {};            // as the file spells it: "BF16"
  std::optional<DType> type = std::nullopt;  // none: the engine has no such elements
  TensorShape shape         = {};
};

// A safetensors file, open for reading: 8 bytes of header length, a header in JSON, then the tensors end to end.
// Everything the header says is checked when the file is opened, before anything is allocated for it; so are tensors
// that overlap or leave holes. Throws Error(config) that names the file. Threads may read at once.
class Safetensors {
 public:
  explicit Safetensors(const std::filesystem::path& path);
  Safetensors(Safetensors&&) noexcept;
  Safetensors& operator=(Safetensors&&) noexcept;
  ~Safetensors();

  [[nodiscard]] const std::filesystem::path& path() const noexcept;
  [[nodiscard]] std::vector<std::string> names() const;  // in the order of their bytes
  [[nodiscard]] bool contains(std::string_view name) const;
  [[nodiscard]] const TensorInfo& info(std::string_view name) const;  // refuses a name that is not there
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const noexcept { return metadata_; }

  // All elements of a tensor of F64, F32, F16 or BF16, as numbers of the caller's type: exact, except that F64 is
  // rounded to float. `out` has as many elements as the tensor.
  void read(std::string_view name, std::span<float> out) const;
  void read(std::string_view name, std::span<double> out) const;
  // Some of them: those from `first_element` on, in the order of the file.
  void read_part(std::string_view name, std::int64_t first_element, std::span<float> out) const;
  void read_part(std::string_view name, std::int64_t first_element, std::span<double> out) const;

 private:
  struct Entry {
    std::string name;
    TensorInfo info;
    std::int64_t begin = 0;  // bytes, after the header
    std::int64_t end   = 0;
  };
  void parse_header(const std::string& text, std::int64_t num_data_bytes);
  void check_coverage(std::int64_t num_data_bytes) const;
  [[nodiscard]] const Entry& find(std::string_view name) const;
  template <class T>
  void read_whole(std::string_view name, std::span<T> out) const;
  template <class T>
  void read_elements(std::string_view name, std::int64_t first_element, std::span<T> out) const;

  std::unique_ptr<InputFile> file_;
  std::int64_t data_begin_ = 0;
  std::vector<Entry> entries_;                               // by their first byte
  std::map<std::string, std::size_t, std::less<>> by_name_;  // into entries_
  std::map<std::string, std::string> metadata_;
};

// A tensor to be written. `fill` is called once, when its turn comes, with all of its elements; what it takes says
// whether they become F32 or F64.
struct TensorToWrite {
  std::string name                                                                                 = {};
  TensorShape shape                                                                                = {};
  std::variant<std::function<void(std::span<float>)>, std::function<void(std::span<double>)>> fill = {};
};

// Writes a file that others read as theirs, tensors in the order given (those of F64 first, so that all are aligned).
// The file appears complete or not at all; a full disk is Error(backend). Holds one tensor in memory at a time.
void write_safetensors(const std::filesystem::path& path, std::span<const TensorToWrite> tensors,
                       const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

}  // namespace stepgraph
