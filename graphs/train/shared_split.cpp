#include "graphs/train/shared_split.hpp"

#include "engine/run/packed.hpp"

namespace stepgraph {

Plan with_shared_split(const Model& model, const Plan& plan, const BatchSpec& batch, Peers* peers,
                       const SplitOptions& options) {
  const bool searches = options.search && plan.pipeline.schedule == "auto" && !plan.pipeline.found;
  if (peers == nullptr || (!plan.pipeline.balanced && !searches)) return with_split(model, plan, batch, options);
  constexpr std::string_view subject = "the stages of the pipeline";
  Plan with                          = plan;
  in_first(peers, subject, [&] { with = with_split(model, plan, batch, options); });
  Packer sent;
  if (peers->process() == 0) {
    sent.add_list(std::span<const int>(with.pipeline.split));
    sent.add_text(searches ? to_string(*with.pipeline.found) : std::string());
  }
  const Bytes told = peers->broadcast(subject, sent.take());
  Unpacker received(told);
  with.pipeline.split        = received.get_list<int>();
  with.pipeline.balanced     = false;
  const std::string schedule = received.get_text();
  if (searches) with.pipeline.found = std::make_shared<const PipelineSchedule>(parse_schedule(schedule));
  return with;
}

}  // namespace stepgraph
