#include "ops/cpu/gemm/x86/bf16.hpp"

// Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c. Tile instructions are written as assembly: the
// intrinsics of some compilers do not tell that they read memory, so stores before them could be moved behind them.
namespace stepgraph::cpu {
namespace {

struct AmxTiles {
  // Tiles belong to a thread. While they are set up, the system saves them when it switches threads.
  static void begin() {
    struct Setup {
      std::uint8_t palette = 1, start_row = 0, unused[14] = {};
      std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16]       = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    static_assert(sizeof(Setup) == 64);
    alignas(64) const Setup setup;
    asm volatile("ldtilecfg %0" : : "m"(setup) : "memory");
  }
  static void end() { asm volatile("tilerelease" : : : "memory"); }
  template <int tile>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(tile) : "memory");
  }
  template <int tile>
  static void load(const void* from, std::int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(tile), "r"(from), "r"(stride) : "memory");
  }
  template <int sums, int a, int b>
  static void add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(a), "i"(b) : "memory");
  }
  template <int tile>
  static void store(void* to, std::int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(tile), "r"(to), "r"(stride) : "memory");
  }
};

}  // namespace

template <class Out>
void multiply_amx(Bf16Room& room, const Bf16Product<Out>& product, const PartDone& done) {
  multiply_bf16<TileKernel<AmxTiles>>(room, product, done);
}
template void multiply_amx(Bf16Room&, const Bf16Product<float>&, const PartDone&);
template void multiply_amx(Bf16Room&, const Bf16Product<bf16>&, const PartDone&);

}  // namespace stepgraph::cpu
