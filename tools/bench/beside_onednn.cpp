// Measures the products of training steps beside oneDNN's, in turns, and whether oneDNN's bits depend on the number of
// threads.
//
// usage: beside_onednn [THREADS] [ROUNDS]
//
// A line has a product's type and shape, GFLOP/s of both (medians of the rounds), and their ratio. In a run small
// products follow each other, as in a step; each has other operands, which are read from memory. The target
// beside_onednn builds this where CMake finds oneDNN (package libdnnl-dev), built for OpenMP.
#include <omp.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <oneapi/dnnl/dnnl.hpp>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/base/quantile.hpp"
#include "engine/run/context.hpp"
#include "engine/run/executor.hpp"
#include "ops/cpu/gemm/gemm.hpp"

static_assert(DNNL_CPU_THREADING_RUNTIME == DNNL_RUNTIME_OMP, "oneDNN is not built for OpenMP");

namespace stepgraph {
namespace {

using Clock = std::chrono::steady_clock;

// A product of a linear layer with `tokens` rows: c[m, n] = a b.
enum class Pass : std::uint8_t { forward, input_gradient, weight_gradient };
struct Product {
  Pass pass;
  std::int64_t m, n, k;
};
struct Layer {
  std::int64_t tokens, in, out;
};
Product product_of(const Layer& layer, Pass pass) {
  switch (pass) {
    case Pass::forward:
      return {pass, layer.tokens, layer.out, layer.in};
    case Pass::input_gradient:
      return {pass, layer.tokens, layer.in, layer.out};
    default:
      return {pass, layer.out, layer.in, layer.tokens};
  }
}
const char* name_of(Pass pass) {
  return std::array{"forward", "input gradient", "weight gradient"}[static_cast<std::size_t>(pass)];
}

// Strides as in training: activations and gradients are [tokens, width], weights [out, in].
template <class T>
Matrix<T> matrix_a(const Product& of, const T* data) {
  return of.pass == Pass::weight_gradient ? Matrix<T>{data, 1, of.m} : Matrix<T>{data, of.k, 1};
}
template <class T>
Matrix<T> matrix_b(const Product& of, const T* data) {
  return of.pass == Pass::forward ? Matrix<T>{data, 1, of.k} : Matrix<T>{data, of.n, 1};
}

// Ours, as nodes of a graph that run one after the other. Its memory holds several operands of each kind, together
// larger than most caches. Each product takes the next ones.
template <class T, class Sum>
class Ours {
 public:
  Ours(const Product& of, int products)
      : of_(of),
        sets_(num_sets(of)),
        program_(graph_of(products), world_),
        a_(elements<T>(buffers_[0])),
        b_(elements<T>(buffers_[1])),
        c_(elements<Sum>(buffers_[2])) {
    std::uint32_t state = 1;
    for (const std::span<T> values : {a_, b_}) {
      for (T& value : values) {
        state = state * 1664525 + 1013904223;
        value = T(static_cast<float>(state >> 8) * 0x1p-24f - 0.5f);
      }
    }
  }
  void run(Executor& executor) { executor.run(program_); }

  void clear_results() { std::fill(c_.begin(), c_.end(), Sum(std::numeric_limits<float>::quiet_NaN())); }
  void next() { set_ = (set_ + 1) % sets_; }
  void first() { set_ = 0; }
  [[nodiscard]] T* a() { return a_.data() + set_ * of_.m * of_.k; }
  [[nodiscard]] T* b() { return b_.data() + set_ * of_.k * of_.n; }
  [[nodiscard]] Sum* c() { return c_.data() + set_ * of_.m * of_.n; }
  [[nodiscard]] std::vector<Sum> result() { return {c(), c() + of_.m * of_.n}; }

 private:
  static std::int64_t num_sets(const Product& of) {
    constexpr std::int64_t bytes = std::int64_t{96} << 20;
    const std::int64_t each      = (of.m * of.k + of.k * of.n) * sizeof(T) + of.m * of.n * sizeof(Sum);
    return std::max<std::int64_t>(2, bytes / each);
  }
  template <class Value>
  std::span<Value> elements(Buffer buffer) {
    return program_.memory().template span<Value>(buffer);
  }
  Graph graph_of(int products) {
    Graph graph;
    const auto buffer = [&](DType type, std::int64_t size) {
      const std::int64_t bytes = sets_ * size * static_cast<std::int64_t>(size_bytes(type));
      return graph.buffer({.size_bytes = bytes, .type = type, .lifetime = Lifetime::persistent});
    };
    buffers_ = {buffer(*dtype_of<T>(), of_.m * of_.k), buffer(*dtype_of<T>(), of_.k * of_.n),
                buffer(*dtype_of<Sum>(), of_.m * of_.n)};
    for (int i = 0; i < products; ++i) {
      graph.add({.reads    = {buffers_[0], buffers_[1]},
                 .writes   = buffers_[2],
                 .op       = "product",
                 .parallel = true,
                 .rank     = Rank{0}},
                [this](const Context& context) {
                  next();
                  const Gemm<T, Sum> problem{.m        = of_.m,
                                             .n        = of_.n,
                                             .k        = of_.k,
                                             .a        = matrix_a<T>(of_, a()),
                                             .b        = matrix_b<T>(of_, b()),
                                             .c        = {c(), nullptr, of_.m * of_.n},
                                             .c_stride = of_.n};
                  context.parallel_for(num_gemm_tiles<T>(of_.m, of_.n), gemm_joined<T>(of_.m, of_.n),
                                       [&](std::int64_t first, std::int64_t end) { gemm_tiles(problem, first, end); });
                });
    }
    return graph;
  }

