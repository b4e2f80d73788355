#include "graphs/models/fresh_weights.hpp"

#include <array>
#include <cmath>
#include <cstddef>

#include "engine/base/error.hpp"
#include "graphs/models/parallel_ranges.hpp"
#include "ops/tape/counter_random.hpp"

namespace stepgraph {
namespace {

// c[0] + c[1] x + ... Where a product is added to, it says std::fma: left to themselves, compilers fuse the two on some
// machines and not on others.
template <std::size_t n>
[[gnu::always_inline]] inline double polynomial(const std::array<double, n>& c, double x) {
  double sum = c[n - 1];
  for (std::size_t i = n - 1; i-- > 0;) sum = std::fma(sum, x, c[i]);
  return sum;
}

// The natural logarithm of a normal number: 2 atanh(s) with s = (m - 1) / (m + 1) for the mantissa m in [0.7, 1.4]. The
// library's differs in its last bit from machine to machine.
[[gnu::always_inline]] inline double logarithm(double x) {
  constexpr double ln2 = 0.693147180559945309417;
  int exponent         = 0;
  double m             = std::frexp(x, &exponent);
  if (m < 0.70710678118654752) {
    m *= 2;
    --exponent;
  }
  const double s                      = (m - 1) / (m + 1);
  constexpr std::array<double, 12> of = {2.0,      2.0 / 3,  2.0 / 5,  2.0 / 7,  2.0 / 9,  2.0 / 11,
                                         2.0 / 13, 2.0 / 15, 2.0 / 17, 2.0 / 19, 2.0 / 21, 2.0 / 23};
  return std::fma(exponent, ln2, s * polynomial(of, s * s));
}

// Names of the coefficients are the paper's.
constexpr std::array<double, 8> a = {3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3,
                                     1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4,
                                     3.3430575583588128105e4, 2.5090809287301226727e3};
constexpr std::array<double, 8> b = {1.0,
                                     4.2313330701600911252e1,
                                     6.8718700749205790830e2,
                                     5.3941960214247511077e3,
                                     2.1213794301586595867e4,
                                     3.9307895800092710610e4,
                                     2.8729085735721942674e4,
                                     5.2264952788528545610e3};
constexpr std::array<double, 8> c = {1.42343711074968357734e0,  4.63033784615654529590e0, 5.76949722146069140550e0,
                                     3.64784832476320460504e0,  1.27045825245236838258e0, 2.41780725177450611770e-1,
                                     2.27238449892691845833e-2, 7.74545014278341407640e-4};
constexpr std::array<double, 8> d = {1.0,
                                     2.05319162663775882187e0,
                                     1.67638483018380384940e0,
                                     6.89767334985100004550e-1,
                                     1.48103976427480074590e-1,
                                     1.51986665636164571966e-2,
                                     5.47593808499534494600e-4,
                                     1.05075007164441684324e-9};
constexpr std::array<double, 8> e = {6.65790464350110377720e0,  5.46378491116411436990e0,  1.78482653991729133580e0,
                                     2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
                                     2.71155556874348757815e-5, 2.01033439929228813265e-7};
constexpr std::array<double, 8> f = {1.0,
                                     5.99832206555887937690e-1,
                                     1.36929880922735805310e-1,
                                     1.48753612908506148525e-2,
                                     7.86869131145613259100e-4,
                                     1.84631831751005468180e-5,
                                     1.42151175831644588870e-7,
                                     2.04426310338993978564e-15};

// Where a fused multiplication and addition is no instruction it is a call, which takes many times longer. Not with
// ThreadSanitizer: the choice between clones would run before it has started.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__FMA__) && !defined(__SANITIZE_THREAD__)
#define STEPGRAPH_WITH_FMA __attribute__((target_clones("default", "arch=haswell")))
#else
#define STEPGRAPH_WITH_FMA
#endif

[[gnu::always_inline]] inline double quantile(double p) {
  const double q = p - 0.5;
  if (std::abs(q) <= 0.425) {
    const double r = std::fma(-q, q, 0.180625);
    return q * polynomial(a, r) / polynomial(b, r);
  }
  const double r = std::sqrt(-logarithm(q < 0 ? p : 1 - p));
  const double z = r <= 5 ? polynomial(c, r - 1.6) / polynomial(d, r - 1.6)  //
                          : polynomial(e, r - 5) / polynomial(f, r - 5);
  return q < 0 ? -z : z;
}

template <class T>
[[gnu::always_inline]] inline void draw_each(std::uint64_t key, std::uint64_t first, double deviation, T* out,
                                             std::int64_t size) {
  for (std::int64_t i = 0; i < size; ++i) {
    // The middles of 2^52 equal parts of (0, 1): exact, and never its ends.
    const std::uint64_t bits = random_bits(key, first + static_cast<std::uint64_t>(i));
    const double p           = (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
    out[i]                   = static_cast<T>(deviation * quantile(p));
  }
}
STEPGRAPH_WITH_FMA void draw(std::uint64_t key, std::uint64_t first, double deviation, float* out, std::int64_t size) {
  draw_each(key, first, deviation, out, size);
}
STEPGRAPH_WITH_FMA void draw(std::uint64_t key, std::uint64_t first, double deviation, double* out, std::int64_t size) {
  draw_each(key, first, deviation, out, size);
}

#undef STEPGRAPH_WITH_FMA

template <class T>
void fill(std::uint64_t seed, std::string_view tensor, std::int64_t first_element, double deviation, std::span<T> out,
          int threads) {
  if (first_element < 0)
    throw Error(ErrorKind::config, str("fresh weights: '", tensor, "': element ", first_element, " (0 or more)"));
  if (!(deviation >= 0) || !std::isfinite(deviation))
    throw Error(ErrorKind::config, str("fresh weights: '", tensor, "': a deviation of ", deviation, " (0 or more)"));
  const std::uint64_t key = derived_key(name_key(tensor), seed);
  const auto first        = static_cast<std::uint64_t>(first_element);
  for_ranges(std::ssize(out), threads, [&](std::int64_t begin, std::int64_t end) {
    draw(key, first + static_cast<std::uint64_t>(begin), deviation, out.data() + begin, end - begin);
  });
}

}  // namespace

double normal_quantile(double p) { return quantile(p); }

void fill_normal(std::uint64_t seed, std::string_view tensor, std::int64_t first_element, double deviation,
                 std::span<float> out, int threads) {
  fill(seed, tensor, first_element, deviation, out, threads);
}
void fill_normal(std::uint64_t seed, std::string_view tensor, std::int64_t first_element, double deviation,
                 std::span<double> out, int threads) {
  fill(seed, tensor, first_element, deviation, out, threads);
}

}  // namespace stepgraph
