#include "graphs/files/safetensors.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <type_traits>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/base/half.hpp"
#include "engine/base/words.hpp"
#include "graphs/files/files.hpp"
#include "graphs/files/json_check.hpp"

static_assert(std::endian::native == std::endian::little, "safetensors are little endian, and read as they lie");

namespace stepgraph {
namespace {

using nlohmann::json;

constexpr std::int64_t length_bytes      = 8;            // of the header's length
constexpr std::int64_t most_header_bytes = 100'000'000;  // as the format says

// The types that the format has.
struct ElementType {
  std::string_view name;
  int bits                  = 0;
  std::optional<DType> type = std::nullopt;
};
constexpr ElementType element_types[] = {
    {"F64", 64, DType::f64},
    {"F32", 32, DType::f32},
    {"F16", 16, DType::f16},
    {"BF16", 16, DType::bf16},
    {"I64", 64, DType::i64},
    {"I32", 32, DType::i32},
    {"U8", 8, DType::u8},
    {"BOOL", 8},
    {"I8", 8},
    {"I16", 16},
    {"U16", 16},
    {"U32", 32},
    {"U64", 64},
    {"F8_E5M2", 8},
    {"F8_E4M3", 8},
    {"F8_E8M0", 8},
    {"F6_E2M3", 6},
    {"F6_E3M2", 6},
    {"F4", 4},
    {"C64", 64},
};

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::config, message); }

const json& field(const json& entry, const char* name, const std::string& subject) {
  const auto found = entry.find(name);
  if (found == entry.end()) refuse(str(subject, " has no '", name, "' (dtype, shape and data_offsets)"));
  return *found;
}

// Numbers that are 0 or more; larger ones than 2^63 are no integers of ours.
std::vector<std::int64_t> sizes(const json& list, const std::string& subject) {
  constexpr std::size_t most = 64;  // dims; messages print them
  if (!list.is_array()) refuse(str(subject, " is no list ([...])"));
  if (list.size() > most) refuse(str(subject, " has ", list.size(), " elements (at most ", most, ")"));
  std::vector<std::int64_t> numbers;
  for (const json& number : list) {
    if (!number.is_number_unsigned() || number.get<std::uint64_t>() > std::uint64_t{INT64_MAX})
      refuse(str(subject, " has an element ", number.dump(-1, ' ', true, json::error_handler_t::replace),
                 " (integers from 0 to 2^63 - 1)"));
    numbers.push_back(number.get<std::int64_t>());
  }
  return numbers;
}

// A shape that was checked has fewer than 2^60 elements, so this does not overflow.
std::int64_t bytes_of(const TensorShape& shape, int bits) {
  const std::int64_t elements = num_elements(shape);
  return bits % 8 == 0 ? elements * (bits / 8) : (elements * bits + 7) / 8;
}

template <class From, class To>
void convert(std::span<const std::byte> bytes, std::span<To> out) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    From value;
    std::memcpy(&value, bytes.data() + i * sizeof(From), sizeof(From));
    if constexpr (std::is_floating_point_v<From>) {
      out[i] = static_cast<To>(value);
    } else {
      out[i] = static_cast<To>(static_cast<float>(value));
    }
  }
}

template <class To>
void convert(DType from, std::span<const std::byte> bytes, std::span<To> out) {
  if (from == DType::f64) return convert<double>(bytes, out);
  if (from == DType::f32) return convert<float>(bytes, out);
  if (from == DType::f16) return convert<f16>(bytes, out);
  return convert<bf16>(bytes, out);
}

bool readable(std::optional<DType> type) {
  return type == DType::f64 || type == DType::f32 || type == DType::f16 || type == DType::bf16;
}

}  // namespace

Safetensors::Safetensors(const std::filesystem::path& path) : file_(std::make_unique<InputFile>(path)) {
  const std::string subject = file_->name();
  if (file_->num_bytes() < length_bytes)
    refuse(str(subject, ": ", file_->num_bytes(), " bytes are too few for a safetensors file (8, then a header)"));
  std::uint64_t length = 0;
  file_->read(0, std::as_writable_bytes(std::span(&length, 1)));
  const std::int64_t rest = file_->num_bytes() - length_bytes;
  if (length > static_cast<std::uint64_t>(rest))
    refuse(str(subject, ": the header is said to have ", length, " bytes, but ", rest,
               " follow (a whole safetensors file)"));
  if (length > static_cast<std::uint64_t>(most_header_bytes))
    refuse(str(subject, ": the header is said to have ", length, " bytes (at most ", most_header_bytes, ")"));
  std::string text(static_cast<std::size_t>(length), '\0');
  file_->read(length_bytes, std::as_writable_bytes(std::span(text)));
  if (!text.starts_with('{')) refuse(str(subject, ": the header does not begin with '{' (a safetensors file)"));
  data_begin_ = length_bytes + static_cast<std::int64_t>(length);
  parse_header(text, file_->num_bytes() - data_begin_);
}

Safetensors::Safetensors(Safetensors&&) noexcept            = default;
Safetensors& Safetensors::operator=(Safetensors&&) noexcept = default;
Safetensors::~Safetensors()                                 = default;

