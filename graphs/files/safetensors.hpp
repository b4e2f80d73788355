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
struct JsonValue;

// One tensor of a file.
struct TensorInfo {
  std::string dtype         = {};            // as in the file: "BF16"
  std::optional<DType> type = std::nullopt;  // none: the engine has no such type
  TensorShape shape         = {};
};

// A safetensors file, open for reading: 8 bytes of header length, a JSON header, then the tensors end to end. The
// constructor checks the whole header: types, shapes, offsets, and that tensors neither overlap nor leave gaps. Throws
// Error(config) that names the file. Thread-safe for concurrent reads.
class Safetensors {
 public:
  explicit Safetensors(const std::filesystem::path& path);
  Safetensors(Safetensors&&) noexcept;
  Safetensors& operator=(Safetensors&&) noexcept;
  ~Safetensors();

  [[nodiscard]] const std::filesystem::path& path() const noexcept;
  [[nodiscard]] std::vector<std::string> names() const;  // in file order
  [[nodiscard]] bool contains(std::string_view name) const;
  [[nodiscard]] const TensorInfo& info(std::string_view name) const;  // throws Error(config) for an unknown name
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const noexcept { return metadata_; }

  // Reads all elements of an F64, F32, F16 or BF16 tensor and converts them to the type of `out`: exact, except from
  // F64 to float. `out` must have as many elements as the tensor.
  void read(std::string_view name, std::span<float> out) const;
  void read(std::string_view name, std::span<double> out) const;
  // Reads out.size() elements from `first_element` on, in file order.
  void read_part(std::string_view name, std::int64_t first_element, std::span<float> out) const;
  void read_part(std::string_view name, std::int64_t first_element, std::span<double> out) const;

 private:
  struct Entry {
    std::string name;
    TensorInfo info;
    std::int64_t begin = 0;  // bytes, after the header
    std::int64_t end   = 0;
  };
  void parse_metadata(const JsonValue& value, const std::string& subject);
  [[nodiscard]] static Entry parse_entry(const std::string& name, const JsonValue& value, const std::string& subject,
                                         std::int64_t num_data_bytes);
  void parse_header(const std::string& text, std::int64_t num_data_bytes);
  void check_coverage(std::int64_t num_data_bytes) const;
  [[nodiscard]] const Entry& find(std::string_view name) const;
  template <class T>
  void read_whole(std::string_view name, std::span<T> out) const;
  template <class T>
  void read_elements(std::string_view name, std::int64_t first_element, std::span<T> out) const;

  std::unique_ptr<InputFile> file_;
  std::int64_t data_begin_ = 0;
  std::vector<Entry> entries_;                               // sorted by first byte
  std::map<std::string, std::size_t, std::less<>> by_name_;  // into entries_
  std::map<std::string, std::string> metadata_;
};

// A tensor to write. `fill` is called once, just before the tensor is written, to set all of its elements. They are
// rounded to `type`: f32, f64, bf16 or f16; none: the type of the argument of `fill`.
struct TensorToWrite {
  std::string name                                                                                 = {};
  TensorShape shape                                                                                = {};
  std::variant<std::function<void(std::span<float>)>, std::function<void(std::span<double>)>> fill = {};
  std::optional<DType> type                                                                        = {};

  [[nodiscard]] DType stored_type() const noexcept {
    return type.value_or(fill.index() == 0 ? DType::f32 : DType::f64);
  }
};

// Writes a file that the safetensors library reads, with the tensors in the given order (of larger elements first, so
// that all are aligned). The write is atomic; a full disk is Error(backend). One tensor is in memory at a time.
void write_safetensors(const std::filesystem::path& path, std::span<const TensorToWrite> tensors,
                       const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

}  // namespace stepgraph