  Product of_;
  std::int64_t sets_ = 0, set_ = 0;
  std::array<Buffer, 3> buffers_;
  LoopbackWorld world_{1};
  Program program_;
  std::span<T> a_, b_;
  std::span<Sum> c_;
};

template <class T>
constexpr dnnl::memory::data_type type_of =
    std::is_same_v<T, bf16> ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;

// oneDNN's, of the operands of ours, on as many OpenMP threads as are set when it is made.
template <class T, class Sum>
class OneDnn {
 public:
  OneDnn(const Product& of, Ours<T, Sum>& operands) : operands_(operands) {
    const Matrix<T> a = matrix_a<T>(of, nullptr), b = matrix_b<T>(of, nullptr);
    const dnnl::memory::desc of_a({of.m, of.k}, type_of<T>, {a.row_stride, a.col_stride}),
        of_b({of.k, of.n}, type_of<T>, {b.row_stride, b.col_stride}), of_c({of.m, of.n}, type_of<Sum>, {of.n, 1});
#if DNNL_VERSION_MAJOR >= 3
    multiply_ = dnnl::matmul(dnnl::matmul::primitive_desc(engine_, of_a, of_b, of_c));
#else
    multiply_ = dnnl::matmul(dnnl::matmul::primitive_desc(dnnl::matmul::desc(of_a, of_b, of_c), engine_));
#endif
    a_ = dnnl::memory(of_a, engine_, nullptr);
    b_ = dnnl::memory(of_b, engine_, nullptr);
    c_ = dnnl::memory(of_c, engine_, nullptr);
  }
  void run(int products) {
    for (int i = 0; i < products; ++i) {
      operands_.next();
      a_.set_data_handle(operands_.a());
      b_.set_data_handle(operands_.b());
      c_.set_data_handle(operands_.c());
      multiply_.execute(stream_, {{DNNL_ARG_SRC, a_}, {DNNL_ARG_WEIGHTS, b_}, {DNNL_ARG_DST, c_}});
      stream_.wait();
    }
  }

 private:
  Ours<T, Sum>& operands_;
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  dnnl::matmul multiply_;
  dnnl::memory a_, b_, c_;
};

struct Compared {
  double ours, onednn;  // GFLOP/s
  bool same_bits;       // of oneDNN, on 1, 2, 3 and all threads
};

// Both sum k numbers below 1/4 in f32: the rounding errors of a sum in any order are far below 1e-6 k. Results in bf16
// are rounded.
template <class Sum>
void check(const Product& of, const std::vector<Sum>& ours, const std::vector<Sum>& theirs) {
  const double sums = 1e-6 * static_cast<double>(of.k), rounding = std::is_same_v<Sum, bf16> ? 0x1p-7 : 0;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    const double a = static_cast<double>(wide(ours[i])), b = static_cast<double>(wide(theirs[i]));
    if (!(std::abs(a - b) <= sums + rounding * std::abs(a)))
      throw Error(ErrorKind::run, str(name_of(of.pass), ": element ", i, " is ", a, ", by oneDNN ", b));
  }
}

template <class T, class Sum>
Compared compare(Executor& executor, const Product& of, int threads, int rounds) {
  const double gflop = 2e-9 * static_cast<double>(of.m * of.n * of.k);
  const int products = static_cast<int>(std::ceil(2 * threads / gflop));  // 10 ms or more
  Ours<T, Sum> ours(of, products);
  ours.run(executor);
  const std::vector<Sum> expected = ours.result();
  bool same_bits                  = true;
  std::vector<Sum> first;
  for (const int count : {1, 2, 3, threads}) {
    ours.clear_results();
    ours.first();
    omp_set_num_threads(count);
    OneDnn<T, Sum>(of, ours).run(products);
    const std::vector<Sum> result = ours.result();
    check(of, expected, result);
    if (first.empty()) first = result;
    same_bits = same_bits && std::memcmp(first.data(), result.data(), first.size() * sizeof(Sum)) == 0;
  }
  OneDnn<T, Sum> onednn(of, ours);
  onednn.run(1);
  const auto gflops = [&](const auto& run) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // then threads of the other one no longer spin
    const auto begin = Clock::now();
    run();
    return products * gflop / std::chrono::duration<double>(Clock::now() - begin).count();
  };
  std::vector<double> of_ours, of_onednn;
  for (int round = 0; round < rounds; ++round) {
    of_ours.push_back(gflops([&] { ours.run(executor); }));
    of_onednn.push_back(gflops([&] { onednn.run(products); }));
  }
  return {quantile(of_ours, 0.5), quantile(of_onednn, 0.5), same_bits};
}

