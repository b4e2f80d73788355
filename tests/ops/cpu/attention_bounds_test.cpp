#include <sys/mman.h>
#include <unistd.h>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cmath>

#include "ops/cpu/attention/attention.hpp"

namespace sg  = stepgraph;
namespace cpu = stepgraph::cpu;

namespace {

// Elements that end where memory ends: an access beyond the last one ends the process. Sanitizers do not see the
// accesses of assembly code.
template <class T>
class AtTheEnd {
 public:
  explicit AtTheEnd(std::int64_t size) : size_(static_cast<std::size_t>(size)) {
    const auto page  = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const auto bytes = (size_ * sizeof(T) + page - 1) / page * page;
    mapped_          = bytes + page;
    void* const map  = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(map != MAP_FAILED);
    begin_ = static_cast<std::byte*>(map);
    REQUIRE(mprotect(begin_ + bytes, page, PROT_NONE) == 0);
    data_ = reinterpret_cast<T*>(begin_ + bytes) - size_;
    for (std::size_t i = 0; i < size_; ++i) data_[i] = sg::narrow<T>(static_cast<sg::Wide<T>>(std::sin(i % 1009)));
  }
  AtTheEnd(const AtTheEnd&)            = delete;
  AtTheEnd& operator=(const AtTheEnd&) = delete;
  ~AtTheEnd() { munmap(begin_, mapped_); }
  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(size_); }

 private:
  std::size_t size_, mapped_ = 0;
  std::byte* begin_ = nullptr;
  T* data_          = nullptr;
};

}  // namespace

TEMPLATE_TEST_CASE("attention accesses nothing beyond its tensors and workspaces", "[ops][attention]", float, double,
                   sg::bf16, sg::f16) {
  using T         = TestType;
  using W         = sg::Wide<T>;
  const auto seq  = GENERATE(std::int64_t{4}, 64, 128, 131, 256);
  const auto size = GENERATE(std::int64_t{12}, 64);
  const sg::AttentionShape shape{.seq = seq, .heads = 2, .kv_heads = 1, .head_size = size, .scale = 0.7};
  CAPTURE(seq, size);
  const AtTheEnd<T> qkv(seq * shape.qkv_row()), out(seq * shape.out_row()), d_out(seq * shape.out_row()),
      d_qkv(seq * shape.qkv_row());
  const AtTheEnd<W> log_sums(seq * shape.heads), products(seq * shape.heads),
      workspace(cpu::attention_forward_workspace<T>(shape)),
      backward_workspace(cpu::attention_backward_workspace<T>(shape));
  const cpu::AttentionForward<T> forward{shape, qkv.data(), out.data(), log_sums.data()};
  for (std::int64_t head = 0; head < shape.heads; ++head)
    cpu::attention_forward(forward, cpu::HeadPart{0, head, 0, seq}, workspace.data());
  const cpu::AttentionBackward<T> backward{shape,           qkv.data(),   out.data(),
                                           log_sums.data(), d_out.data(), products.data()};
  cpu::attention_backward(backward, sg::Into<T>{d_qkv.data(), nullptr, d_qkv.size()}, 0, 0, backward_workspace.data());
  double sum = 0;
  for (std::int64_t i = 0; i < d_qkv.size(); ++i) sum += std::abs(static_cast<double>(sg::wide(d_qkv.data()[i])));
  CHECK(std::isfinite(sum));
  CHECK(sum > 0);
}
