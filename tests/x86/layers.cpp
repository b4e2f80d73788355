#include <algorithm>
#include <memory>

#include "ops/cpu/activation.hpp"
#include "ops/cpu/compress.hpp"
#include "ops/cpu/convert.hpp"
#include "ops/cpu/norm.hpp"
#include "ops/cpu/optimizer.hpp"
#include "ops/cpu/residual.hpp"
#include "ops/cpu/rotary_embedding.hpp"
#include "tests/x86/checks.hpp"

namespace stepgraph::testing::x86 {
namespace {

constexpr std::int64_t rows = 37, width = 203;

template <class T>
void append(std::vector<double>& to, const std::vector<T>& values) {
  for (const T each : values) to.push_back(static_cast<double>(wide(each)));
}

// compute(piece) returns the values for work that is cut into pieces of this size.
template <class Compute>
Result result(const char* name, const char* type, double tolerance, const Compute& compute) {
  Result made{.name = std::string(name) + ' ' + type, .tolerance = tolerance, .values = compute(rows)};
  for (const std::int64_t piece : {1, 5, 16}) made.cut_right = made.cut_right && compute(piece) == made.values;
  return made;
}
template <class Call>
void for_pieces(std::int64_t size, std::int64_t piece, const Call& call) {
  for (std::int64_t at = 0; at < size; at += piece) call(at, std::min(size, at + piece));
}

template <class T>
std::vector<double> norms(bool centered, std::int64_t piece) {
  using W      = Wide<T>;
  const auto x = numbers<T>(rows * width, 1), dy = numbers<T>(rows * width, 2), weight = numbers<T>(width, 3),
             bias = numbers<T>(width, 4);
  std::vector<T> y(x.size()), dx = numbers<T>(rows * width, 5);
  std::vector<W> center(rows), scale(rows), dw = numbers<W>(width, 6), db(width);
  const cpu::Norm<T> forward{
      width,        x.data(), weight.data(), centered ? bias.data() : nullptr, centered ? center.data() : nullptr,
      scale.data(), y.data(), 1e-5};
  for_pieces(rows, piece, [&](std::int64_t begin, std::int64_t end) { cpu::norm_forward(forward, begin, end); });
  const cpu::NormBackward<T> backward{width,        x.data(), weight.data(), centered ? center.data() : nullptr,
                                      scale.data(), dy.data()};
  for_pieces(rows, piece, [&](std::int64_t begin, std::int64_t end) {
    cpu::norm_backward(backward, Into<T>{dx.data(), dx.data(), rows * width}, begin, end);
  });
  const Into<T, W> into_bias{db.data(), nullptr, width};
  for_pieces(width, std::min<std::int64_t>(128, 2 * piece), [&](std::int64_t begin, std::int64_t end) {
    cpu::norm_weight_gradient(backward, Into<T, W>{dw.data(), dw.data(), width}, centered ? &into_bias : nullptr, rows,
                              begin, end);
  });
  std::vector<double> values;
  for (const auto* each : {&y, &dx}) append(values, *each);
  for (const auto* each : {&center, &scale, &dw, &db}) append(values, *each);
  return values;
}

template <class T>
std::vector<double> residuals(bool drops, std::int64_t piece) {
  const auto x = numbers<T>(rows * width, 1), branch = numbers<T>(rows * width, 2), bias = numbers<T>(width, 3);
  std::vector<T> y(x.size()), kept = numbers<T>(rows * width, 4);
  std::vector<Wide<T>> sums(width);
  const cpu::Drop drop{{.key = 5, .dropped = 1u << 30, .scale = 4.0 / 3}, (std::int64_t{1} << 32) - 1000};
  const std::optional<cpu::Drop> dropped = drops ? std::optional(drop) : std::nullopt;
  for_pieces(rows, piece, [&](std::int64_t begin, std::int64_t end) {
    cpu::residual_forward<T>({width, x.data(), branch.data(), bias.data(), y.data(), dropped}, begin, end);
    cpu::put_dropped<T>(drop, branch.data(), {kept.data(), kept.data(), rows * width}, begin * width, end * width);
  });
  for_pieces(width, std::min<std::int64_t>(128, 2 * piece), [&](std::int64_t begin, std::int64_t end) {
    cpu::column_sum<T>(branch.data(), width, dropped, {sums.data(), nullptr, width}, rows, begin, end);
  });
  std::vector<double> values;
  for (const auto* each : {&y, &kept}) append(values, *each);
  append(values, sums);
  return values;
}

template <class Function, class T>
std::vector<double> activations(std::int64_t piece) {
  auto x = numbers<T>(rows * width, 1);
  for (std::size_t i = 0; i < x.size(); i += 3) x[i] = T(wide(x[i]) * 20);
  std::vector<T> y(x.size());
  std::vector<Wide<T>> value(x.size()), slope(x.size());
  for_pieces(rows * width, 7 * piece, [&](std::int64_t begin, std::int64_t end) {
    cpu::values<Function, T>(x.data() + begin, end - begin, value.data() + begin);
    cpu::slopes<Function, T>(x.data() + begin, end - begin, slope.data() + begin);
    cpu::values_and_slopes<Function, T>(x.data() + begin, end - begin, y.data() + begin);
  });
  std::vector<double> values;
  for (const auto* each : {&x, &y}) append(values, *each);
  for (const auto* each : {&value, &slope}) append(values, *each);
  return values;
}

// A sequence is one piece: angles follow from those of the row before.
template <class T>
std::vector<double> rotations() {
  const cpu::Rotation rotation{.seq          = rows,
                               .row          = 6 * 14,
                               .turned_heads = 4,
                               .head_size    = 14,
                               .backward     = sizeof(T) == 2,
                               .frequencies  = std::make_shared<const std::vector<double>>(
                                   std::vector<double>{1, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001})};
  const auto in = numbers<T>(rows * rotation.row, 1);
  std::vector<T> out(in.size());
  std::vector<double> angles(4 * 7), values;
  cpu::rotate(rotation, rows, in.data(), out.data(), angles.data());
  append(values, out);
  return values;
}

template <class To, class From>
std::vector<double> converted(std::int64_t piece) {
  const auto from = numbers<From>(rows * width, 1);
  std::vector<To> to(from.size());
  std::vector<double> values;
  for_pieces(rows * width, 11 * piece, [&](std::int64_t begin, std::int64_t end) {
    cpu::convert_elements<To, From>({to.data(), rows * width, 0, 1}, {from.data(), rows * width, 0, 1}, begin, end);
  });
  append(values, to);
  return values;
}

template <class T, class Gradient>
std::vector<double> updates(std::int64_t piece) {
  constexpr std::int64_t count = rows * width;
  auto weight = numbers<T>(count, 1), first = numbers<T>(count, 2), second = numbers<T>(count, 3);
  for (T& each : second) each *= each;
  const auto gradient = numbers<Gradient>(count, 4);
  std::vector<bf16> value(weight.size());
  const auto of = [](auto& list) { return Rows{list.data(), count, std::int64_t{0}, std::int64_t{1}}; };
  const Rows<const Gradient> of_gradient{gradient.data(), count, 0, 1};
  for_pieces(count, 13 * piece, [&](std::int64_t begin, std::int64_t end) {
    cpu::adamw<T, Gradient, bf16>({of(weight), of(first), of(second), of_gradient, of(value)},
                                  {0.7, 1e-2, 0.9, 0.95, 1e-8, 0.1, 3}, begin, end);
    cpu::sgd<T, Gradient, bf16>({of(weight), of(second), of_gradient, of(value)}, {0.7, 1e-2, 0.9, 0.1}, begin, end);
  });
  std::vector<double> values;
  for (const auto* each : {&weight, &first, &second}) append(values, *each);
  append(values, value);
  return values;
}

// Each kind packs and unpacks two tiles.
template <class T>
std::vector<double> compressed(Compression kind, DType type, std::int64_t piece) {
  constexpr std::int64_t count = cpu::compress_tile + 999;
  const auto from              = numbers<T>(count, 1);
  std::vector<T> back(from.size());
  std::vector<std::byte> packed(static_cast<std::size_t>(8 * count));
  const auto* const raw = reinterpret_cast<const std::byte*>(from.data());
  auto* const unpacked  = reinterpret_cast<std::byte*>(back.data());
  for_pieces(count, piece == rows ? count : cpu::compress_tile, [&](std::int64_t begin, std::int64_t end) {
    cpu::compress_elements(kind, type, raw, packed.data(), begin, end);
    cpu::decompress_elements(kind, type, unpacked, packed.data(), begin, end);
  });
  std::vector<double> values;
  append(values, back);
  for (const std::byte each : packed) values.push_back(static_cast<double>(each));
  return values;
}

template <class T>
void add_all(std::vector<Result>& all, const char* name, DType type) {
  // Only activations may contract products and sums.
  const double close = sizeof(T) == 2 ? 0x1p-8 : sizeof(T) == 4 ? 1e-6 : 1e-14;
  const auto add     = [&](const char* kernel, double tolerance, const auto& compute) {
    all.push_back(result(kernel, name, tolerance, compute));
  };
  add("layer norm", 0, [](std::int64_t piece) { return norms<T>(true, piece); });
  add("RMS norm", 0, [](std::int64_t piece) { return norms<T>(false, piece); });
  add("residual", 0, [](std::int64_t piece) { return residuals<T>(false, piece); });
  add("residual with dropout", 0, [](std::int64_t piece) { return residuals<T>(true, piece); });
  add("rotation", 0, [](std::int64_t) { return rotations<T>(); });
  add("gelu (tanh)", close, activations<cpu::GeluTanh, T>);
  add("gelu (exact)", close, activations<cpu::GeluExact, T>);
  add("silu", close, activations<cpu::Silu, T>);
  if constexpr (sizeof(T) > 2) add("to bf16", 0, converted<bf16, T>);
  for (const Compression kind : {Compression::fp16, Compression::bf16, Compression::int8, Compression::dynamic8}) {
    if (size_bytes(type) == 2 && (kind == Compression::fp16 || kind == Compression::bf16)) continue;
    all.push_back(result("compressed", name, 0, [=](std::int64_t piece) { return compressed<T>(kind, type, piece); }));
  }
}

}  // namespace

std::vector<Result> layer_results() {
  std::vector<Result> all;
  add_all<float>(all, "f32", DType::f32);
  add_all<double>(all, "f64", DType::f64);
  add_all<bf16>(all, "bf16", DType::bf16);
  add_all<f16>(all, "f16", DType::f16);
  all.push_back(result("update", "f32", 0, updates<float, float>));
  all.push_back(result("update", "f64", 0, updates<double, double>));
  all.push_back(result("update", "f32 with bf16 gradients", 0, updates<float, bf16>));
  all.push_back(result("from bf16", "f32", 0, converted<float, bf16>));
  all.push_back(result("from f16", "f32", 0, converted<float, f16>));
  return all;
}

}  // namespace stepgraph::testing::x86