// The ratios of several products.
class Ratios {
 public:
  void add(double ratio) { all_.push_back(ratio); }
  void print(const char* type, const char* which) const {
    double logs = 0;
    for (const double ratio : all_) logs += std::log(ratio);
    std::printf("%-4s %-15s ours over oneDNN %d.%d: %.2f (%.2f to %.2f)\n", type, which, DNNL_VERSION_MAJOR,
                DNNL_VERSION_MINOR, std::exp(logs / static_cast<double>(all_.size())), quantile(all_, 0),
                quantile(all_, 1));
  }

 private:
  std::vector<double> all_;
};

void measure(int threads, int rounds) {
  Executor executor({.threads = threads});
  // Of S, M and L: queries, keys and values; the projection; both layers of the MLP. Of S and M also the head.
  const std::vector<Layer> layers = {{1024, 256, 768},  {1024, 256, 256},  {1024, 256, 1024}, {1024, 1024, 256},
                                     {1024, 256, 4096}, {1024, 512, 1536}, {1024, 512, 512},  {1024, 512, 2048},
                                     {1024, 2048, 512}, {1024, 512, 8192}, {4096, 768, 2304}, {4096, 768, 768},
                                     {4096, 768, 3072}, {4096, 3072, 768}};
  constexpr std::array passes     = {Pass::forward, Pass::input_gradient, Pass::weight_gradient};
  std::printf("type pass                m x    n x    k      ours   oneDNN  ratio  (GFLOP/s, %d threads)\n", threads);
  for (const bool is_bf16 : {false, true}) {
    const char* const type = is_bf16 ? "bf16" : "f32";
    Ratios all, of_pass[passes.size()];
    int count = 0, same = 0;
    for (const Layer& layer : layers) {
      for (const Pass pass : passes) {
        const Product of      = product_of(layer, pass);
        const Compared result = !is_bf16                        ? compare<float, float>(executor, of, threads, rounds)
                                : pass == Pass::weight_gradient ? compare<bf16, float>(executor, of, threads, rounds)
                                                                : compare<bf16, bf16>(executor, of, threads, rounds);
        const double ratio    = result.ours / result.onednn;
        std::printf("%-4s %-15s %5ld x %4ld x %4ld  %8.1f %8.1f  %5.2f\n", type, name_of(pass), static_cast<long>(of.m),
                    static_cast<long>(of.n), static_cast<long>(of.k), result.ours, result.onednn, ratio);
        std::fflush(stdout);
        all.add(ratio);
        of_pass[static_cast<std::size_t>(pass)].add(ratio);
        ++count;
        same += result.same_bits;
      }
    }
    for (const Pass pass : passes) of_pass[static_cast<std::size_t>(pass)].print(type, name_of(pass));
    all.print(type, "all");
    std::printf("%-4s oneDNN gives the same bits on 1, 2, 3 and %d threads in %d of %d\n", type, threads, same, count);
  }
}

int number(std::string_view text, const char* what) {
  int value                = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || rest != text.data() + text.size() || value < 1 || value > 1024)
    throw Error(ErrorKind::config, str(what, " is '", text, "' (1 to 1024)"));
  return value;
}

constexpr const char* usage = "usage: beside_onednn [THREADS] [ROUNDS] (1 and 7 if not given)";
int run(const std::vector<std::string_view>& arguments) {
  if (arguments.size() == 1 && (arguments[0] == "--help" || arguments[0] == "-h")) {
    std::puts(usage);
    return 0;
  }
  if (arguments.size() > 2) throw Error(ErrorKind::config, str(arguments.size(), " arguments; ", usage));
  measure(arguments.empty() ? 1 : number(arguments[0], "THREADS"),
          arguments.size() < 2 ? 7 : number(arguments[1], "ROUNDS"));
  return 0;
}

}  // namespace
}  // namespace stepgraph

int main(int argc, char** argv) {
  try {
    return stepgraph::run({argv + 1, argv + argc});
  } catch (const stepgraph::Error& error) {
    std::fprintf(stderr, "beside_onednn: %s\n", error.what());
    return error.kind() == stepgraph::ErrorKind::config ? 2 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "beside_onednn: %s\n", error.what());
    return 1;
  }
}
