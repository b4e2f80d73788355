#pragma once
#include <cstdint>
#include <string>

namespace stepgraph {

// Where tokens come from, as `data` in a config has it.
struct DataSpec {
  enum class Kind : std::uint8_t {
    tokens,     // a file of unsigned 16-bit numbers, little-endian
    text,       // a file whose bytes are the tokens
    synthetic,  // made from a seed; there is no end of them
  };
  Kind kind          = Kind::synthetic;
  std::string path   = {};  // tokens and text
  std::uint64_t seed = 0;   // synthetic

  friend bool operator==(const DataSpec&, const DataSpec&) = default;
};

}  // namespace stepgraph
