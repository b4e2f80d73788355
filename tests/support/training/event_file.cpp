#include "tests/support/training/event_file.hpp"

#include <cstring>
#include <functional>
#include <stdexcept>

namespace stepgraph::testing {
namespace {

[[noreturn]] void fail(const char* what) { throw std::runtime_error(std::string("event file: ") + what); }

std::string_view take(std::string_view& bytes, std::size_t size) {
  if (bytes.size() < size) fail("it is cut");
  const std::string_view first = bytes.substr(0, size);
  bytes.remove_prefix(size);
  return first;
}

template <class Number>
Number number_in(std::string_view bytes) {
  Number number;
  std::memcpy(&number, bytes.data(), sizeof number);
  return number;
}

std::uint64_t take_varint(std::string_view& bytes) {
  std::uint64_t number = 0;
  for (int shift = 0; shift < 70; shift += 7) {
    const auto byte = static_cast<unsigned char>(take(bytes, 1)[0]);
    number |= std::uint64_t{byte & 0x7fU} << shift;
    if (byte < 0x80) return number;
  }
  fail("a number has more than ten bytes");
}

// One field of a message: the number, or the bytes of all wire types but 0.
struct Field {
  std::uint64_t name = 0, number = 0;
  std::string_view bytes = {};
};

void each_field(std::string_view message, const std::function<void(const Field&)>& use) {
  while (!message.empty()) {
    const std::uint64_t key = take_varint(message);
    Field field{.name = key >> 3};
    switch (key & 7) {
      case 0:
        field.number = take_varint(message);
        break;
      case 1:
        field.bytes = take(message, 8);
        break;
      case 2:
        field.bytes = take(message, take_varint(message));
        break;
      case 5:
        field.bytes = take(message, 4);
        break;
      default:
        fail("unknown wire type");
    }
    use(field);
  }
}

EventValue parse_value(std::string_view message) {
  EventValue value;
  each_field(message, [&](const Field& field) {
    if (field.name == 1) value.tag = field.bytes;
    if (field.name == 2) value.value = number_in<float>(field.bytes);
  });
  return value;
}

Event parse_event(std::string_view message) {
  Event event;
  each_field(message, [&](const Field& field) {
    if (field.name == 1) event.wall_time = number_in<double>(field.bytes);
    if (field.name == 2) event.step = static_cast<std::int64_t>(field.number);
    if (field.name == 3) event.file_version = field.bytes;
    if (field.name == 5)
      each_field(field.bytes, [&](const Field& each) { event.values.push_back(parse_value(each.bytes)); });
    if (field.name == 7)
      each_field(field.bytes, [&](const Field& each) {
        if (each.name == 1) event.session_status = static_cast<int>(each.number);
      });
  });
  return event;
}

void check_sum(std::string_view bytes, std::string_view stored) {
  const std::uint32_t crc = crc32c(bytes);
  if (((crc >> 15 | crc << 17) + 0xa282ead8U) != number_in<std::uint32_t>(stored)) fail("a checksum is wrong");
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  std::uint32_t crc = 0xffffffffU;
  for (const char byte : bytes) {
    crc ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) != 0 ? crc >> 1 ^ 0x82f63b78U : crc >> 1;
  }
  return ~crc;
}

std::vector<Event> parse_events(std::string_view bytes) {
  std::vector<Event> events;
  while (!bytes.empty()) {
    const std::string_view size = take(bytes, 8);
    check_sum(size, take(bytes, 4));
    const std::string_view message = take(bytes, number_in<std::uint64_t>(size));
    check_sum(message, take(bytes, 4));
    events.push_back(parse_event(message));
  }
  return events;
}

}  // namespace stepgraph::testing
