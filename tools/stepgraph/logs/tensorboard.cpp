#include "tools/stepgraph/logs/tensorboard.hpp"

#include <unistd.h>

#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <filesystem>

#include "engine/base/error.hpp"

namespace stepgraph::cli {
namespace {

static_assert(std::endian::native == std::endian::little);  // records and fixed-size fields are little-endian

// CRC-32C, the Castagnoli polynomial, reflected.
constexpr std::array<std::uint32_t, 256> crc_table = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78U : 0);
    table[i] = crc;
  }
  return table;
}();

// As stored: rotated, with a constant added, so that the checksum of bytes that hold a checksum is no fixed value.
std::uint32_t masked_crc(std::string_view bytes) {
  std::uint32_t crc = ~0U;
  for (const char byte : bytes) crc = (crc >> 8) ^ crc_table[(crc ^ static_cast<unsigned char>(byte)) & 0xffU];
  return std::rotr(~crc, 15) + 0xa282ead8U;
}

template <class Number>
std::string raw_bytes(Number number) {
  std::string bytes(sizeof number, '\0');
  std::memcpy(bytes.data(), &number, sizeof number);
  return bytes;
}

std::string varint(std::uint64_t number) {
  std::string bytes;
  for (; number >= 0x80; number >>= 7) bytes += static_cast<char>(number | 0x80);
  return bytes + static_cast<char>(number);
}

// The fields of a protobuf message. A key is the number of the field and its wire type.
std::string key(int field, int wire_type) { return varint(static_cast<std::uint64_t>(field << 3 | wire_type)); }
std::string integer_field(int field, std::int64_t value) {
  return key(field, 0) + varint(static_cast<std::uint64_t>(value));
}
std::string double_field(int field, double value) { return key(field, 1) + raw_bytes(value); }
std::string float_field(int field, double value) { return key(field, 5) + raw_bytes(static_cast<float>(value)); }
std::string bytes_field(int field, std::string_view bytes) {
  return key(field, 2) + varint(bytes.size()).append(bytes);
}

constexpr int event_wall_time = 1, event_step = 2, event_file_version = 3, event_summary = 5, event_session_log = 7;
constexpr int session_status = 1, session_start = 1;
constexpr int summary_value = 1, value_tag = 1, value_simple = 2;

std::string value_of(std::string_view tag, double value) {
  return bytes_field(summary_value, bytes_field(value_tag, tag) + float_field(value_simple, value));
}

std::string file_in(const std::string& folder) {
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  if (failed)
    throw Error(ErrorKind::config,
                str("--tensorboard '", folder, "': cannot be made: ", failed.message(), " (a folder)"));
  // TensorBoard reads the files of a folder in the order of their names, so the time comes first. The rest is the usual
  // form, with the nanoseconds where others have a counter.
  const std::int64_t now =
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  std::array<char, 256> host{"unknown"};
  if (::gethostname(host.data(), host.size() - 1) != 0) host = {"unknown"};
  const std::string nanoseconds = str(now % 1'000'000'000 + 1'000'000'000).substr(1);
  return str(folder, "/events.out.tfevents.", now / 1'000'000'000, ".", host.data(), ".", nanoseconds, ".", ::getpid());
}

}  // namespace

TensorboardFile::TensorboardFile(const std::string& folder, std::int64_t first_step) : file_(file_in(folder)) {
  add_event(0, bytes_field(event_file_version, "brain.Event:2"));
  add_event(first_step, bytes_field(event_session_log, integer_field(session_status, session_start)));
}

void TensorboardFile::add_event(std::int64_t step, std::string_view content) {
  const auto now          = std::chrono::system_clock::now().time_since_epoch();
  std::string event       = double_field(event_wall_time, std::chrono::duration<double>(now).count());
  const std::string bytes = event.append(integer_field(event_step, step)).append(content);
  const std::string size  = raw_bytes(static_cast<std::uint64_t>(bytes.size()));
  file_.add(str(size, raw_bytes(masked_crc(size)), bytes, raw_bytes(masked_crc(bytes))));
}

void TensorboardFile::add(const StepRecord& record) {
  add_event(record.step,
            bytes_field(event_summary, str(value_of("train/loss", record.loss), value_of("train/rate", record.rate),
                                           value_of("train/grad_norm", record.grad_norm),
                                           value_of("train/tokens_per_s", record.tokens_per_s))));
}

void TensorboardFile::add(const EvalRecord& record) {
  add_event(record.step, bytes_field(event_summary, value_of("eval/loss", record.loss)));
}

}  // namespace stepgraph::cli
