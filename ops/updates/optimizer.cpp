#include "ops/updates/optimizer.hpp"

#include <cmath>
#include <initializer_list>
#include <type_traits>

#include "engine/base/dispatch.hpp"
#include "engine/base/error.hpp"
#include "engine/run/context.hpp"
#include "ops/cpu/convert.hpp"
#include "ops/cpu/exact_squares.hpp"
#include "ops/cpu/into.hpp"
#include "ops/cpu/optimizer.hpp"
#include "ops/cuda/common/built.hpp"
#include "ops/cuda/updates/exact_squares.hpp"
#include "ops/cuda/updates/optimizer.hpp"
#include "ops/tape/op_checks.hpp"
#include "ops/tape/streams.hpp"

namespace stepgraph {
namespace {

struct Named {
  std::string_view name;
  Access access;
};

std::string titled(std::string_view op, const std::string& name) { return str(op, " '", name, "'"); }

[[noreturn]] void refuse(std::string_view op, const std::string& name, const std::string& what) {
  throw Error(ErrorKind::config, str(titled(op, name), ": ", what));
}

// The type and number of elements, which must be the same in all `accesses`: f32 or f64, or also 2-byte types if
// allowed.
struct Elements {
  DType type;
  std::int64_t count;
};
Elements check_elements(const Graph& graph, std::string_view op, const std::string& name,
                        std::initializer_list<Named> accesses, bool may_be_half = false) {
  const Named& first = *accesses.begin();
  const DType type   = graph.spec(first.access.buffer).type;
  if (type != DType::f32 && type != DType::f64 && !(may_be_half && is_half(type)))
    refuse(op, name, str(first.name, " is ", type, may_be_half ? " (f32, f64, bf16 or f16)" : " (f32 or f64)"));
  const std::int64_t bytes = num_bytes(graph, first.access);
  for (const Named& other : accesses) {
    const DType other_type   = graph.spec(other.access.buffer).type;
    const std::int64_t given = num_bytes(graph, other.access);
    if (other_type != type || given != bytes) {
      refuse(op, name,
             str(other.name, " has ", given, " bytes of ", other_type, ", but ", first.name, " has ", bytes, " of ",
                 type, " (equal types and sizes)"));
    }
    const Region& region     = other.access.region;
    const std::int64_t piece = region.length == Access::whole ? given : region.length;
    if (piece % static_cast<std::int64_t>(size_bytes(type)) != 0) {
      refuse(op, name, str(other.name, " has ranges of ", piece, " bytes (whole elements of ", type, ")"));
    }
  }
  return {type, bytes / static_cast<std::int64_t>(size_bytes(type))};
}

void check_fraction(std::string_view op, const std::string& name, std::string_view what, double value) {
  if (value >= 0 && value < 1) return;
  refuse(op, name, str(what, " is ", value, " (0 or more, less than 1)"));
}
void check_positive(std::string_view op, const std::string& name, std::string_view what, double value) {
  if (value >= 0 && std::isfinite(value)) return;
  refuse(op, name, str(what, " is ", value, " (0 or more)"));
}

// The element types of an update.
struct UpdateTypes {
  DType weight, gradient;
  std::optional<DType> value = {};
};

// A body that calls kernel(context, weight, gradient, value) with a value of each type.
template <class Kernel>
Body typed(const UpdateTypes& types, const Kernel& kernel) {
  if (types.weight == DType::f64)
    return Body([kernel](const Context& context) { kernel(context, double{}, double{}, bf16{}); });
  return dispatch_half(types.value.value_or(DType::bf16), [&]<class Value>(Value) {
    if (types.gradient == DType::f32)
      return Body([kernel](const Context& context) { kernel(context, float{}, float{}, Value{}); });
    return dispatch_half(types.gradient, [&]<class Gradient>(Gradient) {
      return Body([kernel](const Context& context) { kernel(context, float{}, Gradient{}, Value{}); });
    });
  });
}

// Checks an exact sum of squares for elements of `type`.
void check_exact_sum(const Graph& graph, std::string_view op, const std::string& name, const Named& sum, DType type) {
  const DType given        = graph.spec(sum.access.buffer).type;
  const std::int64_t bytes = num_bytes(graph, sum.access), wanted = 8 * exact_sum_size(type);
  if (given == DType::i64 && bytes == wanted && sum.access.region.count == 1) return;
  refuse(op, name,
         str(sum.name, " has ", bytes, " bytes of ", given, " (", exact_sum_size(type), " of i64 in one range, for ",
             type, ")"));
}

// The gradient has the weight's type and size; beside an f32 weight it may have a 2-byte type.
void check_gradient(const Graph& graph, std::string_view op, const std::string& name, const Access& weight,
                    const Access& gradient, const Elements& elements) {
  const DType type = graph.spec(gradient.buffer).type;
  if (elements.type != DType::f32 || !is_half(type)) {
    check_elements(graph, op, name, {{"weight", weight}, {"gradient", gradient}});
    return;
  }
  const std::int64_t bytes = num_bytes(graph, gradient);
  const std::int64_t piece = gradient.region.length == Access::whole ? bytes : gradient.region.length;
  if (bytes == 2 * elements.count && piece % 2 == 0) return;
  refuse(op, name,
         str("gradient has ", bytes, " bytes of ", type, " (", elements.count, " elements, like the weight)"));
}

// A value is optional. If present, the weight is f32 and there is one 2-byte element per weight element.
void check_value(const Graph& graph, std::string_view op, const std::string& name, const std::optional<Access>& value,
                 const Elements& elements) {
  if (!value) return;
  const DType type         = graph.spec(value->buffer).type;
  const std::int64_t bytes = num_bytes(graph, *value);
  if (elements.type != DType::f32)
    refuse(op, name, str("a value with a weight of ", elements.type, " (a weight of f32)"));
  const std::int64_t piece = value->region.length == Access::whole ? bytes : value->region.length;
  if (is_half(type) && bytes == 2 * elements.count && piece % 2 == 0) return;
  refuse(
      op, name,
      str("value has ", bytes, " bytes of ", type, " (", elements.count, " elements of bf16 or f16, like the weight)"));
}

UpdateTypes types_of(const Graph& graph, const Elements& elements, const Access& gradient,
                     const std::optional<Access>& value) {
  UpdateTypes types{.weight = elements.type, .gradient = graph.spec(gradient.buffer).type};
  if (value) types.value = graph.spec(value->buffer).type;
  return types;
}

// Whether this step skips the update: it is told to, or its factor is NaN. If so, `value` is still written, with its
// old bits: the rounded weight.
template <class T, class Value>
bool skips(const Context& context, bool may_skip, std::size_t read, std::int64_t count, const Rows<T>& weight,
           const Rows<Value>& value) {
  const bool told = may_skip && context.read<std::int64_t>(read).front() != 0;
  if (!told && !std::isnan(context.read<double>(1).front())) return false;
  if constexpr (std::is_same_v<T, float>) {
    if (value.data == nullptr) return true;
    const Rows<const T> master{weight.data, weight.length, weight.stride, weight.count};
    cpu::for_tiles(context, count, cpu::elements_per_tile,
                   [&](std::int64_t begin, std::int64_t end) { cpu::convert_elements(value, master, begin, end); });
  }
  return true;
}

}  // namespace

std::int64_t exact_sum_size(DType type) {
  return type == DType::f64 ? cpu::exact_size<double> : cpu::exact_size<float>;
}

Node square_sum(Graph& graph, const SquareSum& spec) {
  const Elements values = check_elements(graph, "square_sum", spec.name, {{"values", spec.values}}, true);
  check_exact_sum(graph, "square_sum", spec.name, {"sum", spec.sum}, values.type);
  std::optional<Lane> lane;
  if (spec.lane) lane = graph.lane(graph.spec(spec.values.buffer).rank, *spec.lane);
  return graph.add({.name        = spec.name,
                    .lane        = lane,
                    .reads       = spec.values,
                    .accumulates = spec.sum,
                    .op          = "square_sum",
                    .parallel    = true,
                    .device      = true,
                    .cost        = {.flops       = 2 * static_cast<double>(values.count),
                                    .bytes_moved = static_cast<double>(num_bytes(graph, spec.values))},
                    .labels      = spec.labels},
                   dispatch_float(values.type, [count = values.count]<class T>(T) {
                     return Body([count](const Context& context) {
                       const Rows<const T> rows = context.read_rows<T>();
                       const auto sum           = context.accumulate<std::int64_t>();
                       if constexpr (cuda::built) {
                         if (const DeviceQueue* queue = context.device())
                           return cuda::add_squares(*queue, rows, sum.data());
                       }
                       cpu::for_tiles(
                           context, count, 2 * cpu::elements_per_tile,
                           [&](std::int64_t begin, std::int64_t end) { cpu::add_squares(rows, begin, end, sum); });
                     });
                   }));
}

Node clip_factor(Graph& graph, const ClipFactor& spec) {
  if (spec.type != DType::f32 && spec.type != DType::f64)
    refuse("clip_factor", spec.name, str("squares of ", spec.type, " (f32 or f64)"));
  check_exact_sum(graph, "clip_factor", spec.name, {"squares", spec.squares}, spec.type);
  check_number(graph, titled("clip_factor", spec.name), "norm", spec.norm, DType::f64);
  check_number(graph, titled("clip_factor", spec.name), "factor", spec.factor, DType::f64);
  check_positive("clip_factor", spec.name, "clip", spec.clip);
  const bool scaled = spec.scale.has_value();
  if (scaled != spec.overflow.has_value())
    refuse("clip_factor", spec.name, "only one of scale and overflow is given (both, or neither)");
  AccessList reads{spec.squares}, writes{spec.norm, spec.factor};
  if (scaled) {
    check_number(graph, titled("clip_factor", spec.name), "scale", *spec.scale, DType::f64);
    check_number(graph, titled("clip_factor", spec.name), "overflow", *spec.overflow, DType::i64);
    reads.push_back(*spec.scale);
    writes.push_back(*spec.overflow);
  }
  return graph.add(
      {.name   = spec.name,
       .reads  = reads,
       .writes = writes,
       .op     = "clip_factor",
       .device = true,
       .cost   = {.flops       = static_cast<double>(exact_sum_size(spec.type)),
                  .bytes_moved = static_cast<double>(num_bytes(graph, spec.squares))},
       .labels = spec.labels},
      [clip = spec.clip, type = spec.type, scaled](const Context& context) {
        const auto squares = context.read<std::int64_t>();
        if constexpr (cuda::built) {
          if (const DeviceQueue* queue = context.device()) {
            const cuda::ClipFactorCall call{.squares  = squares.data(),
                                            .scale    = scaled ? context.read<double>(1).data() : nullptr,
                                            .clip     = clip,
                                            .norm     = context.write<double>(0).data(),
                                            .factor   = context.write<double>(1).data(),
                                            .overflow = scaled ? context.write<std::int64_t>(2).data() : nullptr};
            return type == DType::f64 ? cuda::clip_factor<double>(*queue, call)
                                      : cuda::clip_factor<float>(*queue, call);
          }
        }
        const double sum   = type == DType::f64 ? cpu::rounded<double>(squares) : cpu::rounded<float>(squares);
        const double scale = scaled ? context.read<double>(1).front() : 1;
        const double norm = std::sqrt(sum) / scale, ratio = clip / (norm + 1e-6);
        context.write<double>(0).front() = norm;
        context.write<double>(1).front() =
            std::isfinite(norm) ? (clip == 0 || ratio > 1 ? 1.0 : ratio) / scale : std::nan("");
        if (scaled) context.write<std::int64_t>(2).front() = !std::isfinite(norm);
      });
}

Node adamw(Graph& graph, const AdamW& spec) {
  const Elements elements = check_elements(graph, "adamw", spec.name,
                                           {{"weight", spec.weight}, {"first", spec.first}, {"second", spec.second}});
  check_gradient(graph, "adamw", spec.name, spec.weight, spec.gradient, elements);
  check_number(graph, titled("adamw", spec.name), "factor", spec.factor, DType::f64);
  check_number(graph, titled("adamw", spec.name), "rate", spec.rate, DType::f64);
  check_number(graph, titled("adamw", spec.name), "step", spec.step, DType::i64);
  check_fraction("adamw", spec.name, "beta1", spec.beta1);
  check_fraction("adamw", spec.name, "beta2", spec.beta2);
  check_positive("adamw", spec.name, "eps", spec.eps);
  check_positive("adamw", spec.name, "weight_decay", spec.weight_decay);
  check_value(graph, "adamw", spec.name, spec.value, elements);
  AccessList reads{spec.gradient, spec.factor, spec.rate, spec.step};
  if (spec.skip) {
    check_number(graph, titled("adamw", spec.name), "skip", *spec.skip, DType::i64);
    reads.push_back(*spec.skip);
  }
  const auto kernel = [count = elements.count, valued = spec.value.has_value(), may_skip = spec.skip.has_value(),
                       beta1 = spec.beta1, beta2 = spec.beta2, eps = spec.eps,
                       weight_decay = spec.weight_decay]<class T, class Gradient, class Value>(const Context& context,
                                                                                               T, Gradient, Value) {
    const cpu::AdamWRows<T, Gradient, Value> rows{.weight   = context.accumulate_rows<T>(0),
                                                  .first    = context.accumulate_rows<T>(1),
                                                  .second   = context.accumulate_rows<T>(2),
                                                  .gradient = context.read_rows<Gradient>(0),
                                                  .value    = valued ? context.write_rows<Value>(0) : Rows<Value>{}};
    if constexpr (cuda::built) {
      if (const DeviceQueue* queue = context.device()) {
        return cuda::adamw(*queue, rows,
                           {.factor       = context.read<double>(1).data(),
                            .rate         = context.read<double>(2).data(),
                            .step         = context.read<std::int64_t>(3).data(),
                            .skip         = may_skip ? context.read<std::int64_t>(4).data() : nullptr,
                            .beta1        = beta1,
                            .beta2        = beta2,
                            .eps          = eps,
                            .weight_decay = weight_decay},
                           count);
      }
    }
    if (skips(context, may_skip, 4, count, rows.weight, rows.value)) return;
    const cpu::AdamWScalars scalars{.factor       = context.read<double>(1).front(),
                                    .rate         = context.read<double>(2).front(),
                                    .beta1        = beta1,
                                    .beta2        = beta2,
                                    .eps          = eps,
                                    .weight_decay = weight_decay,
                                    .step         = context.read<std::int64_t>(3).front()};
    if (scalars.step < 1) throw Error(ErrorKind::config, str("adamw: step ", scalars.step, " (steps count from 1)"));
    // Larger tiles: this kernel is fast enough for the start-up cost of a tile to matter.
    cpu::for_tiles(context, count, 2 * cpu::elements_per_tile,
                   [&](std::int64_t begin, std::int64_t end) { cpu::adamw(rows, scalars, begin, end); });
  };
  return graph.add({.name        = spec.name,
                    .reads       = reads,
                    .writes      = spec.value ? AccessList(*spec.value) : AccessList(),
                    .accumulates = {spec.weight, spec.first, spec.second},
                    .op          = "adamw",
                    .parallel    = true,
                    .device      = true,
                    .cost        = {.flops       = 15 * static_cast<double>(elements.count),
                                    .bytes_moved = 6 * static_cast<double>(num_bytes(graph, spec.weight)) +
                                                   static_cast<double>(num_bytes(graph, spec.gradient)) +
                                                   (spec.value ? 2 * static_cast<double>(elements.count) : 0)},
                    .labels      = spec.labels},
                   typed(types_of(graph, elements, spec.gradient, spec.value), kernel));
}

Node sgd(Graph& graph, const Sgd& spec) {
  const Elements elements =
      check_elements(graph, "sgd", spec.name, {{"weight", spec.weight}, {"velocity", spec.velocity}});
  check_gradient(graph, "sgd", spec.name, spec.weight, spec.gradient, elements);
  check_number(graph, titled("sgd", spec.name), "factor", spec.factor, DType::f64);
  check_number(graph, titled("sgd", spec.name), "rate", spec.rate, DType::f64);
  check_fraction("sgd", spec.name, "momentum", spec.momentum);
  check_positive("sgd", spec.name, "weight_decay", spec.weight_decay);
  check_value(graph, "sgd", spec.name, spec.value, elements);
  AccessList reads{spec.gradient, spec.factor, spec.rate};
  if (spec.skip) {
    check_number(graph, titled("sgd", spec.name), "skip", *spec.skip, DType::i64);
    reads.push_back(*spec.skip);
  }
  const auto kernel = [count = elements.count, valued = spec.value.has_value(), may_skip = spec.skip.has_value(),
                       momentum     = spec.momentum,
                       weight_decay = spec.weight_decay]<class T, class Gradient, class Value>(const Context& context,
                                                                                               T, Gradient, Value) {
    const cpu::SgdRows<T, Gradient, Value> rows{.weight   = context.accumulate_rows<T>(0),
                                                .velocity = context.accumulate_rows<T>(1),
                                                .gradient = context.read_rows<Gradient>(0),
                                                .value    = valued ? context.write_rows<Value>(0) : Rows<Value>{}};
    if constexpr (cuda::built) {
      if (const DeviceQueue* queue = context.device()) {
        return cuda::sgd(*queue, rows,
                         {.factor       = context.read<double>(1).data(),
                          .rate         = context.read<double>(2).data(),
                          .skip         = may_skip ? context.read<std::int64_t>(3).data() : nullptr,
                          .momentum     = momentum,
                          .weight_decay = weight_decay},
                         count);
      }
    }
    if (skips(context, may_skip, 3, count, rows.weight, rows.value)) return;
    const cpu::SgdScalars scalars{.factor       = context.read<double>(1).front(),
                                  .rate         = context.read<double>(2).front(),
                                  .momentum     = momentum,
                                  .weight_decay = weight_decay};
    cpu::for_tiles(context, count, cpu::elements_per_tile,
                   [&](std::int64_t begin, std::int64_t end) { cpu::sgd(rows, scalars, begin, end); });
  };
  return graph.add({.name        = spec.name,
                    .reads       = reads,
                    .writes      = spec.value ? AccessList(*spec.value) : AccessList(),
                    .accumulates = {spec.weight, spec.velocity},
                    .op          = "sgd",
                    .parallel    = true,
                    .device      = true,
                    .cost        = {.flops       = 6 * static_cast<double>(elements.count),
                                    .bytes_moved = 4 * static_cast<double>(num_bytes(graph, spec.weight)) +
                                                   static_cast<double>(num_bytes(graph, spec.gradient)) +
                                                   (spec.value ? 2 * static_cast<double>(elements.count) : 0)},
                    .labels      = spec.labels},
                   typed(types_of(graph, elements, spec.gradient, spec.value), kernel));
}

}  // namespace stepgraph
