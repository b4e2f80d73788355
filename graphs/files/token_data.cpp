#include "graphs/files/token_data.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "engine/base/error.hpp"
#include "graphs/files/files.hpp"
#include "ops/tape/counter_random.hpp"

namespace stepgraph {
namespace {

constexpr std::int64_t block = 64;                     // synthetic tokens
constexpr std::int64_t piece = std::int64_t{1} << 16;  // tokens of one read

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::config, message); }

// Bytes of a token in a file.
int bytes_of(const TokenFiles& files, const std::filesystem::path& path) {
  const TokenType by_name = path.extension() == ".u32" ? TokenType::u32 : TokenType::u16;
  return files.type.value_or(by_name) == TokenType::u32 ? 4 : 2;
}

}  // namespace

std::string_view to_string(TokenType type) noexcept { return type == TokenType::u16 ? "u16" : "u32"; }

struct TokenData::Part {
  InputFile file;
  int token_bytes;
  std::int64_t begin, end;  // in the stream
};

TokenData::TokenData(DataSource source, std::int64_t vocab) : source_(std::move(source)), vocab_(vocab) {
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  if (vocab < 1 || vocab > most) refuse(str("data: a vocabulary of ", vocab, " tokens (1 to ", most, ")"));
  if (const auto* synthetic = std::get_if<SyntheticTokens>(&source_)) {
    // A factor coprime to the vocabulary size permutes the vocabulary, so no token disappears inside a block.
    const std::uint64_t key = derived_key(name_key("synthetic tokens"), synthetic->seed);
    const auto size         = static_cast<std::uint64_t>(vocab);
    factor_                 = random_bits(key, 0) % size;
    while (std::gcd(factor_, size) != 1) factor_ = (factor_ + 1) % size;
    offset_ = random_bits(key, 1) % size;
    return;
  }
  const auto* tokens = std::get_if<TokenFiles>(&source_);
  const auto& paths  = tokens ? tokens->paths : std::get<TextFiles>(source_).paths;
  if (paths.empty()) refuse("data: the list of files is empty (one file or more)");
  num_tokens_ = 0;
  for (const std::filesystem::path& path : paths) {
    InputFile file(path);
    const int size = tokens ? bytes_of(*tokens, path) : 1;
    if (file.num_bytes() == 0)
      refuse(str(file.name(), ": is empty (", tokens ? str("tokens of ", size, " bytes") : "text", ")"));
    if (file.num_bytes() % size != 0)
      refuse(str(file.name(), ": has ", file.num_bytes(), " bytes (",
                 size == 2 ? "an even number" : str("a multiple of ", size), ": each token is ", size, " bytes)"));
    if (!tokens && vocab < 256)
      refuse(str(file.name(), ": bytes of text need a vocabulary of at least 256 tokens, but the model has ", vocab));
    const std::int64_t end = *num_tokens_ + file.num_bytes() / size;
    parts_.push_back({std::move(file), size, *num_tokens_, end});
    num_tokens_ = end;
  }
}

TokenData::TokenData(TokenData&&) noexcept            = default;
TokenData& TokenData::operator=(TokenData&&) noexcept = default;
TokenData::~TokenData()                               = default;

std::string TokenData::subject() const {
  if (parts_.empty()) return "synthetic data";
  const std::string more = parts_.size() == 1 ? "" : str(" and ", parts_.size() - 1, " more");
  return parts_.front().file.name() + more;
}

void TokenData::read(std::int64_t begin, std::span<std::int32_t> out) const {
  const std::int64_t end = num_tokens_.value_or(std::numeric_limits<std::int64_t>::max());
  const auto wanted      = static_cast<std::int64_t>(out.size());
  if (begin < 0 || begin > end || wanted > end - begin)
    refuse(str(subject(), ": ", wanted, " tokens were requested from token ", begin, " on, but there are ", end));
  if (parts_.empty()) {
    read_synthetic(begin, out);
  } else {
    read_files(begin, out);
  }
}

void TokenData::read_files(std::int64_t begin, std::span<std::int32_t> out) const {
  std::vector<unsigned char> bytes;
  auto part = std::ranges::upper_bound(parts_, begin, {}, &Part::end);
  for (; !out.empty(); ++part) {
    while (!out.empty() && begin < part->end) {
      const auto now   = static_cast<std::size_t>(std::min({std::ssize(out), piece, part->end - begin}));
      const auto size  = static_cast<std::size_t>(part->token_bytes);
      const auto first = begin - part->begin;
      bytes.resize(now * size);
      part->file.read(first * part->token_bytes, std::as_writable_bytes(std::span(bytes)));
      for (std::size_t i = 0; i < now; ++i) {
        std::uint32_t token = 0;
        for (std::size_t k = 0; k < size; ++k) token |= std::uint32_t{bytes[i * size + k]} << (8 * k);
        if (token >= static_cast<std::uint64_t>(vocab_))
          refuse(str(part->file.name(), ": token ", first + static_cast<std::int64_t>(i), " is ", token,
                     ", but the vocabulary has ", vocab_, " tokens (0 to ", vocab_ - 1, ")"));
        out[i] = static_cast<std::int32_t>(token);
      }
      out = out.subspan(now);
      begin += static_cast<std::int64_t>(now);
    }
  }
}

void TokenData::read_synthetic(std::int64_t begin, std::span<std::int32_t> out) const {
  const std::uint64_t key = derived_key(name_key("synthetic data"), std::get<SyntheticTokens>(source_).seed);
  const auto size         = static_cast<std::uint64_t>(vocab_);
  const auto skip         = static_cast<std::size_t>(begin % block);  // a block is made from its first token
  std::uint64_t token     = 0;
  for (std::size_t i = 0; i < skip + out.size(); ++i) {
    const std::uint64_t position = static_cast<std::uint64_t>(begin) - skip + i;
    const std::uint64_t bits     = random_bits(key, position);
    const bool random            = position % block == 0 || bits >> 61 == 0;  // three bits: one in eight
    token                        = random ? mix_bits(bits) % size : (factor_ * token + offset_) % size;
    if (i >= skip) out[i - skip] = static_cast<std::int32_t>(token);
  }
}

}  // namespace stepgraph
