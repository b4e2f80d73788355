#define STEPGRAPH_AVX2
#include "ops/cpu/attention/attention_backward.cpp"  // compiled for these instructions
#if defined(__clang__)
#pragma clang attribute pop
#endif
