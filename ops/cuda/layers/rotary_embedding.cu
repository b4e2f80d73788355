#include "ops/cuda/layers/rotary_embedding.hpp"

#include <algorithm>

#include "ops/cuda/common/map.cuh"
#include "ops/cuda/common/workspace.cuh"

namespace stepgraph::cuda {
namespace {

// Some of the frequencies, as a kernel argument.
struct Frequencies {
  static constexpr int most = 128;
  double at[most];
};

template <class W>
struct Turn {
  W cosine, sine;
};

// For positions from `first` on and frequencies from `begin` on. Rows of `half` turns; angles are computed in f64.
template <class W>
__global__ void angles_kernel(const Frequencies frequencies, int begin, int count, std::int64_t first,
                              std::int64_t positions, int half, double direction, Turn<W>* turns) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= positions * count) return;
  const auto [position, k] = split(i, count);
  double sine, cosine;
  sincos(static_cast<double>(first + position) * frequencies.at[k], &sine, &cosine);
  turns[position * half + begin + k] = {static_cast<W>(cosine), static_cast<W>(direction * sine)};
}

// Elements are pairs, numbered by the first halves of heads.
template <class N>
struct Rotate {
  const N* in;
  N* out;
  const Turn<Computed<N>>* turns;
  std::int64_t seq, row, pairs_per_row;  // in elements; rotated pairs
  int half;
  std::int64_t first, positions;  // range of positions in each sequence for which `turns` exist

  struct Place {
    std::int64_t at, turn;  // index in the rows; index in turns
  };
  __device__ Place place(std::int64_t i) const {
    const auto [r, pair]            = split(i, pairs_per_row);
    const auto [sequence, position] = split(r, positions);
    const auto [head, k]            = split(pair, half);
    return {(sequence * seq + first + position) * row + head * 2 * half + k, position * half + k};
  }
  template <int n>
  struct Loaded {
    Pack<N, n> a, b;
  };
  template <int n>
  __device__ Loaded<n> load(std::int64_t i) const {
    const std::int64_t at = place(i).at;
    return {load_pack<n>(in + at), load_pack<n>(in + at + half)};
  }
  template <int n>
  __device__ void finish(std::int64_t i, const Loaded<n>& from) const {
    const auto [at, turn] = place(i);
    Pack<N, n> a, b;
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const auto [cosine, sine] = turns[turn + k];
      const Computed<N> x = widen(from.a.at[k]), y = widen(from.b.at[k]);
      a.at[k] = narrow_to<N>(x * cosine - y * sine);
      b.at[k] = narrow_to<N>(y * cosine + x * sine);
    }
    store_pack<n>(out + at, a);
    store_pack<n>(out + at + half, b);
  }
};

template <class W>
void set_turns(const DeviceQueue& queue, const Rotation& rotation, std::int64_t first, std::int64_t positions,
               Turn<W>* turns) {
  constexpr int threads = 128;
  const int half        = static_cast<int>(rotation.head_size / 2);
  for (int begin = 0; begin < half; begin += Frequencies::most) {
    const int count = std::min(Frequencies::most, half - begin);
    Frequencies some{};
    std::copy_n(rotation.frequencies.begin() + begin, count, some.at);
    angles_kernel<<<blocks_for(positions * count, threads), threads, 0, stream_of(queue)>>>(
        some, begin, count, first, positions, half, rotation.backward ? -1.0 : 1.0, turns);
    check_launch("rotary_embedding");
  }
}

}  // namespace

template <class T>
void rotate(const DeviceQueue& queue, const Rotation& rotation, std::int64_t rows, const T* in, T* out) {
  using W = Wide<T>;
  if (rows <= 0) return;
  constexpr int n         = elements_per_vector<T>;
  const std::int64_t half = rotation.head_size / 2, turned = rotation.turned_heads * rotation.head_size;
  Workspace workspace(queue, "rotary_embedding");
  const std::int64_t at_once = rotary_positions(rotation.seq, rotation.head_size, sizeof(W));
  auto* const turns          = workspace.take<Turn<W>>(at_once * half);
  const bool vectors         = half % n == 0 && rotation.row % n == 0 && vectors_fit(in, out);
  for (std::int64_t first = 0; first < rotation.seq; first += at_once) {
    const std::int64_t positions = std::min(at_once, rotation.seq - first);
    set_turns(queue, rotation, first, positions, turns);
    const Rotate<Native<T>> some{.in            = native(in),
                                 .out           = native(out),
                                 .turns         = turns,
                                 .seq           = rotation.seq,
                                 .row           = rotation.row,
                                 .pairs_per_row = rotation.turned_heads * half,
                                 .half          = static_cast<int>(half),
                                 .first         = first,
                                 .positions     = positions};
    map<n>(queue, "rotary_embedding", some, rows / rotation.seq * positions * some.pairs_per_row, vectors);
  }
  if (in == out || turned == rotation.row) return;
  const auto pitch = static_cast<std::size_t>(rotation.row) * sizeof(T);
  check_cuda(cudaMemcpy2DAsync(out + turned, pitch, in + turned, pitch,
                               static_cast<std::size_t>(rotation.row - turned) * sizeof(T),
                               static_cast<std::size_t>(rows), cudaMemcpyDeviceToDevice, stream_of(queue)),
             "cudaMemcpy2DAsync");
}

template void rotate(const DeviceQueue&, const Rotation&, std::int64_t, const float*, float*);
template void rotate(const DeviceQueue&, const Rotation&, std::int64_t, const double*, double*);
template void rotate(const DeviceQueue&, const Rotation&, std::int64_t, const bf16*, bf16*);
template void rotate(const DeviceQueue&, const Rotation&, std::int64_t, const f16*, f16*);

}  // namespace stepgraph::cuda
