#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace stepgraph {

// Little-endian integers.
enum class TokenType : std::uint8_t { u16, u32 };
[[nodiscard]] std::string_view to_string(TokenType type) noexcept;

// Sources of tokens. Several files are one stream, in their order.
struct TokenFiles {
  std::vector<std::filesystem::path> paths                     = {};
  std::optional<TokenType> type                                = {};  // none: u32 where a name ends in .u32, else u16
  friend bool operator==(const TokenFiles&, const TokenFiles&) = default;
};
struct TextFiles {
  std::vector<std::filesystem::path> paths                   = {};  // each byte is a token
  friend bool operator==(const TextFiles&, const TextFiles&) = default;
};
struct SyntheticTokens {
  std::uint64_t seed                                                     = 0;
  friend bool operator==(const SyntheticTokens&, const SyntheticTokens&) = default;
};
using DataSource = std::variant<TokenFiles, TextFiles, SyntheticTokens>;

// A sequence of tokens with random access. Tokens are checked when they are read; errors are Error(config) and name the
// file and position. Thread-safe for concurrent reads.
//
// Synthetic tokens have no end. They come in blocks of 64. The first token of a block is random. Each later token is
// a * t + c modulo the vocabulary, where t is the token before it and the seed determines a and c; one in eight is
// random instead. A model can learn all but the random ones: its best loss is about log(vocab) / 7 + 0.37.
class TokenData {
 public:
  TokenData(DataSource source, std::int64_t vocab);  // tokens are below `vocab`
  TokenData(TokenData&&) noexcept;
  TokenData& operator=(TokenData&&) noexcept;
  ~TokenData();

  [[nodiscard]] const DataSource& source() const noexcept { return source_; }
  [[nodiscard]] std::optional<std::int64_t> num_tokens() const noexcept { return num_tokens_; }  // none: no end

  // The subject of messages: the first file.
  [[nodiscard]] std::string subject() const;

  // Reads out.size() tokens from `begin` on.
  void read(std::int64_t begin, std::span<std::int32_t> out) const;

 private:
  struct Part;  // a file of the stream
  void read_files(std::int64_t begin, std::span<std::int32_t> out) const;
  void read_synthetic(std::int64_t begin, std::span<std::int32_t> out) const;

  DataSource source_;
  std::int64_t vocab_ = 0;
  std::vector<Part> parts_;  // none: synthetic
  std::optional<std::int64_t> num_tokens_;
  std::uint64_t factor_ = 0, offset_ = 0;  // a and c
};

}  // namespace stepgraph
