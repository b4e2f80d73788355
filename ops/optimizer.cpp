#include "ops/optimizer.hpp"

#include <cmath>
#include <initializer_list>

#include "engine/context.hpp"
#include "engine/error.hpp"
#include "ops/cpu/exact_squares.hpp"
#include "ops/cpu/into.hpp"
#include "ops/cpu/optimizer.hpp"
#include "ops/streams.hpp"

namespace stepgraph {
namespace {

struct Named {
  std::string_view name;
  Access access;
};

[[noreturn]] void refuse(std::string_view op, const std::string& name, const std::string& what) {
  throw Error(ErrorKind::config, str(op, " '", name, "': ", what));
}

// Elements in each of `accesses`, which are as many of one type, f32 or f64, in all of them.
struct Elements {
  DType type;
  std::int64_t count;
};
Elements check_elements(const Graph& graph, std::string_view op, const std::string& name,
                        std::initializer_list<Named> accesses) {
  const Named& first = *accesses.begin();
  const DType type   = graph.spec(first.access.buffer).type;
  if (type != DType::f32 && type != DType::f64) refuse(op, name, str(first.name, " is ", type, " (f32 or f64)"));
  const std::int64_t bytes = num_bytes(graph, first.access);
  for (const Named& other : accesses) {
    const DType other_type   = graph.spec(other.access.buffer).type;
    const std::int64_t given = num_bytes(graph, other.access);
    if (other_type != type || given != bytes) {
      refuse(op, name,
             str(other.name, " has ", given, " bytes of ", other_type, ", but ", first.name, " has ", bytes, " of ",
                 type, " (as many of the same)"));
    }
    const Region& region     = other.access.region;
    const std::int64_t piece = region.length == Access::whole ? given : region.length;
    if (piece % static_cast<std::int64_t>(size_bytes(type)) != 0) {
      refuse(op, name, str(other.name, " has ranges of ", piece, " bytes (whole elements of ", type, ")"));
    }
  }
  return {type, bytes / static_cast<std::int64_t>(size_bytes(type))};
}

void check_number(const Graph& graph, std::string_view op, const std::string& name, const Named& number, DType type) {
  const DType given        = graph.spec(number.access.buffer).type;
  const std::int64_t bytes = num_bytes(graph, number.access);
  if (given == type && bytes == static_cast<std::int64_t>(size_bytes(type))) return;
  refuse(op, name, str(number.name, " has ", bytes, " bytes of ", given, " (one ", type, ")"));
}

void check_fraction(std::string_view op, const std::string& name, std::string_view what, double value) {
  if (value >= 0 && value < 1) return;
  refuse(op, name, str(what, " is ", value, " (0 or more, less than 1)"));
}
void check_positive(std::string_view op, const std::string& name, std::string_view what, double value) {
  if (value >= 0 && std::isfinite(value)) return;
  refuse(op, name, str(what, " is ", value, " (0 or more)"));
}

// A body for the type: kernel(context, 0.0f) or kernel(context, 0.0).
template <class Kernel>
Body typed(DType type, const Kernel& kernel) {
  if (type == DType::f32) return Body([kernel](const Context& context) { kernel(context, float{}); });
  return Body([kernel](const Context& context) { kernel(context, double{}); });
}

// A sum of squares of elements of `type`, not rounded yet.
void check_exact_sum(const Graph& graph, std::string_view op, const std::string& name, const Named& sum, DType type) {
  const DType given        = graph.spec(sum.access.buffer).type;
  const std::int64_t bytes = num_bytes(graph, sum.access), wanted = 8 * exact_sum_size(type);
  if (given == DType::i64 && bytes == wanted && sum.access.region.count == 1) return;
  refuse(op, name,
         str(sum.name, " has ", bytes, " bytes of ", given, " (", exact_sum_size(type), " of i64 in one range, for ",
             type, ")"));
}

// Of a master's update: nothing is there, or one bf16 for each element of an f32 weight.
void check_value(const Graph& graph, std::string_view op, const std::string& name, const std::optional<Access>& value,
                 const Elements& elements) {
  if (!value) return;
  const DType type         = graph.spec(value->buffer).type;
  const std::int64_t bytes = num_bytes(graph, *value);
  if (elements.type != DType::f32) refuse(op, name, str("a value beside a weight of ", elements.type, " (f32)"));
  const std::int64_t piece = value->region.length == Access::whole ? bytes : value->region.length;
  if (type == DType::bf16 && bytes == 2 * elements.count && piece % 2 == 0) return;
  refuse(op, name,
         str("value has ", bytes, " bytes of ", type, " (", elements.count, " elements of bf16, as the weight has)"));
}

}  // namespace

std::int64_t exact_sum_size(DType type) {
  return type == DType::f64 ? cpu::exact_size<double> : cpu::exact_size<float>;
}

Node square_sum(Graph& graph, const SquareSum& spec) {
  const Elements values = check_elements(graph, "square_sum", spec.name, {{"values", spec.values}});
  check_exact_sum(graph, "square_sum", spec.name, {"sum", spec.sum}, values.type);
  std::optional<Lane> lane;
  if (spec.lane) lane = graph.lane(graph.spec(spec.values.buffer).rank, *spec.lane);
  return graph.add({.name        = spec.name,
                    .lane        = lane,
                    .reads       = spec.values,
                    .accumulates = spec.sum,
                    .op          = "square_sum",
                    .parallel    = true,
                    .cost        = {.flops       = 2 * static_cast<double>(values.count),
                                    .bytes_moved = static_cast<double>(num_bytes(graph, spec.values))},
                    .labels      = spec.labels},
                   typed(values.type, [count = values.count]<class T>(const Context& context, T) {
                     const Rows<const T> rows = context.read_rows<T>();
                     const auto sum           = context.accumulate<std::int64_t>();
                     cpu::for_tiles(
                         context, count, 2 * cpu::elements_per_tile,
                         [&](std::int64_t begin, std::int64_t end) { cpu::add_squares(rows, begin, end, sum); });
                   }));
}

Node clip_factor(Graph& graph, const ClipFactor& spec) {
  if (spec.type != DType::f32 && spec.type != DType::f64)
    refuse("clip_factor", spec.name, str("squares of ", spec.type, " (f32 or f64)"));
  check_exact_sum(graph, "clip_factor", spec.name, {"squares", spec.squares}, spec.type);
  check_number(graph, "clip_factor", spec.name, {"norm", spec.norm}, DType::f64);
  check_number(graph, "clip_factor", spec.name, {"factor", spec.factor}, DType::f64);
  check_positive("clip_factor", spec.name, "clip", spec.clip);
  return graph.add({.name   = spec.name,
                    .reads  = spec.squares,
                    .writes = {spec.norm, spec.factor},
                    .op     = "clip_factor",
                    .cost   = {.flops       = static_cast<double>(exact_sum_size(spec.type)),
                               .bytes_moved = static_cast<double>(num_bytes(graph, spec.squares))},
                    .labels = spec.labels},
                   [clip = spec.clip, type = spec.type](const Context& context) {
                     const auto squares = context.read<std::int64_t>();
                     const double sum =
                         type == DType::f64 ? cpu::rounded<double>(squares) : cpu::rounded<float>(squares);
                     const double norm = std::sqrt(sum), ratio = clip / (norm + 1e-6);
                     context.write<double>(0).front() = norm;
                     // A norm that is no number makes a factor that is none: a wrong step must not look like a good
                     // one.
                     context.write<double>(1).front() = clip == 0 || ratio > 1 ? 1.0 : ratio;
                   });
}

Node adamw(Graph& graph, const AdamW& spec) {
  const Elements elements = check_elements(
      graph, "adamw", spec.name,
      {{"weight", spec.weight}, {"gradient", spec.gradient}, {"first", spec.first}, {"second", spec.second}});
  check_number(graph, "adamw", spec.name, {"factor", spec.factor}, DType::f64);
  check_number(graph, "adamw", spec.name, {"rate", spec.rate}, DType::f64);
  check_number(graph, "adamw", spec.name, {"step", spec.step}, DType::i64);
  check_fraction("adamw", spec.name, "beta1", spec.beta1);
  check_fraction("adamw", spec.name, "beta2", spec.beta2);
  check_positive("adamw", spec.name, "eps", spec.eps);
  check_positive("adamw", spec.name, "weight_decay", spec.weight_decay);
  check_value(graph, "adamw", spec.name, spec.value, elements);
  const auto kernel = [count = elements.count, valued = spec.value.has_value(), beta1 = spec.beta1, beta2 = spec.beta2,
                       eps = spec.eps, weight_decay = spec.weight_decay]<class T>(const Context& context, T) {
    const cpu::AdamWScalars scalars{.factor       = context.read<double>(1).front(),
                                    .rate         = context.read<double>(2).front(),
                                    .beta1        = beta1,
                                    .beta2        = beta2,
                                    .eps          = eps,
                                    .weight_decay = weight_decay,
                                    .step         = context.read<std::int64_t>(3).front()};
    if (scalars.step < 1) throw Error(ErrorKind::config, str("adamw: step ", scalars.step, " (they count from 1)"));
    const cpu::AdamWRows<T> rows{.weight   = context.accumulate_rows<T>(0),
                                 .first    = context.accumulate_rows<T>(1),
                                 .second   = context.accumulate_rows<T>(2),
                                 .gradient = context.read_rows<T>(0),
                                 .value    = valued ? context.write_rows<bf16>(0) : Rows<bf16>{}};
    // A kernel of this speed notices what begins anew with each tile.
    cpu::for_tiles(context, count, 2 * cpu::elements_per_tile,
                   [&](std::int64_t begin, std::int64_t end) { cpu::adamw(rows, scalars, begin, end); });
  };
  return graph.add({.name        = spec.name,
                    .reads       = {spec.gradient, spec.factor, spec.rate, spec.step},
                    .writes      = spec.value ? AccessList(*spec.value) : AccessList(),
                    .accumulates = {spec.weight, spec.first, spec.second},
                    .op          = "adamw",
                    .parallel    = true,
                    .cost        = {.flops       = 15 * static_cast<double>(elements.count),
                                    .bytes_moved = 7 * static_cast<double>(num_bytes(graph, spec.weight)) +
                                                   (spec.value ? 2 * static_cast<double>(elements.count) : 0)},
                    .labels      = spec.labels},
                   typed(elements.type, kernel));
}

Node sgd(Graph& graph, const Sgd& spec) {
  const Elements elements = check_elements(
      graph, "sgd", spec.name, {{"weight", spec.weight}, {"gradient", spec.gradient}, {"velocity", spec.velocity}});
  check_number(graph, "sgd", spec.name, {"factor", spec.factor}, DType::f64);
  check_number(graph, "sgd", spec.name, {"rate", spec.rate}, DType::f64);
  check_fraction("sgd", spec.name, "momentum", spec.momentum);
  check_positive("sgd", spec.name, "weight_decay", spec.weight_decay);
  check_value(graph, "sgd", spec.name, spec.value, elements);
  const auto kernel = [count = elements.count, valued = spec.value.has_value(), momentum = spec.momentum,
                       weight_decay = spec.weight_decay]<class T>(const Context& context, T) {
    const cpu::SgdScalars scalars{.factor       = context.read<double>(1).front(),
                                  .rate         = context.read<double>(2).front(),
                                  .momentum     = momentum,
                                  .weight_decay = weight_decay};
    const cpu::SgdRows<T> rows{.weight   = context.accumulate_rows<T>(0),
                               .velocity = context.accumulate_rows<T>(1),
                               .gradient = context.read_rows<T>(0),
                               .value    = valued ? context.write_rows<bf16>(0) : Rows<bf16>{}};
    cpu::for_tiles(context, count, cpu::elements_per_tile,
                   [&](std::int64_t begin, std::int64_t end) { cpu::sgd(rows, scalars, begin, end); });
  };
  return graph.add({.name        = spec.name,
                    .reads       = {spec.gradient, spec.factor, spec.rate},
                    .writes      = spec.value ? AccessList(*spec.value) : AccessList(),
                    .accumulates = {spec.weight, spec.velocity},
                    .op          = "sgd",
                    .parallel    = true,
                    .cost        = {.flops       = 6 * static_cast<double>(elements.count),
                                    .bytes_moved = 5 * static_cast<double>(num_bytes(graph, spec.weight)) +
                                                   (spec.value ? 2 * static_cast<double>(elements.count) : 0)},
                    .labels      = spec.labels},
                   typed(elements.type, kernel));
}

}  // namespace stepgraph
