#include "graphs/train/shared_choice.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "engine/run/packed.hpp"
#include "graphs/step/builder/build_step.hpp"
#include "graphs/step/memory/limits.hpp"

namespace stepgraph {
namespace {

void pack_amounts(Packer& out, const OffloadAmounts& amounts) {
  out.add(amounts.optimizer).add(amounts.grads).add(amounts.params).add(amounts.activations);
  out.add(amounts.host_updates).add(amounts.host_scale).add(amounts.resident_bytes).add(amounts.gradient_bytes);
  out.add(amounts.host_gradients).add_list(std::span<const ActivationMode>(amounts.layers));
}

OffloadAmounts unpacked_amounts(Unpacker& in) {
  OffloadAmounts amounts;
  for (double* const share : {&amounts.optimizer, &amounts.grads, &amounts.params, &amounts.activations,
                              &amounts.host_updates, &amounts.host_scale})
    *share = in.get<double>();
  amounts.resident_bytes = in.get<std::int64_t>();
  amounts.gradient_bytes = in.get<std::int64_t>();
  amounts.host_gradients = in.get<bool>();
  amounts.layers         = in.get_list<ActivationMode>();
  return amounts;
}

// Of all processes, in process 0. 0: one of them does not know it.
std::int64_t smallest_device(Peers& peers, std::int64_t mine) {
  std::int64_t smallest = mine;
  for (const Bytes& bytes : peers.gather("the memory of devices", Packer().add(mine).take()))
    smallest = std::min(smallest, Unpacker(bytes).get<std::int64_t>());
  return smallest;
}

}  // namespace

StepOptions with_shared_choice(const Model& model, const Plan& plan, const BatchSpec& batch, Peers* peers,
                               const StepOptions& options) {
  const bool is_chosen = options.offload || !options.offload_of.empty() || !chooses_offload(plan, true);
  if (peers == nullptr || is_chosen) return options;
  constexpr std::string_view subject = "what is offloaded and recomputed";
  StepOptions made                   = options;
  made.device_memory_bytes           = smallest_device(*peers, options.device_memory_bytes);
  std::map<Rank, OffloadAmounts> chosen;
  in_first(peers, subject, [&] {
    StepOptions of_all = made;
    of_all.only        = std::nullopt;
    try {
      chosen = choose_offload(model, plan, batch, of_all);
    } catch (const DoesNotFit& refused) {
      throw explained(refused, search_by_requirements(model, plan, batch, requirement_options(of_all, true)));
    }
  });
  Packer sent;
  if (peers->process() == 0) {
    sent.add(made.device_memory_bytes).add(made.offload_rates.has_value());
    sent.add(made.offload_rates.value_or(OffloadRates{}));
    for (const auto& [rank, amounts] : chosen) pack_amounts(sent.add(rank), amounts);
  }
  const Bytes told = peers->broadcast(subject, sent.take());
  Unpacker received(told);
  made.device_memory_bytes = received.get<std::int64_t>();
  const bool has_rates     = received.get<bool>();
  const auto rates         = received.get<OffloadRates>();
  made.offload_rates       = has_rates ? std::optional(rates) : std::nullopt;
  while (!received.empty()) {
    const Rank rank       = received.get<Rank>();
    made.offload_of[rank] = unpacked_amounts(received);
  }
  return made;
}

}  // namespace stepgraph
