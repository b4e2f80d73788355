#include "ops/cpu/gemm/x86/panels.hpp"

// The blocks of ops/cpu/gemm/x86/avx512.cpp with vectors in plain C++, for machines and emulators without AVX-512.
// Packing is that of AVX2, for which this file is compiled.
namespace stepgraph::cpu {
namespace {

struct PlainLanes : PackEights {
  static constexpr int size = 16;
  struct Vector {
    float at[size];
  };
  using Mask = std::int64_t;  // the number of lanes; may be negative or too large
  static Vector zero() { return {}; }
  static Vector all(float value) {
    return each([&](int) { return value; });
  }
  static Vector load(const float* from) { return load(from, size); }
  static Vector load(const float* from, Mask mask) {
    return each([&](int i) { return i < mask ? from[i] : 0.0F; });
  }
  static void store(float* to, const Vector& value) { store(to, value, size); }
  static void store(float* to, const Vector& value, Mask mask) {
    for (int i = 0; i < least(size, mask); ++i) to[i] = value.at[i];
  }
  static Vector add(const Vector& a, const Vector& b) {
    return each([&](int i) { return a.at[i] + b.at[i]; });
  }
  static Vector multiply(const Vector& a, const Vector& b) {
    return each([&](int i) { return a.at[i] * b.at[i]; });
  }
  static Vector multiply_add(const Vector& a, const Vector& b, const Vector& c) {
    return each([&](int i) { return __builtin_fmaf(a.at[i], b.at[i], c.at[i]); });
  }
  static constexpr int rows_from_memory = 4;
  static Vector multiply_add_all(const float& a, const Vector& b, const Vector& c) {
    return multiply_add(all(a), b, c);
  }
  static Mask mask(std::int64_t lanes) { return lanes; }

 private:
  template <class Lane>
  static Vector each(const Lane& lane) {
    Vector made;
    for (int i = 0; i < size; ++i) made.at[i] = lane(i);
    return made;
  }
};

}  // namespace

void multiply_plain_lanes(X86Blocks& packed, const PanelProduct<float>& product) {
  multiply_blocks<PlainLanes, 12, 2, X86Blocks::max_rows, X86Blocks::max_cols, 64>(packed, product, {});
}

}  // namespace stepgraph::cpu
