#include <algorithm>
#include <set>

#include "engine/base/dispatch.hpp"
#include "engine/base/error.hpp"
#include "engine/base/output_file.hpp"
#include "engine/base/words.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/files/safetensors.hpp"
#include "ops/tape/number.hpp"

namespace stepgraph {
namespace {

std::string quoted(const std::string& text) {
  if (!is_utf8(text)) throw Error(ErrorKind::config, str("safetensors: the name '", text, "' is not valid UTF-8"));
  return json_line(text);
}

std::int64_t bytes_of(const TensorToWrite& tensor) {
  return num_elements(tensor.shape) * static_cast<std::int64_t>(size_bytes(tensor.stored_type()));
}

std::string_view type_name(DType type) {
  switch (type) {
    case DType::f64:
      return "F64";
    case DType::f16:
      return "F16";
    case DType::bf16:
      return "BF16";
    default:
      return "F32";
  }
}

void check(std::span<const TensorToWrite> tensors) {
  std::set<std::string_view> names;
  std::int64_t room = INT64_MAX;
  for (const TensorToWrite& tensor : tensors) {
    const std::string subject = str("safetensors: '", tensor.name, "'");
    if (tensor.name.empty() || tensor.name == "__metadata__")
      throw Error(ErrorKind::config, str(subject, " is reserved or empty (a tensor name)"));
    if (!names.insert(tensor.name).second)
      throw Error(ErrorKind::config, str(subject, " is given twice (unique names)"));
    if (!std::visit([](const auto& fill) { return static_cast<bool>(fill); }, tensor.fill))
      throw Error(ErrorKind::config, str(subject, " has no fill function (a function that writes its elements)"));
    if (!is_float(tensor.stored_type()))
      throw Error(ErrorKind::config, str(subject, ": type ", tensor.stored_type(), " (f32, f64, bf16 or f16)"));
    check_shape(tensor.shape, subject);
    if (bytes_of(tensor) > room) throw Error(ErrorKind::config, str(subject, ": more than 2^63 bytes in one file"));
    room -= bytes_of(tensor);
  }
}

std::string header_text(std::span<const TensorToWrite* const> tensors,
                        const std::map<std::string, std::string>& metadata) {
  std::string text = "{";
  if (!metadata.empty()) {
    text += "\"__metadata__\":{";
    text +=
        join_text(metadata, ",", [](const auto& pair) { return str(quoted(pair.first), ":", quoted(pair.second)); });
    text += '}';
  }
  std::int64_t begin = 0;
  for (const TensorToWrite* tensor : tensors) {
    const std::int64_t end = begin + bytes_of(*tensor);
    const auto shape       = join_text(tensor->shape, ",", [](std::int64_t size) { return str(size); });
    text += str(text.size() == 1 ? "" : ",", quoted(tensor->name), ":{\"dtype\":\"", type_name(tensor->stored_type()),
                "\",\"shape\":[", shape, "],\"data_offsets\":[", begin, ",", end, "]}");
    begin = end;
  }
  text += '}';
  text.append((8 - text.size() % 8) % 8, ' ');  // the data begins at a multiple of 8
  return text;
}

template <class T>
void write_tensor(OutputFile& file, const TensorToWrite& tensor, const std::function<void(std::span<T>)>& fill) {
  std::vector<T> values(static_cast<std::size_t>(num_elements(tensor.shape)));
  fill(std::span(values));
  if (tensor.stored_type() == dtype_of<T>()) return file.write(std::as_bytes(std::span(values)));
  dispatch_float(tensor.stored_type(), [&]<class Stored>(Stored) {
    constexpr std::size_t most = std::size_t{1} << 18;  // elements at once
    std::vector<Stored> rounded(std::min(most, values.size()));
    for (std::size_t begin = 0; begin < values.size(); begin += most) {
      const std::size_t now = std::min(most, values.size() - begin);
      std::transform(values.begin() + static_cast<std::ptrdiff_t>(begin),
                     values.begin() + static_cast<std::ptrdiff_t>(begin + now), rounded.begin(),
                     [](T value) { return narrow<Stored>(static_cast<Wide<Stored>>(value)); });
      file.write(std::as_bytes(std::span(rounded).first(now)));
    }
  });
}

}  // namespace

void write_safetensors(const std::filesystem::path& path, std::span<const TensorToWrite> tensors,
                       const std::map<std::string, std::string>& metadata) {
  check(tensors);
  std::vector<const TensorToWrite*> order;
  for (const TensorToWrite& tensor : tensors) order.push_back(&tensor);
  std::ranges::stable_sort(order, std::ranges::greater{},
                           [](const TensorToWrite* tensor) { return size_bytes(tensor->stored_type()); });
  const std::string header   = header_text(order, metadata);
  const std::uint64_t length = header.size();
  OutputFile file(path);
  file.write(std::as_bytes(std::span(&length, 1)));
  file.write(std::as_bytes(std::span(header)));
  for (const TensorToWrite* tensor : order)
    std::visit([&](const auto& fill) { write_tensor(file, *tensor, fill); }, tensor->fill);
  file.keep();
}

}  // namespace stepgraph
