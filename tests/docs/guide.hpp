#pragma once
#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// The guides (README.md files) as data: fenced blocks with the comments above them, headings, links, tables.
// tests/README.md states the rules. Used by the extractor and by the tests, so it depends on nothing but the standard
// library.
namespace stepgraph::testing {

struct Block {
  std::string language   = {};  // "cpp", "console", "json", "sh", "cmake" or "text"
  std::string text       = {};  // whole lines
  std::string heading    = {};  // the nearest heading above the block
  std::size_t first_line = 0;   // of the text in the guide, counted from 1
  // From the comments directly above the fence.
  std::optional<std::string> prelude = {};
  std::optional<std::string> file    = {};
  std::optional<std::string> not_run = {};
  bool definitions                   = false;

  [[nodiscard]] bool runs() const { return !not_run; }
};

struct Link {
  std::string target = {};  // as written: "../schedule/README.md#actions"
  std::size_t line   = 0;
};

struct Guide {
  std::string path                  = {};  // relative to the repository
  std::vector<std::string> lines    = {};
  std::vector<Block> blocks         = {};
  std::vector<std::string> headings = {};
  std::vector<Link> links           = {};
  std::vector<std::string> code     = {};  // inline code, outside of fences
};

// Throws std::runtime_error, naming file and line, where a fence is not closed, has an unknown language, or has a
// comment that has no meaning for it.
[[nodiscard]] Guide read_guide(const std::filesystem::path& root, const std::string& path);

// Every Markdown file of the repository, by path.
[[nodiscard]] std::vector<std::string> find_guides(const std::filesystem::path& root);

// The rows of all tables of the guide whose first heading is `first_heading`. Cells have no blanks at their ends.
[[nodiscard]] std::vector<std::vector<std::string>> table_rows(const Guide& guide, std::string_view first_heading);

// The anchor that GitHub gives to a heading: "A graph by hand" is "a-graph-by-hand".
[[nodiscard]] std::string anchor_of(std::string_view heading);

// One command of a console block and the output that the guide shows for it.
struct Command {
  std::string text                  = {};  // without the prompt and the comment
  int exit_code                     = 0;
  std::vector<std::string> expected = {};
};
[[nodiscard]] std::vector<Command> commands_of(const Block& block);

// A line "..." stands for any number of lines. "..." inside a line stands for any text.
[[nodiscard]] bool output_matches(const std::vector<std::string>& expected, const std::vector<std::string>& lines);

[[nodiscard]] std::vector<std::string> split_lines(std::string_view text);  // without blanks at the ends of lines

}  // namespace stepgraph::testing
