#pragma once
#include <cstdint>

#include "graphs/models/model.hpp"

namespace stepgraph {

// The smallest language model: an embedding, residual layers of two linears with GELU between them, and a head. Its
// prediction depends on the last token only.
struct MlpSpec {
  int layers                                             = 4;
  std::int64_t width                                     = 256;
  std::int64_t context                                   = 128;
  std::int64_t vocab                                     = 4096;
  std::int64_t inner                                     = 0;  // 0: 4 * width
  double init_deviation                                  = 0.02;
  friend bool operator==(const MlpSpec&, const MlpSpec&) = default;
};
[[nodiscard]] Model mlp(const MlpSpec& spec);

}  // namespace stepgraph
