#include "backends/process/secret.hpp"

#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/base/partial.hpp"

namespace stepgraph {
namespace {

constexpr std::size_t block_bytes = 64;

// FIPS 180-4, 4.2.2: the first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::array<std::uint32_t, 64> round_constants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using State = std::array<std::uint32_t, 8>;

// FIPS 180-4, 6.2.2.
void add_block(State& state, const std::byte* block) {
  std::array<std::uint32_t, 64> words{};
  for (std::size_t i = 0; i < 16; ++i)
    for (std::size_t k = 0; k < 4; ++k) words[i] = words[i] << 8 | static_cast<std::uint32_t>(block[4 * i + k]);
  for (std::size_t i = 16; i < 64; ++i) {
    const std::uint32_t a = words[i - 15], b = words[i - 2];
    words[i] = words[i - 16] + words[i - 7] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) +
               (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (std::size_t i = 0; i < 64; ++i) {
    const std::uint32_t first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) +
                                round_constants[i] + words[i];
    const std::uint32_t second =
        (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + first;
    d = c;
    c = b;
    b = a;
    a = first + second;
  }
  const State added = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < state.size(); ++i) state[i] += added[i];
}

void append(std::vector<std::byte>& to, std::span<const std::byte> bytes) {
  to.insert(to.end(), bytes.begin(), bytes.end());
}

void fill_random(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t done = ::getrandom(bytes.data(), bytes.size(), 0);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) throw Error(ErrorKind::backend, str("random numbers: ", system_reason(errno)));
    bytes = bytes.subspan(static_cast<std::size_t>(done));
  }
}

}  // namespace

Digest sha256(std::span<const std::byte> bytes) {
  State state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const std::uint64_t num_bits = std::uint64_t{bytes.size()} * 8;
  while (bytes.size() >= block_bytes) {
    add_block(state, bytes.data());
    bytes = bytes.subspan(block_bytes);
  }
  // The rest, a one bit, zeros, and the number of bits in 8 bytes.
  std::array<std::byte, 2 * block_bytes> end{};
  std::copy(bytes.begin(), bytes.end(), end.begin());
  end[bytes.size()]          = std::byte{0x80};
  const std::size_t num_last = bytes.size() + 9 <= block_bytes ? block_bytes : 2 * block_bytes;
  for (std::size_t i = 0; i < 8; ++i) end[num_last - 1 - i] = static_cast<std::byte>(num_bits >> (8 * i));
  for (std::size_t i = 0; i < num_last; i += block_bytes) add_block(state, end.data() + i);
  Digest digest;
  for (std::size_t i = 0; i < digest.size(); ++i)
    digest[i] = static_cast<std::byte>(state[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> bytes) {
  std::array<std::byte, block_bytes> padded{};
  if (key.size() > block_bytes) {
    const Digest shorter = sha256(key);
    std::copy(shorter.begin(), shorter.end(), padded.begin());
  } else {
    std::copy(key.begin(), key.end(), padded.begin());
  }
  std::vector<std::byte> inner, outer;
  for (const std::byte byte : padded) {
    inner.push_back(byte ^ std::byte{0x36});
    outer.push_back(byte ^ std::byte{0x5c});
  }
  append(inner, bytes);
  append(outer, sha256(inner));
  return sha256(outer);
}

bool equal_in_constant_time(const Digest& a, const Digest& b) noexcept {
  std::byte difference{};
  for (std::size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == std::byte{};
}

Nonce random_nonce() {
  Nonce nonce;
  fill_random(nonce);
  return nonce;
}

std::string random_secret() {
  static constexpr char digits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : random_nonce()) {
    text += digits[std::to_integer<unsigned>(byte) >> 4];
    text += digits[std::to_integer<unsigned>(byte) & 15];
  }
  return text;
}

Digest job_key(std::string_view secret, std::string_view job) {
  const std::string name = str("stepgraph job ", job);
  return hmac_sha256(std::as_bytes(std::span(secret)), std::as_bytes(std::span(name)));
}

Digest proof_of(ProofSide side, const Digest& key, const Nonce& client, const Nonce& server,
                std::span<const std::byte> text) {
  std::vector<std::byte> bytes{static_cast<std::byte>(side)};
  append(bytes, client);
  append(bytes, server);
  append(bytes, text);
  return hmac_sha256(key, bytes);
}

}  // namespace stepgraph
