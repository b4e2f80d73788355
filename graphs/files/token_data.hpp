#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>

namespace stepgraph {

class InputFile;

// Sources of training data.
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

// A sequence of tokens with random access. The constructor checks all tokens of a file; errors are Error(config) and
// name the file and position. Thread-safe for concurrent reads.
//
// Synthetic tokens have no end. They come in blocks of 64. The first token of a block is random. Each later token is
// a * t + c modulo the vocabulary, where t is the token before it and the seed determines a and c; one in eight is
// random instead. A model can learn all but the random ones: its best loss is about log(vocab) / 7 + 0.37.
class TokenData {
 public:
  TokenData(DataSpec spec, std::int64_t vocab);  // tokens are below `vocab`
  TokenData(TokenData&&) noexcept;
  TokenData& operator=(TokenData&&) noexcept;
  ~TokenData();

  [[nodiscard]] const DataSpec& spec() const noexcept { return spec_; }
  [[nodiscard]] std::optional<std::int64_t> num_tokens() const noexcept { return num_tokens_; }  // none: no end

  // Number of whole steps: step s takes the tokens from s * tokens_per_step on, plus one more as its last target.
  // Throws Error(config) if the data is too short for one step.
  [[nodiscard]] std::int64_t num_steps(std::int64_t tokens_per_step) const;

  // Reads out.size() tokens from `begin` on.
  void read(std::int64_t begin, std::span<std::int32_t> out) const;

 private:
  [[nodiscard]] std::string subject() const;
  void read_file(std::int64_t begin, std::span<std::int32_t> out) const;
  void read_synthetic(std::int64_t begin, std::span<std::int32_t> out) const;

  DataSpec spec_;
  std::int64_t vocab_ = 0;
  std::unique_ptr<InputFile> file_;  // none: synthetic
  std::int64_t token_bytes_ = 0;     // of one token in the file
  std::optional<std::int64_t> num_tokens_;
  std::uint64_t factor_ = 0, offset_ = 0;  // a and c
};

}  // namespace stepgraph
