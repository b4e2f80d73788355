#pragma once
#include <string_view>

namespace stepgraph {

// Whether a text can be trusted as JSON: internal to this library. Throws Error(config) that begins with `subject` when
// it is not valid JSON, when an object has a name twice (parsers would quietly take one of them), or when it is nested
// more than 64 deep. Needs little memory, whatever the text says.
void check_json(std::string_view text, std::string_view subject);

}  // namespace stepgraph
