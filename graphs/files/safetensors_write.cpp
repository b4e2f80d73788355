#include <algorithm>
#include <set>

#include "engine/base/error.hpp"
#include "engine/base/output_file.hpp"
#include "engine/base/words.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/files/safetensors.hpp"

namespace stepgraph {
namespace {

std::string quoted(const std::string& text) {
  if (!is_utf8(text)) throw Error(ErrorKind::config, str("safetensors: the name '", text, "' is not valid UTF-8"));
  return json_line(text);
}

bool is_f64(const TensorToWrite& tensor) { return tensor.fill.index() == 1; }

std::int64_t bytes_of(const TensorToWrite& tensor) {
  return num_elements(tensor.shape) * std::int64_t{is_f64(tensor) ? 8 : 4};
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
    text += str(text.size() == 1 ? "" : ",", quoted(tensor->name), ":{\"dtype\":\"", is_f64(*tensor) ? "F64" : "F32",
                "\",\"shape\":[", shape, "],\"data_offsets\":[", begin, ",", end, "]}");
    begin = end;
  }
  text += '}';
  text.append((8 - text.size() % 8) % 8, ' ');  // the data begins at a multiple of 8
  return text;
}

}  // namespace

void write_safetensors(const std::filesystem::path& path, std::span<const TensorToWrite> tensors,
                       const std::map<std::string, std::string>& metadata) {
  check(tensors);
  std::vector<const TensorToWrite*> order;
  for (const TensorToWrite& tensor : tensors) order.push_back(&tensor);
  std::ranges::stable_sort(order, std::ranges::greater{}, [](const TensorToWrite* tensor) { return is_f64(*tensor); });
  const std::string header   = header_text(order, metadata);
  const std::uint64_t length = header.size();
  OutputFile file(path);
  file.write(std::as_bytes(std::span(&length, 1)));
  file.write(std::as_bytes(std::span(header)));
  const auto write = [&](const TensorToWrite& tensor, const auto& fill, auto zero) {
    std::vector<decltype(zero)> values(static_cast<std::size_t>(num_elements(tensor.shape)));
    fill(std::span(values));
    file.write(std::as_bytes(std::span(values)));
  };
  for (const TensorToWrite* tensor : order) {
    if (is_f64(*tensor)) {
      write(*tensor, std::get<1>(tensor->fill), double{});
    } else {
      write(*tensor, std::get<0>(tensor->fill), float{});
    }
  }
  file.keep();
}

}  // namespace stepgraph
