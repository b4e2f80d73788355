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

// A long row of tokens, read at any position. A file is checked to its end when it is opened; throws Error(config) that
// names the file and, where there is one, the position. Threads may read at once.
//
// Synthetic tokens never end. They come in blocks of 64: the first of a block is random, each next one is a * t + c
// modulo the vocabulary, with a and c from the seed, but for one in eight, which is random. A model can learn all but
// those: its best loss is about log(vocab) / 7 + 0.37.
class TokenData {
 public:
  TokenData(DataSpec spec, std::int64_t vocab);  // tokens are below `vocab`
  TokenData(TokenData&&) noexcept;
  TokenData& operator=(TokenData&&) noexcept;
  ~TokenData();

  [[nodiscard]] const DataSpec& spec() const noexcept { return spec_; }
  [[nodiscard]] std::optional<std::int64_t> num_tokens() const noexcept { return num_tokens_; }  // none: no end

  // Steps of so many tokens each: step s takes the tokens from s * tokens_per_step on, and one more as its last target.
  // Refuses data that is too short for one.
  [[nodiscard]] std::int64_t num_steps(std::int64_t tokens_per_step) const;

  // The tokens from `begin` on.
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
