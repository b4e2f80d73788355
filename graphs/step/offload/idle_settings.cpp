#include "graphs/step/offload/idle_settings.hpp"

#include <algorithm>
#include <string_view>
#include <vector>

#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

// Names that are not the default.
class GivenKeys {
 public:
  void add(std::string_view name, bool is_given) {
    if (is_given) names_.push_back(name);
  }
  // "offload.disk and offload.slots have no effect: <why>"; empty: no names.
  [[nodiscard]] std::string text(std::string_view why) const {
    std::string out;
    for (std::size_t i = 0; i < names_.size(); ++i)
      out += str(i == 0 ? "" : i + 1 == names_.size() ? " and " : ", ", "offload.", names_[i]);
    return out.empty() ? out : str(out, names_.size() == 1 ? " has" : " have", " no effect: ", why);
  }

 private:
  std::vector<std::string_view> names_;
};

}  // namespace

OffloadUse use_of(std::span<const OffloadedUnit> units) {
  OffloadUse use{.something = !units.empty(), .slots = false};
  for (const OffloadedUnit& unit : units) {
    use.disk |= unit.space == Space::disk;
    use.params |= unit.of == OffloadClass::params;
    use.compressed |= unit.compression != Compression::none;
    use.slots |= unit.update != UpdateMode::host || unit.compression != Compression::none;
  }
  return use;
}

std::string idle_settings_text(const OffloadPlan& plan, const OffloadUse& use) {
  const OffloadPlan usual;
  if (!plan.moves_something()) return {};
  const bool has_device = plan.strategy != OffloadStrategy::manual || plan.device_bytes > 0;
  // Without a strategy all weights move that device_param_bytes does not keep.
  const bool keeps_weights = plan.device_param_bytes > 0 && plan.params && !use.params &&
                             plan.strategy == OffloadStrategy::manual && (use.something || !has_device);
  GivenKeys nothing, disk, params, compress, slots, all_weights;
  all_weights.add("params", keeps_weights);
  GivenKeys& for_disk     = use.something ? disk : nothing;
  GivenKeys& for_params   = use.something ? params : nothing;
  GivenKeys& for_compress = use.something ? compress : nothing;
  (use.something ? slots : nothing).add("slots", !(use.something && use.slots) && plan.slots != usual.slots);
  nothing.add("async", !use.something && plan.async != usual.async);
  nothing.add("pinned", !use.something && plan.pinned != usual.pinned);
  for_compress.add("compress", !use.compressed && plan.compress != usual.compress);
  for_params.add("device_param_bytes",
                 !use.params && !keeps_weights && plan.device_param_bytes != usual.device_param_bytes);
  nothing.add("host_bytes", !use.something && plan.host_bytes != usual.host_bytes);
  for_disk.add("disk", !use.disk && !plan.disk.empty());
  for_disk.add("disk_bytes", !use.disk && plan.disk_bytes != usual.disk_bytes);
  std::string out;
  for (const std::string& text :
       {all_weights.text("offload.device_param_bytes keeps all weights on the device"),
        nothing.text(has_device      ? "nothing is moved, because the step fits the device"
                     : keeps_weights ? "nothing is moved"
                                     : "nothing is moved: all that may be moved is used again too soon"),
        slots.text("the host updates all that is moved, in place"),
        disk.text(plan.host_bytes == 0 ? "offload.host_bytes is not limited, so all that is moved lies in host memory"
                                       : "host memory has room for all that is moved"),
        params.text("no weights are moved"), compress.text("nothing that is moved can be compressed")}) {
    if (!text.empty()) out += str(out.empty() ? "note: " : "; ", text);
  }
  return out;
}

}  // namespace stepgraph
