#pragma once
#include <cstdint>
#include <filesystem>
#include <variant>

namespace stepgraph {

// What a model is trained on.
struct TokenFile {
  std::filesystem::path path                                 = {};  // of u16, little endian
  friend bool operator==(const TokenFile&, const TokenFile&) = default;
};
struct TextFile {
  std::filesystem::path path                               = {};  // each byte is a token
  friend bool operator==(const TextFile&, const TextFile&) = default;
};
struct SyntheticTokens {
  std::uint64_t seed                                                     = 0;
  friend bool operator==(const SyntheticTokens&, const SyntheticTokens&) = default;
};
using DataSpec = std::variant<TokenFile, TextFile, SyntheticTokens>;

}  // namespace stepgraph
