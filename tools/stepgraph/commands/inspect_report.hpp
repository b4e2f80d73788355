#pragma once
#include <string>

namespace stepgraph::cli {

struct InspectOptions {
  bool json  = false;
  bool check = false;  // reads all bytes of checkpoints, and compares their hashes
};
// What a checkpoint, a folder of checkpoints, a Hugging Face folder or a .safetensors file holds.
struct Inspected {
  std::string text  = {};  // or JSON lines
  int num_not_whole = 0;   // checkpoints of a folder
};
// A folder may hold a model and checkpoints. Throws Error(config) for anything else, and for a damaged checkpoint.
[[nodiscard]] Inspected inspect(const std::string& path, const InspectOptions& options);

}  // namespace stepgraph::cli
