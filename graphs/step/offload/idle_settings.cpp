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
  OffloadUse use{.something = !units.empty()};
  for (const OffloadedUnit& unit : units) {
    use.disk |= unit.space == Space::disk;
    use.params |= unit.of == OffloadClass::params;
    use.compressed |= unit.compression != Compression::none;
  }
  return use;
}

std::string idle_settings_text(const OffloadPlan& plan, const OffloadUse& use) {
  const OffloadPlan usual;
  if (!plan.moves_something()) return {};
  GivenKeys nothing, disk, params, compress;
  GivenKeys& for_disk     = use.something ? disk : nothing;
  GivenKeys& for_params   = use.something ? params : nothing;
  GivenKeys& for_compress = use.something ? compress : nothing;
  nothing.add("slots", !use.something && plan.slots != usual.slots);
  nothing.add("async", !use.something && plan.async != usual.async);
  nothing.add("pinned", !use.something && plan.pinned != usual.pinned);
  for_compress.add("compress", !use.compressed && plan.compress != usual.compress);
  for_params.add("device_param_bytes", !use.params && plan.device_param_bytes != usual.device_param_bytes);
  nothing.add("host_bytes", !use.something && plan.host_bytes != usual.host_bytes);
  for_disk.add("disk", !use.disk && !plan.disk.empty());
  for_disk.add("disk_bytes", !use.disk && plan.disk_bytes != usual.disk_bytes);
  const bool has_device = plan.strategy != OffloadStrategy::manual || plan.device_bytes > 0;
  std::string out;
  for (const std::string& text :
       {nothing.text(has_device ? "nothing is moved, because the step fits the device"
                                : "nothing is moved: all that may be moved is used again too soon"),
        disk.text(plan.host_bytes == 0 ? "offload.host_bytes is not limited, so all that is moved lies in host memory"
                                       : "host memory has room for all that is moved"),
        params.text("no weights are moved"), compress.text("nothing that is moved can be compressed")}) {
    if (!text.empty()) out += str(out.empty() ? "note: " : "; ", text);
  }
  return out;
}

}  // namespace stepgraph
