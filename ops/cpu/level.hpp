#pragma once

// Kernels that use vectors of the processor's width are compiled for each kind of instructions of x86-64: a file
// defines STEPGRAPH_AVX2 or STEPGRAPH_AVX512 and includes the file of the kernel. All that follows this header is
// compiled for these instructions and lies in the inline namespace STEPGRAPH_LEVEL. Headers that are not written for it
// must come before: older processors run their inline functions too. On other machines such a file is compiled with
// vectors of the same width, which the compiler emulates; tests do that.

// The instructions of each kind. In AVX-512 GCC prefers vectors of half the width unless told otherwise. It does not
// expand macros in pragmas, so the pragmas below repeat the names.
#define STEPGRAPH_TARGET_AVX2 "avx2,fma,f16c"
#if defined(__clang__)
#define STEPGRAPH_TARGET_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#else
#define STEPGRAPH_TARGET_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512"
#endif

#if defined(STEPGRAPH_AVX512)
#define STEPGRAPH_LEVEL avx512
#if defined(__x86_64__) && defined(__clang__)
#pragma clang attribute push(__attribute__((target(STEPGRAPH_TARGET_AVX512))), apply_to = function)
#elif defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif
#elif defined(STEPGRAPH_AVX2)
#define STEPGRAPH_LEVEL avx2
#if defined(__x86_64__) && defined(__clang__)
#pragma clang attribute push(__attribute__((target(STEPGRAPH_TARGET_AVX2))), apply_to = function)
#elif defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#endif
#else
#define STEPGRAPH_LEVEL of_the_build
#if defined(__aarch64__)
#define STEPGRAPH_NEON  // what follows may use instructions of 64-bit Arm
#endif
#endif
// The included file counts as a header; and GCC compares vectors with the instructions of the command line.
#if !defined(__clang__) && (defined(STEPGRAPH_AVX2) || defined(STEPGRAPH_AVX512))
#pragma GCC diagnostic ignored "-Wsubobject-linkage"
#pragma GCC diagnostic ignored "-Wpsabi"
#endif
