#include "ops/cpu/instructions.hpp"

#include <cstdlib>

#include "engine/base/error.hpp"

namespace stepgraph::cpu {
namespace {

Instructions choose() {
  if (const char* const name = std::getenv("STEPGRAPH_INSTRUCTIONS"); name != nullptr && *name != '\0') {
    for (const Instructions each : all_instructions) {
      if (to_string(each) == name && has(each)) return each;
    }
    throw Error(ErrorKind::config,
                str("STEPGRAPH_INSTRUCTIONS is '", name, "', which this machine does not have (build, avx2, avx512)"));
  }
  for (const Instructions each : {Instructions::avx512, Instructions::avx2}) {
    if (has(each)) return each;
  }
  return Instructions::of_the_build;
}

}  // namespace

std::string_view to_string(Instructions instructions) noexcept {
  switch (instructions) {
    case Instructions::avx2:
      return "avx2";
    case Instructions::avx512:
      return "avx512";
    default:
      return "build";
  }
}

bool has(Instructions instructions) noexcept {
  switch (instructions) {
    case Instructions::of_the_build:
      return true;
#ifdef __x86_64__
    case Instructions::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    case Instructions::avx512:
      return has(Instructions::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
    default:
      break;
#endif
  }
  return false;
}

Instructions best_instructions() {
  static const Instructions best = choose();
  return best;
}

}  // namespace stepgraph::cpu
