// One faulty kernel for each tool of compute-sanitizer: a tool that does not report it would not report others either.
// The argument is the tool.
#include <cuda_runtime.h>

#include <cstdio>
#include <string_view>

namespace stepgraph::cuda {
namespace {

constexpr int threads = 64;

__global__ void writes_past_the_end(int* values) { values[threadIdx.x] = 1; }

__global__ void reads_what_others_write(int* values) {
  __shared__ int shared[threads];
  shared[threadIdx.x] = static_cast<int>(threadIdx.x);
  values[threadIdx.x] = shared[threads - 1 - threadIdx.x];  // no barrier before
}

__global__ void reads_what_nobody_wrote(int* values) { values[threadIdx.x] += 1; }

__global__ void waits_in_half_of_the_threads(int* values) {
  if (threadIdx.x % 2 == 0) __syncthreads();
  values[threadIdx.x] = 1;
}

int run(std::string_view tool) {
  int* values = nullptr;
  if (cudaMalloc(&values, (tool == "memcheck" ? threads - 1 : threads) * sizeof(int)) != cudaSuccess) return 1;
  if (tool == "memcheck") {
    writes_past_the_end<<<1, threads>>>(values);
  } else if (tool == "racecheck") {
    reads_what_others_write<<<1, threads>>>(values);
  } else if (tool == "initcheck") {
    reads_what_nobody_wrote<<<1, threads>>>(values);
  } else if (tool == "synccheck") {
    waits_in_half_of_the_threads<<<1, threads>>>(values);
  } else {
    std::fprintf(stderr, "usage: stepgraph_sanitizer_control memcheck|racecheck|initcheck|synccheck\n");
    return 2;
  }
  cudaDeviceSynchronize();
  return 0;
}

}  // namespace
}  // namespace stepgraph::cuda

int main(int argc, char** argv) { return stepgraph::cuda::run(argc > 1 ? argv[1] : ""); }
