#pragma once
#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

// The proof that two processes belong to one job: both know its secret, and neither sends it.
namespace stepgraph {

using Digest = std::array<std::byte, 32>;
using Nonce  = std::array<std::byte, 32>;  // a number used once

[[nodiscard]] Digest sha256(std::span<const std::byte> bytes);                                       // FIPS 180-4
[[nodiscard]] Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> bytes);  // RFC 2104

// Compares all bytes, so the time does not tell where the first difference is.
[[nodiscard]] bool equal_in_constant_time(const Digest& a, const Digest& b) noexcept;

[[nodiscard]] Nonce random_nonce();         // from the system's generator; throws Error(backend)
[[nodiscard]] std::string random_secret();  // 64 hexadecimal digits

// The key of a job: from its secret and its name, so processes of another job with the same secret are strangers.
[[nodiscard]] Digest job_key(std::string_view secret, std::string_view job);

// What one side of a connection sends to prove that it has the key. Both nonces are in it, so an old proof is of no
// use. The side is in it, so the proof of one side is not a proof of the other. `text` is what this side says; it
// cannot be changed on the way.
enum class ProofSide : unsigned char { client = 1, server = 2 };
[[nodiscard]] Digest proof_of(ProofSide side, const Digest& key, const Nonce& client, const Nonce& server,
                              std::span<const std::byte> text);

}  // namespace stepgraph
