#pragma once
#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>

namespace stepgraph {

class Context;  // engine/run/context.hpp: the argument of a body

template <class F>
concept NodeBody = std::invocable < std::decay_t<F>
&, const Context& > || std::invocable<std::decay_t<F>&>;

// The work of a node: anything callable with `(const Context&)` or `()`. Copies share the callable, as do slices and
// copies of a graph. It is a pair of pointers that lowering stores inside the scheduler's own task: running a node
// whose callable has no captures reads no further memory.
class Body {
 public:
  using Invoke = void (*)(void* const* closure, const Context& context);

  Body() = default;
  template <class F>
  requires NodeBody<F> &&(!std::same_as<std::remove_cvref_t<F>, Body>)explicit Body(F&& callable)
      : invoke_(&call<std::decay_t<F>>) {
    if constexpr (!stateless<std::decay_t<F>>) closure_ = std::make_shared<std::decay_t<F>>(std::forward<F>(callable));
  }

  explicit operator bool() const noexcept { return invoke_ != nullptr; }
  [[nodiscard]] Invoke invoke() const noexcept { return invoke_; }
  [[nodiscard]] void* closure() const noexcept { return closure_.get(); }

 private:
  template <class F>
  static constexpr bool stateless =
      std::is_empty_v<F>&& std::is_default_constructible_v<F>;  // a lambda without captures

  template <class F>
  static void call(void* const* closure, const Context& context) {
    if constexpr (stateless<F>) {
      F callable{};
      run(callable, context);
    } else {
      run(*static_cast<F*>(*closure), context);  // not read above
    }
  }
  template <class F>
  static void run(F& callable, const Context& context) {
    if constexpr (std::invocable<F&, const Context&>) {
      callable(context);
    } else {
      callable();
    }
  }

  Invoke invoke_ = nullptr;
  std::shared_ptr<void> closure_;
};

}  // namespace stepgraph