void Safetensors::parse_header(const std::string& text, std::int64_t num_data_bytes) {
  const std::string subject = str(file_->name(), ": header");
  check_json(text, subject);
  const json header = json::parse(text);
  for (const auto& [name, entry] : header.items()) {
    const std::string which = str(subject, ": '", name, "'");
    if (!entry.is_object()) refuse(str(which, " is no object ({...})"));
    if (name == "__metadata__") {
      for (const auto& [key, value] : entry.items()) {
        if (!value.is_string()) refuse(str(which, ": '", key, "' is no text (\"...\")"));
        metadata_.emplace(key, value.get<std::string>());
      }
      continue;
    }
    const json& dtype = field(entry, "dtype", which);
    if (!dtype.is_string()) refuse(str(which, ": dtype is no text (as \"F32\")"));
    Entry made{.name = name, .info = {.dtype = dtype.get<std::string>()}};
    made.info.shape = sizes(field(entry, "shape", which), str(which, ": shape"));
    check_shape(made.info.shape, which);
    const auto offsets = sizes(field(entry, "data_offsets", which), str(which, ": data_offsets"));
    if (offsets.size() != 2) refuse(str(which, ": data_offsets has ", offsets.size(), " elements (begin and end)"));
    made.begin = offsets[0];
    made.end   = offsets[1];
    if (made.begin > made.end) refuse(str(which, ": ends at byte ", made.end, ", before it begins at ", made.begin));
    if (made.end > num_data_bytes)
      refuse(str(which, ": ends at byte ", made.end, ", but the file has ", num_data_bytes, " bytes of data"));
    const auto* type = std::ranges::find(element_types, std::string_view(made.info.dtype), &ElementType::name);
    if (type != std::end(element_types)) {
      made.info.type           = type->type;
      const std::int64_t bytes = bytes_of(made.info.shape, type->bits);
      if (bytes != made.end - made.begin)
        refuse(str(which, ": shape ", to_string(made.info.shape), " of ", made.info.dtype, " is ", bytes,
                   " bytes, but data_offsets span ", made.end - made.begin));
    }
    entries_.push_back(std::move(made));
  }
  std::ranges::stable_sort(entries_, {}, [](const Entry& entry) { return std::pair(entry.begin, entry.end); });
  check_coverage(num_data_bytes);
  for (std::size_t i = 0; i < entries_.size(); ++i) by_name_.emplace(entries_[i].name, i);
}

void Safetensors::check_coverage(std::int64_t num_data_bytes) const {
  const std::string subject = str(file_->name(), ": header");
  std::int64_t end          = 0;
  const Entry* before       = nullptr;
  for (const Entry& entry : entries_) {
    if (entry.begin < end)
      refuse(str(subject, ": '", entry.name, "' begins at byte ", entry.begin, ", inside '", before->name,
                 "', which ends at ", end, " (tensors end to end)"));
    if (entry.begin > end)
      refuse(str(subject, ": no tensor has the bytes from ", end, " to ", entry.begin, ", before '", entry.name,
                 "' (tensors end to end)"));
    end    = entry.end;
    before = &entry;
  }
  if (end != num_data_bytes)
    refuse(str(subject, ": the tensors end at byte ", end, ", but the file has ", num_data_bytes,
               " bytes of data (tensors to the end of the file)"));
}

const std::filesystem::path& Safetensors::path() const noexcept { return file_->path(); }

std::vector<std::string> Safetensors::names() const {
  std::vector<std::string> names;
  for (const Entry& entry : entries_) names.push_back(entry.name);
  return names;
}

bool Safetensors::contains(std::string_view name) const { return by_name_.find(name) != by_name_.end(); }

const Safetensors::Entry& Safetensors::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) refuse(str(file_->name(), ": there is no tensor '", name, "' among ", entries_.size()));
  return entries_[found->second];
}

const TensorInfo& Safetensors::info(std::string_view name) const { return find(name).info; }

template <class T>
void Safetensors::read_elements(std::string_view name, std::int64_t first_element, std::span<T> out) const {
  const Entry& entry        = find(name);
  const std::string subject = str(file_->name(), ": '", name, "'");
  if (!readable(entry.info.type))
    refuse(str(subject, " is of ", entry.info.dtype, " (F64, F32, F16 and BF16 can be read)"));
  const std::int64_t elements = num_elements(entry.info.shape);
  const auto wanted           = static_cast<std::int64_t>(out.size());
  if (first_element < 0 || first_element > elements || wanted > elements - first_element)
    refuse(str(subject, " has ", elements, " elements, but ", wanted, " are wanted from ", first_element, " on"));
  const auto size    = static_cast<std::int64_t>(size_bytes(*entry.info.type));
  std::int64_t begin = data_begin_ + entry.begin + first_element * size;
  if (entry.info.type == dtype_of<T>()) return file_->read(begin, std::as_writable_bytes(out));
  // A piece at a time: memory for another copy of a tensor may not be there.
  constexpr std::size_t piece = std::size_t{1} << 17;
  std::vector<std::byte> bytes(std::min(piece, out.size()) * static_cast<std::size_t>(size));
  while (!out.empty()) {
    const std::size_t now = std::min(piece, out.size());
    const auto part       = std::span(bytes).first(now * static_cast<std::size_t>(size));
    file_->read(begin, part);
    convert(*entry.info.type, part, out.first(now));
    begin += static_cast<std::int64_t>(part.size());
    out = out.subspan(now);
  }
}

template <class T>
void Safetensors::read_whole(std::string_view name, std::span<T> out) const {
  const std::int64_t elements = num_elements(info(name).shape);
  if (static_cast<std::int64_t>(out.size()) != elements)
    refuse(str(file_->name(), ": '", name, "' of shape ", to_string(info(name).shape), " has ", elements,
               " elements, but there is room for ", out.size()));
  read_elements(name, 0, out);
}

void Safetensors::read(std::string_view name, std::span<float> out) const { read_whole(name, out); }
void Safetensors::read(std::string_view name, std::span<double> out) const { read_whole(name, out); }
void Safetensors::read_part(std::string_view name, std::int64_t first_element, std::span<float> out) const {
  read_elements(name, first_element, out);
}
void Safetensors::read_part(std::string_view name, std::int64_t first_element, std::span<double> out) const {
  read_elements(name, first_element, out);
}

}  // namespace stepgraph
