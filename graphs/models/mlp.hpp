#pragma once
#include <cstdint>

#include "graphs/models/model.hpp"

namespace stepgraph {

// The smallest model of tokens: an embedding, layers of two linears with GELU between them, each added to what goes in,
// and a head. It knows the last token only.
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
