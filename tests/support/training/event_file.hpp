#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

// A reader of TensorBoard's event files, written from their format and independent of the writer.
namespace stepgraph::testing {

struct EventValue {
  std::string tag;
  float value                                                  = 0;
  friend bool operator==(const EventValue&, const EventValue&) = default;
};
struct Event {
  double wall_time  = 0;
  std::int64_t step = 0;
  std::string file_version;
  int session_status = 0;  // 1: START
  std::vector<EventValue> values;
};

// CRC-32C bit by bit, without the mask.
[[nodiscard]] std::uint32_t crc32c(std::string_view bytes);

// All events of a file. Throws std::runtime_error for a wrong checksum, a cut record, or bytes that are no message.
[[nodiscard]] std::vector<Event> parse_events(std::string_view bytes);

}  // namespace stepgraph::testing
