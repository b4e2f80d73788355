#include "graphs/files/safetensors.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "engine/base/dispatch.hpp"
#include "engine/base/error.hpp"
#include "engine/base/words.hpp"
#include "graphs/files/files.hpp"
#include "graphs/files/json_value.hpp"

static_assert(std::endian::native == std::endian::little,
              "safetensors files are little endian and read without conversion");

namespace stepgraph {
namespace {

constexpr std::int64_t length_bytes      = 8;            // of the header's length
constexpr std::int64_t most_header_bytes = 100'000'000;  // the limit of the format
// A longer header describes so many tensors that their data is longer still. Otherwise parsing it would take seconds
// and a gigabyte for nothing.
constexpr std::int64_t usual_header_bytes = 16 << 20;

// The types of the format.
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

const JsonValue& field(const JsonValue& entry, const char* name, const std::string& subject) {
  const JsonValue* const found = entry.find(name);
  if (!found) refuse(str(subject, " has no '", name, "' (dtype, shape and data_offsets)"));
  return *found;
}

// A list of integers from 0 to 2^63 - 1.
std::vector<std::int64_t> sizes(const JsonValue& list, const std::string& subject) {
  constexpr std::size_t most = 64;  // dims: messages print them
  if (!list.is_list()) refuse(str(subject, " is not a list ([...])"));
  if (list.size() > most) refuse(str(subject, " has ", list.size(), " elements (at most ", most, ")"));
  std::vector<std::int64_t> numbers;
  for (const JsonValue& item : list.items) {
    const bool minus  = std::signbit(item.number);
    const auto number = item.kind == JsonValue::Kind::integer ? to_number<std::int64_t>(item.text) : std::nullopt;
    if (!number || minus) refuse(str(subject, " has an element ", excerpt(item), " (integers from 0 to 2^63 - 1)"));
    numbers.push_back(*number);
  }
  return numbers;
}

// check_shape() allows fewer than 2^60 elements, so this does not overflow.
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
  dispatch_float(from, [&]<class From>(From) { convert<From>(bytes, out); });
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
    refuse(str(subject, ": the header length is ", length, " bytes, but only ", rest,
               " bytes follow (a complete safetensors file)"));
  if (length > static_cast<std::uint64_t>(most_header_bytes))
    refuse(str(subject, ": the header length is ", length, " bytes (at most ", most_header_bytes, ")"));
  if (length > static_cast<std::uint64_t>(usual_header_bytes) && length > static_cast<std::uint64_t>(rest) - length)
    refuse(str(subject, ": the header length is ", length, " bytes for ", static_cast<std::uint64_t>(rest) - length,
               " bytes of data (at most ", usual_header_bytes, ", or as long as the data)"));
  std::string text(static_cast<std::size_t>(length), '\0');
  file_->read(length_bytes, std::as_writable_bytes(std::span(text)));
  if (!text.starts_with('{')) refuse(str(subject, ": the header does not begin with '{' (a safetensors file)"));
  data_begin_ = length_bytes + static_cast<std::int64_t>(length);
  parse_header(text, file_->num_bytes() - data_begin_);
}

Safetensors::Safetensors(Safetensors&&) noexcept            = default;
Safetensors& Safetensors::operator=(Safetensors&&) noexcept = default;
Safetensors::~Safetensors()                                 = default;

void Safetensors::parse_metadata(const JsonValue& value, const std::string& subject) {
  for (std::size_t i = 0; i < value.size(); ++i) {
    if (!value[i].is_string()) refuse(str(subject, ": '", value.key[i], "' is not a string (\"...\")"));
    metadata_.emplace(value.key[i], value[i].text);
  }
}

Safetensors::Entry Safetensors::parse_entry(const std::string& name, const JsonValue& value, const std::string& subject,
                                            std::int64_t num_data_bytes) {
  const JsonValue& dtype = field(value, "dtype", subject);
  if (!dtype.is_string()) refuse(str(subject, ": dtype is not a string (\"F32\")"));
  Entry made{.name = name, .info = {.dtype = dtype.text}};
  made.info.shape = sizes(field(value, "shape", subject), str(subject, ": shape"));
  check_shape(made.info.shape, subject);
  const auto offsets = sizes(field(value, "data_offsets", subject), str(subject, ": data_offsets"));
  if (offsets.size() != 2) refuse(str(subject, ": data_offsets has ", offsets.size(), " elements (begin and end)"));
  made.begin = offsets[0];
  made.end   = offsets[1];
  if (made.begin > made.end) refuse(str(subject, ": ends at byte ", made.end, ", before it begins at ", made.begin));
  if (made.end > num_data_bytes)
    refuse(str(subject, ": ends at byte ", made.end, ", but the file has ", num_data_bytes, " bytes of data"));
  const auto* type = std::ranges::find(element_types, std::string_view(made.info.dtype), &ElementType::name);
  if (type == std::end(element_types)) return made;
  made.info.type           = type->type;
  const std::int64_t bytes = bytes_of(made.info.shape, type->bits);
  if (bytes != made.end - made.begin)
    refuse(str(subject, ": shape ", to_string(made.info.shape), " of ", made.info.dtype, " is ", bytes,
               " bytes, but data_offsets span ", made.end - made.begin));
  return made;
}

void Safetensors::parse_header(const std::string& text, std::int64_t num_data_bytes) {
  const std::string subject = str(file_->name(), ": header");
  parse_json_fields(text, subject, [&](const std::string& name, const JsonValue& value) {
    const std::string which = str(subject, ": '", name, "'");
    if (!value.is_object()) refuse(str(which, " is not an object ({...})"));
    if (name == "__metadata__") {
      parse_metadata(value, which);
    } else {
      entries_.push_back(parse_entry(name, value, which, num_data_bytes));
    }
  });
  std::ranges::sort(entries_, {}, [](const Entry& entry) { return std::tie(entry.begin, entry.end, entry.name); });
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
                 "', which ends at ", end, " (tensors without gaps or overlap)"));
    if (entry.begin > end)
      refuse(str(subject, ": gap from byte ", end, " to ", entry.begin, ", before '", entry.name,
                 "' (tensors without gaps or overlap)"));
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
  if (found == by_name_.end())
    refuse(str(file_->name(), ": there is no tensor '", name, "' (the file has ", entries_.size(), " tensors)"));
  return entries_[found->second];
}

const TensorInfo& Safetensors::info(std::string_view name) const { return find(name).info; }

template <class T>
void Safetensors::read_elements(std::string_view name, std::int64_t first_element, std::span<T> out) const {
  const Entry& entry        = find(name);
  const std::string subject = str(file_->name(), ": '", name, "'");
  if (!entry.info.type || !is_float(*entry.info.type))
    refuse(str(subject, " has type ", entry.info.dtype, " (F64, F32, F16 or BF16)"));
  const std::int64_t elements = num_elements(entry.info.shape);
  const auto wanted           = static_cast<std::int64_t>(out.size());
  if (first_element < 0 || first_element > elements || wanted > elements - first_element)
    refuse(str(subject, " has ", elements, " elements, but ", wanted, " were requested from element ", first_element,
               " on"));
  const auto size    = static_cast<std::int64_t>(size_bytes(*entry.info.type));
  std::int64_t begin = data_begin_ + entry.begin + first_element * size;
  if (entry.info.type == dtype_of<T>()) return file_->read(begin, std::as_writable_bytes(out));
  // In pieces: there may not be enough memory for a second copy of a tensor.
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
               " elements, but the buffer has ", out.size()));
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
