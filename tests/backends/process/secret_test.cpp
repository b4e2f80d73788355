#include "backends/process/secret.hpp"

#include <catch2/catch_test_macros.hpp>
#include <string>
#include <vector>

namespace sg = stepgraph;

namespace {

std::string hex(const sg::Digest& digest) {
  static constexpr char digits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : digest) {
    text += digits[std::to_integer<unsigned>(byte) >> 4];
    text += digits[std::to_integer<unsigned>(byte) & 15];
  }
  return text;
}

std::span<const std::byte> bytes(const std::string& text) { return std::as_bytes(std::span(text)); }
std::string sha(const std::string& text) { return hex(sg::sha256(bytes(text))); }
std::string mac(const std::string& key, const std::string& text) {
  return hex(sg::hmac_sha256(bytes(key), bytes(text)));
}

}  // namespace

TEST_CASE("SHA-256 has the digests of FIPS 180", "[backends][process]") {
  CHECK(sha("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(sha("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(sha("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(sha(std::string(1'000'000, 'a')) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_CASE("SHA-256 pads texts around the ends of blocks", "[backends][process]") {
  // From Python's hashlib.
  CHECK(sha(std::string(55, 'x')) == "d5e285683cd4efc02d021a5c62014694958901005d6f71e89e0989fac77e4072");
  CHECK(sha(std::string(56, 'x')) == "04c26261370ee7541549d16dee320c723e3fd14671e66a099afe0a377c16888e");
  CHECK(sha(std::string(63, 'x')) == "75220b47218278e656f2013bb8f0c455a25eaf01e86c64924e9d48d89776d6f2");
  CHECK(sha(std::string(64, 'x')) == "7ce100971f64e7001e8fe5a51973ecdfe1ced42befe7ee8d5fd6219506b5393c");
  CHECK(sha(std::string(119, 'x')) == "000b48d4edf0fa7bee3c6236ecd2785baa5db4eeb8bb54341b029e0d9fa5fb0c");
  CHECK(sha(std::string(120, 'x')) == "13f05a0b594787f5ecd315edc96141bd3243203d1b7d4f0836f37308b276ba98");
}

TEST_CASE("HMAC-SHA-256 has the codes of RFC 4231", "[backends][process]") {
  CHECK(mac(std::string(20, '\x0b'), "Hi There") == "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK(mac("Jefe", "what do ya want for nothing?") ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(mac(std::string(20, '\xaa'), std::string(50, '\xdd')) ==
        "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::string counted;
  for (char byte = 1; byte <= 25; ++byte) counted += byte;
  CHECK(mac(counted, std::string(50, '\xcd')) == "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  CHECK(mac(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First") ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK(mac(std::string(131, '\xaa'),
            "This is a test using a larger than block-size key and a larger than block-size data. The key needs to be "
            "hashed before being used by the HMAC algorithm.") ==
        "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST_CASE("a proof depends on the side, the key, both nonces and the text", "[backends][process]") {
  const sg::Digest key = sg::job_key("secret", "job");
  const sg::Nonce a = sg::random_nonce(), b = sg::random_nonce();
  REQUIRE(a != b);
  const sg::Digest proof = sg::proof_of(sg::ProofSide::client, key, a, b, bytes("text"));
  CHECK(sg::equal_in_constant_time(proof, sg::proof_of(sg::ProofSide::client, key, a, b, bytes("text"))));
  const std::vector<sg::Digest> others = {
      sg::proof_of(sg::ProofSide::server, key, a, b, bytes("text")),
      sg::proof_of(sg::ProofSide::client, sg::job_key("Secret", "job"), a, b, bytes("text")),
      sg::proof_of(sg::ProofSide::client, sg::job_key("secret", "other job"), a, b, bytes("text")),
      sg::proof_of(sg::ProofSide::client, key, b, a, bytes("text")),
      sg::proof_of(sg::ProofSide::client, key, a, a, bytes("text")),
      sg::proof_of(sg::ProofSide::client, key, a, b, bytes("texts")),
  };
  for (const sg::Digest& other : others) CHECK_FALSE(sg::equal_in_constant_time(proof, other));
}

TEST_CASE("digests that differ in one bit are not equal", "[backends][process]") {
  const sg::Digest digest = sg::sha256({});
  for (std::size_t i = 0; i < digest.size(); ++i) {
    sg::Digest other = digest;
    other[i] ^= std::byte{1};
    CHECK_FALSE(sg::equal_in_constant_time(digest, other));
  }
}

TEST_CASE("random secrets are 64 hexadecimal digits and differ", "[backends][process]") {
  const std::string one = sg::random_secret();
  CHECK(one.size() == 64);
  CHECK(one.find_first_not_of("0123456789abcdef") == std::string::npos);
  CHECK(one != sg::random_secret());
}
