#include "graphs/train/waiting_gradients.hpp"

#include <algorithm>

#include "engine/base/error.hpp"
#include "graphs/files/files.hpp"

namespace stepgraph {

std::vector<Buffer> waiting_buffers(const StepRank& rank) {
  std::vector<Buffer> found;
  for (std::size_t age = 1; age < rank.sets.size(); ++age) {
    const GradientSet& set = rank.sets[age];
    found.push_back(set.scale);
    if (set.factor != Buffer{}) found.push_back(set.factor);
    found.insert(found.end(), set.gradients.begin(), set.gradients.end());
  }
  return found;
}

std::optional<WaitingState> waiting_state(const Trainer& trainer, const StepRun& run) {
  const Plan& plan = trainer.plan();
  if (!plan.update.delays()) return std::nullopt;
  const ShardPlan& shard   = plan.shard;
  const std::string chunks = plan.pipeline.chunks > 1 ? str(" chunks ", plan.pipeline.chunks) : "";
  std::string text = str("layout ", to_string(plan.layout), " ", plan.layout.order, ", ", plan.pipeline.schedule,
                         chunks, ", precision ", plan.precision.param, " reduced as ", plan.precision.reduce_type(),
                         plan.precision.keep_low_precision_grads ? " and kept" : "");
  if (plan.layout.dp > 1)
    text += str(", shard ", to_string(shard.strategy), " ", to_string(shard.reduce), " units ", shard.units,
                shard.flat ? " flat" : "", " from ", shard.min_params, " group ", shard.group, " buckets ",
                shard.bucket_mb, " ", shard.first_bucket_mb, shard.bucket_views ? " views" : "",
                shard.delay_all_reduce ? " delayed" : "", " ", to_string(shard.reduction));
  return WaitingState{
      .max_staleness = plan.update.max_staleness, .num_sets = run.num_waiting(), .placement = std::move(text)};
}

// Gradients that wait for their update fit only a run that has them at the same places.
void check_waiting(const CheckpointReader& reader, Trainer& trainer) {
  const std::optional<WaitingState>& saved = reader.manifest().state.waiting;
  const auto own                           = waiting_state(trainer, trainer.run());
  if (!own || !saved || saved->num_sets == 0) return;
  const auto refuse = [&](const std::string& why, const std::string& right) {
    throw Error(ErrorKind::config,
                str(reader.folder().string(), ": does not fit this run: it has ", saved->num_sets,
                    saved->num_sets == 1 ? " set" : " sets", " of gradients that wait for their update, ", why, " (",
                    right, ", or update.mode synchronous, which drops them)"));
  };
  if (saved->max_staleness != own->max_staleness)
    refuse(str("with update.max_staleness ", saved->max_staleness, ", not ", own->max_staleness),
           str("max_staleness ", saved->max_staleness));
  if (saved->placement != own->placement)
    refuse(str("as they lie with ", saved->placement, "; this run has ", own->placement), "the same");
}

void load_waiting(const CheckpointReader& reader, StepRun& run) {
  const CheckpointManifest& manifest = reader.manifest();
  run.drop_waiting();
  if (!manifest.state.waiting || manifest.state.waiting->num_sets == 0) return;
  AlignedBytes room;
  for (std::size_t place = 0; place < run.step().ranks.size(); ++place) {
    const std::vector<Buffer> buffers = waiting_buffers(run.step().ranks[place]);
    if (buffers.empty()) return;
    const std::string name = checkpoint_file_name(index(run.step().ranks.ranks()[place]));
    std::size_t num_found  = 0;
    for (std::size_t file = 0; file < manifest.files.size(); ++file) {
      if (manifest.files[file].name != name) continue;
      for (const CheckpointPart& part : manifest.files[file].parts) {
        if (part.state != StateKind::waiting) continue;
        const BufferSpec* const spec =
            part.tensor < buffers.size() ? &run.step().graph.spec(buffers[part.tensor]) : nullptr;
        if (spec == nullptr || spec->type != part.type || spec->size_bytes != part.num_bytes())
          throw Error(ErrorKind::config, str(reader.folder().string(), ": ", name,
                                             ": the gradients that wait for their update have other places than in "
                                             "this run (update.mode synchronous, which drops them)"));
        ++num_found;
        for (std::int64_t block = 0; block < num_blocks(part); block += checkpoint_blocks_at_once) {
          const auto count = std::min(checkpoint_blocks_at_once, num_blocks(part) - block);
          run.values().write_bytes(buffers[part.tensor], block * checkpoint_block_bytes,
                                   reader.read_blocks(file, part, block, count, room));
        }
      }
    }
    if (num_found != buffers.size())
      throw Error(ErrorKind::config, str(reader.folder().string(), ": ", name, ": has ", num_found,
                                         " buffers of gradients that wait for their update, but this run has ",
                                         buffers.size(), " (update.mode synchronous, which drops them)"));
  }
  run.values().flush();
}

}  // namespace stepgraph
