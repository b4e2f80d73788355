#include "ops/cpu/instructions.hpp"

#include <cstdlib>
#include <string>

#include "engine/base/error.hpp"
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif

namespace stepgraph::cpu {
namespace {

// On a Xeon, VDPBF16PS has half the rate of FMAs: training in bf16 was slower than with avx512, which widens operands
// to fp32. Other processors with this instruction have not been measured. No processor with SVE has been measured: with
// vectors of 128 bits SVE has no more operations per cycle than NEON, and a Neoverse V1 (256 bits) has as many with
// both.
bool only_by_name(Instructions instructions) {
  return instructions == Instructions::avx512_bf16 || instructions == Instructions::sve;
}

Instructions choose() {
  if (const char* const name = std::getenv("STEPGRAPH_INSTRUCTIONS"); name != nullptr && *name != '\0') {
    std::string known;
    bool exists = false;
    for (const Instructions each : all_instructions) {
      if (has(each)) {
        if (to_string(each) == name) return each;
        known += str(known.empty() ? "" : ", ", to_string(each));
      }
      exists = exists || to_string(each) == name;
    }
    throw Error(ErrorKind::config, str("STEPGRAPH_INSTRUCTIONS: '", name, "' ",
                                       exists ? "is not available on this machine (" : "does not exist (", known, ")"));
  }
  Instructions best = Instructions::of_the_build;
  for (const Instructions each : all_instructions) {
    if (!only_by_name(each) && has(each)) best = each;  // has(amx) asks the system for permission
  }
  return best;
}

#if defined(__x86_64__)
// Tiles need a processor with AMX-TILE and AMX-BF16, a system that saves their state (XCR0 bits 17 and 18), and its
// permission for this process. Without permission the first tile instruction would be illegal.
bool may_use_tiles() noexcept {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned osxsave = 1U << 27, amx_bf16 = 1U << 22, amx_tile = 1U << 24;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & osxsave) == 0) return false;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & amx_bf16) == 0 || (d & amx_tile) == 0) return false;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned tile_state = 3U << 17;
  if ((low & tile_state) != tile_state) return false;
  constexpr long get_permission = 0x1022, request_permission = 0x1023, tile_data = 18;  // asm/prctl.h of Linux 5.16
  unsigned long allowed = 0;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0 &&
         syscall(SYS_arch_prctl, get_permission, &allowed) == 0 && (allowed >> tile_data & 1) != 0;
}
#endif

#if defined(STEPGRAPH_HAS_SVE) && defined(__linux__)
// The system tells the length of vectors without an instruction that other processors do not have.
bool has_sve() noexcept {
  constexpr unsigned long sve_bit = 1UL << 22;           // HWCAP_SVE
  constexpr int get_length = 51, length_bytes = 0xffff;  // PR_SVE_GET_VL, PR_SVE_VL_LEN_MASK
  if ((getauxval(AT_HWCAP) & sve_bit) == 0) return false;
  const int found = prctl(get_length);
  if (found < 0) return false;
  const int bytes = found & length_bytes;
  return bytes == 16 || bytes == 32 || bytes == 64;
}
#endif

}  // namespace

std::string_view to_string(Instructions instructions) noexcept {
  switch (instructions) {
    case Instructions::neon:
      return "neon";
    case Instructions::neon_bf16:
      return "neon-bf16";
    case Instructions::sve:
      return "sve";
    case Instructions::avx2:
      return "avx2";
    case Instructions::avx512:
      return "avx512";
    case Instructions::avx512_bf16:
      return "avx512-bf16";
    case Instructions::amx:
      return "amx";
    default:
      return "build";
  }
}

bool has(Instructions instructions) noexcept {
  switch (instructions) {
    case Instructions::of_the_build:
      return true;
#if defined(__x86_64__)
    case Instructions::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    case Instructions::avx512:
      return has(Instructions::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case Instructions::avx512_bf16:
      return has(Instructions::avx512) && __builtin_cpu_supports("avx512bf16");
    case Instructions::amx: {
      static const bool allowed = has(Instructions::avx512) && may_use_tiles();
      return allowed;
    }
    default:
      break;
#elif defined(__aarch64__)
    case Instructions::neon:
      return true;
#ifdef __linux__
    case Instructions::neon_bf16: {
      constexpr unsigned long bf16_bit = 1UL << 14;  // HWCAP2_BF16
      return (getauxval(AT_HWCAP2) & bf16_bit) != 0;
    }
#ifdef STEPGRAPH_HAS_SVE
    case Instructions::sve: {
      static const bool found = has_sve();
      return found;
    }
#endif
#endif
    default:
      break;
#else
    default:
      break;
#endif
  }
  return false;
}

Instructions product_instructions() {
  static const Instructions best = choose();
  return best;
}

Instructions best_instructions() {
  switch (const Instructions best = product_instructions()) {
    case Instructions::avx512_bf16:
    case Instructions::amx:
      return Instructions::avx512;
    case Instructions::neon:
    case Instructions::neon_bf16:
    case Instructions::sve:
      return Instructions::of_the_build;
    default:
      return best;
  }
}

}  // namespace stepgraph::cpu
