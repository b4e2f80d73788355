#pragma once
#include <cstdint>
#include <string>
#include <utility>

#include "engine/base/error.hpp"

// Internal to graphs/.
namespace stepgraph {

// A step is larger than one of its budgets. The message does not say yet what would be right: building other steps
// takes time, and not all callers want it. explained (what_fits.hpp) adds it.
class DoesNotFit : public Error {
 public:
  // `key`: of the budget in a config, such as "offload.host_bytes"; another text: the budget is not in the config.
  // `needed_bytes`: the budget with which this place would not have thrown.
  DoesNotFit(std::string key, std::int64_t needed_bytes, const std::string& message)
      : Error(ErrorKind::config, message), key_(std::move(key)), needed_bytes_(needed_bytes) {}
  [[nodiscard]] const std::string& key() const noexcept { return key_; }
  [[nodiscard]] std::int64_t needed_bytes() const noexcept { return needed_bytes_; }

 private:
  std::string key_;
  std::int64_t needed_bytes_;
};

}  // namespace stepgraph
