#include "graphs/files/token_data.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "engine/base/error.hpp"
#include "graphs/files/files.hpp"
#include "ops/tape/counter_random.hpp"

namespace stepgraph {
namespace {

constexpr std::int64_t block = 64;                     // synthetic tokens
constexpr std::int64_t piece = std::int64_t{1} << 16;  // tokens of one read

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::config, message); }

}  // namespace

TokenData::TokenData(DataSpec spec, std::int64_t vocab) : spec_(std::move(spec)), vocab_(vocab) {
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  if (vocab < 1 || vocab > most) refuse(str("data: a vocabulary of ", vocab, " tokens (1 to ", most, ")"));
  if (const auto* synthetic = std::get_if<SyntheticTokens>(&spec_)) {
    // A factor coprime to the vocabulary size permutes the vocabulary, so no token disappears inside a block.
    const std::uint64_t key = derived_key(name_key("synthetic tokens"), synthetic->seed);
    const auto size         = static_cast<std::uint64_t>(vocab);
    factor_                 = random_bits(key, 0) % size;
    while (std::gcd(factor_, size) != 1) factor_ = (factor_ + 1) % size;
    offset_ = random_bits(key, 1) % size;
    return;
  }
  const auto* tokens = std::get_if<TokenFile>(&spec_);
  file_              = std::make_unique<InputFile>(tokens ? tokens->path : std::get<TextFile>(spec_).path);
  token_bytes_       = tokens ? 2 : 1;
  if (file_->num_bytes() == 0) refuse(str(subject(), ": is empty (", tokens ? "tokens of 2 bytes" : "text", ")"));
  if (file_->num_bytes() % token_bytes_ != 0)
    refuse(str(subject(), ": has ", file_->num_bytes(), " bytes (an even number: each token is 2 bytes)"));
  if (!tokens && vocab < 256)
    refuse(str(subject(), ": bytes of text need a vocabulary of at least 256 tokens, but the model has ", vocab));
  num_tokens_ = file_->num_bytes() / token_bytes_;
  if (!tokens || vocab > std::numeric_limits<std::uint16_t>::max()) return;  // every token is in range
  std::vector<std::int32_t> some(static_cast<std::size_t>(std::min(piece, *num_tokens_)));
  for (std::int64_t begin = 0; begin < *num_tokens_; begin += piece)
    read(begin, std::span(some).first(static_cast<std::size_t>(std::min(piece, *num_tokens_ - begin))));
}

TokenData::TokenData(TokenData&&) noexcept            = default;
TokenData& TokenData::operator=(TokenData&&) noexcept = default;
TokenData::~TokenData()                               = default;

std::string TokenData::subject() const { return file_ ? file_->name() : "synthetic data"; }

std::int64_t TokenData::num_steps(std::int64_t tokens_per_step) const {
  if (tokens_per_step < 1) refuse(str(subject(), ": ", tokens_per_step, " tokens per step (1 or more)"));
  const std::int64_t steps = (num_tokens_.value_or(std::numeric_limits<std::int64_t>::max()) - 1) / tokens_per_step;
  if (steps == 0)
    refuse(str(subject(), ": has ", *num_tokens_, " tokens, but one step needs ", tokens_per_step,
               " and one more as the last target (a longer file, or a smaller batch)"));
  return steps;
}

void TokenData::read(std::int64_t begin, std::span<std::int32_t> out) const {
  const std::int64_t end = num_tokens_.value_or(std::numeric_limits<std::int64_t>::max());
  const auto wanted      = static_cast<std::int64_t>(out.size());
  if (begin < 0 || begin > end || wanted > end - begin)
    refuse(str(subject(), ": ", wanted, " tokens were requested from token ", begin, " on, but there are ", end));
  if (file_) {
    read_file(begin, out);
  } else {
    read_synthetic(begin, out);
  }
}

// Tokens are checked again because the file may have changed, and a token is used as an index.
void TokenData::read_file(std::int64_t begin, std::span<std::int32_t> out) const {
  std::vector<unsigned char> bytes(std::min(out.size(), static_cast<std::size_t>(piece)) *
                                   static_cast<std::size_t>(token_bytes_));
  while (!out.empty()) {
    const std::size_t now = std::min(out.size(), static_cast<std::size_t>(piece));
    const auto part       = std::span(bytes).first(now * static_cast<std::size_t>(token_bytes_));
    file_->read(begin * token_bytes_, std::as_writable_bytes(part));
    for (std::size_t i = 0; i < now; ++i) out[i] = token_bytes_ == 1 ? part[i] : part[2 * i] | part[2 * i + 1] << 8;
    const auto bad = std::ranges::find_if(out.first(now), [&](std::int32_t token) { return token >= vocab_; });
    if (bad != out.begin() + static_cast<std::ptrdiff_t>(now))
      refuse(str(subject(), ": token ", begin + (bad - out.begin()), " is ", *bad, ", but the vocabulary has ", vocab_,
                 " tokens (0 to ", vocab_ - 1, ")"));
    out = out.subspan(now);
    begin += static_cast<std::int64_t>(now);
  }
}

void TokenData::read_synthetic(std::int64_t begin, std::span<std::int32_t> out) const {
  const std::uint64_t key = derived_key(name_key("synthetic data"), std::get<SyntheticTokens>(spec_).seed);
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
