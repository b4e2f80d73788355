#pragma once

// Kernels that use vectors of the processor's width are compiled for each kind of instructions of x86-64: a file
// defines STEPGRAPH_AVX2 or STEPGRAPH_AVX512 and includes the file of the kernel. All that follows this header is
// compiled for these instructions and lies in the inline namespace STEPGRAPH_LEVEL. Headers that are not written for it
// must come before: older processors run their inline functions too.
#if defined(STEPGRAPH_AVX512)
#define STEPGRAPH_LEVEL avx512
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif
#elif defined(STEPGRAPH_AVX2)
#define STEPGRAPH_LEVEL avx2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#else
#define STEPGRAPH_LEVEL of_the_build
#endif
// The included file counts as a header; and GCC compares vectors with the instructions of the command line.
#if !defined(__clang__) && (defined(STEPGRAPH_AVX2) || defined(STEPGRAPH_AVX512))
#pragma GCC diagnostic ignored "-Wsubobject-linkage"
#pragma GCC diagnostic ignored "-Wpsabi"
#endif
