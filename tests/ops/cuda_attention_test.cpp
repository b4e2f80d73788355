#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cstdint>
#include <ostream>
#include <vector>

#include "ops/attention.hpp"
#include "tests/support/device_case.hpp"
#include "tests/support/op_case.hpp"

namespace sg = stepgraph;
using sg::testing::OpCase;

namespace {

struct Shape {
  std::int64_t sequences, seq, heads, kv_heads, head_size;
  double rate = 0;
};
std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << s.sequences << " x " << s.seq << ", heads " << s.heads << "/" << s.kv_heads << " of " << s.head_size
             << ", dropout " << s.rate;
}

OpCase attention_case(const Shape& s) {
  OpCase test = {.inputs    = {{s.sequences * s.seq, (s.heads + 2 * s.kv_heads) * s.head_size}},
                 .sequences = s.sequences,
                 .seq       = s.seq,
                 .build =
                     [=](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
                       return sg::attention(
                           tape, {.qkv     = in[0],
                                  .heads   = {.heads = s.heads, .kv_heads = s.kv_heads, .head_size = s.head_size},
                                  .scale   = 0.25,
                                  .dropout = {.rate = s.rate, .site = s.rate > 0 ? "attention" : ""}});
                     },
                 .range = 2};
  if (s.rate > 0) test.step = 5;
  return test;
}

}  // namespace

TEST_CASE("attention on a CUDA device is that on the CPU, for any shape", "[ops][cuda][attention]") {
  const Shape s = GENERATE(Shape{1, 1, 1, 1, 1}, Shape{3, 33, 6, 1, 5}, Shape{2, 70, 4, 2, 20}, Shape{2, 131, 6, 3, 32},
                           Shape{1, 64, 2, 2, 64}, Shape{2, 129, 4, 1, 64}, Shape{1, 200, 2, 2, 96},
                           Shape{1, 257, 4, 2, 128}, Shape{1, 65, 2, 1, 200}, Shape{1, 100, 2, 2, 256});
  CAPTURE(s);
  sg::testing::check_on_device(attention_case(s));
}

TEST_CASE("attention on a CUDA device drops the probabilities that the CPU drops", "[ops][cuda][attention]") {
  const Shape s = GENERATE(Shape{1, 1, 2, 1, 4, 0.5}, Shape{2, 70, 4, 2, 20, 0.3}, Shape{2, 131, 6, 3, 64, 0.1},
                           Shape{1, 130, 2, 2, 128, 0.2}, Shape{1, 40, 2, 1, 256, 0.2});
  CAPTURE(s);
  sg::testing::check_on_device(attention_case(s));
}

TEST_CASE("attention on a CUDA device takes whole tiles of long sequences", "[ops][cuda][attention]") {
  const Shape s = GENERATE(Shape{2, 512, 4, 4, 64}, Shape{1, 384, 4, 2, 128});
  CAPTURE(s);
  sg::testing::check_on_device(attention_case(s));
}

TEST_CASE("attention on a CUDA device computes f64 in f64", "[ops][cuda][attention]") {
  const Shape s = GENERATE(Shape{2, 70, 4, 2, 20}, Shape{1, 97, 2, 1, 128, 0.2}, Shape{1, 40, 2, 2, 256});
  CAPTURE(s);
  sg::testing::check_on_device(attention_case(s), {sg::DType::f64});
}
