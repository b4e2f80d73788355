#include "tests/docs/guide.hpp"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <iterator>
#include <stdexcept>

namespace stepgraph::testing {
namespace {

std::string trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t\r");
  if (begin == std::string_view::npos) return {};
  return std::string(text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1));
}

std::string without_end_blanks(std::string_view text) {
  const std::size_t last = text.find_last_not_of(" \t\r");
  return std::string(text.substr(0, last == std::string_view::npos ? 0 : last + 1));
}

[[noreturn]] void refuse(const std::string& path, std::size_t line, const std::string& why) {
  throw std::runtime_error(path + ":" + std::to_string(line) + ": " + why);
}

struct Comment {
  std::string key, value;
  std::size_t line = 0;
};

void apply(const std::string& path, const Comment& comment, Block& block) {
  const auto wants = [&](const char* language) {
    if (block.language != language)
      refuse(path, comment.line, "comment '" + comment.key + "' above a block of " + block.language);
  };
  if (comment.key == "prelude") {
    wants("cpp");
    block.prelude = comment.value;
  } else if (comment.key == "definitions") {
    wants("cpp");
    block.definitions = true;
  } else if (comment.key == "file") {
    block.file = comment.value;
  } else if (comment.key == "not run") {
    if (comment.value.empty()) refuse(path, comment.line, "'not run' gives no reason");
    block.not_run = comment.value;
  } else {
    refuse(path, comment.line, "unknown comment '" + comment.key + "' (prelude, definitions, file, not run)");
  }
}

// The links and the inline code of a line of prose. A link inside code does not count.
void read_prose(const std::string& line, std::size_t number, Guide& guide) {
  std::string prose;
  for (std::size_t begin = 0, end = 0; begin < line.size(); begin = end + 1) {
    end = std::min(line.find('`', begin), line.size());
    prose += line.substr(begin, end - begin) + "`";
    if (end == line.size()) break;
    begin = end + 1;
    end   = std::min(line.find('`', begin), line.size());
    if (end > begin) guide.code.push_back(line.substr(begin, end - begin));
  }
  for (std::size_t at = prose.find("]("); at != std::string::npos; at = prose.find("](", at + 1)) {
    const std::size_t end = prose.find(')', at);
    if (end != std::string::npos) guide.links.push_back({prose.substr(at + 2, end - at - 2), number});
  }
}

// "<!-- key: value -->", or "<!-- key -->".
std::optional<Comment> read_comment(const std::string& line, std::size_t number) {
  static const std::string open = "<!-- ", close = " -->";
  if (!line.starts_with(open) || !line.ends_with(close) || line.size() < open.size() + close.size())
    return std::nullopt;
  const std::string inside = line.substr(open.size(), line.size() - open.size() - close.size());
  const std::size_t colon  = inside.find(": ");
  return Comment{inside.substr(0, colon), colon == std::string::npos ? "" : inside.substr(colon + 2), number};
}

bool line_matches(std::string_view pattern, std::string_view line) {
  const std::size_t dots = pattern.find("...");
  if (dots == std::string_view::npos) return pattern == line;
  if (!line.starts_with(pattern.substr(0, dots))) return false;
  const std::string_view rest = pattern.substr(dots + 3);
  for (std::size_t begin = dots; begin <= line.size(); ++begin) {
    if (line_matches(rest, line.substr(begin))) return true;
  }
  return false;
}

}  // namespace

std::vector<std::string> split_lines(std::string_view text) {
  std::vector<std::string> lines;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    lines.push_back(without_end_blanks(text.substr(0, end)));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return lines;
}

Guide read_guide(const std::filesystem::path& root, const std::string& path) {
  static const std::vector<std::string> languages{"cpp", "console", "json", "sh", "cmake", "text"};
  std::ifstream file(root / path, std::ios::binary);
  if (!file) throw std::runtime_error(path + ": cannot be read");
  Guide guide{.path = path, .lines = split_lines(std::string(std::istreambuf_iterator<char>(file), {}))};
  std::vector<Comment> comments;
  std::optional<Block> open;
  for (std::size_t i = 0; i < guide.lines.size(); ++i) {
    const std::string& line = guide.lines[i];
    if (open) {
      if (line == "```") {
        guide.blocks.push_back(*std::move(open));
        open.reset();
      } else {
        open->text += line + "\n";
      }
      continue;
    }
    if (line.starts_with("```")) {
      open = Block{.language   = line.substr(3),
                   .heading    = guide.headings.empty() ? "" : guide.headings.back(),
                   .first_line = i + 2};
      if (std::find(languages.begin(), languages.end(), open->language) == languages.end())
        refuse(path, i + 1, "unknown language '" + open->language + "' (cpp, console, json, sh, cmake, text)");
      for (const Comment& comment : comments) apply(path, comment, *open);
      comments.clear();
    } else if (const auto comment = read_comment(line, i + 1)) {
      comments.push_back(*comment);
    } else if (!line.empty()) {
      comments.clear();
      if (line.starts_with("#")) guide.headings.push_back(trimmed(line.substr(line.find_first_not_of('#'))));
      read_prose(line, i + 1, guide);
    }
  }
  if (open) refuse(path, open->first_line - 1, "the fence is not closed");
  return guide;
}

std::vector<std::string> find_guides(const std::filesystem::path& root) {
  std::vector<std::string> guides{"README.md"};
  for (const char* folder : {"backends", "engine", "graphs", "ops", "tests", "tools"}) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root / folder)) {
      if (entry.path().extension() == ".md") guides.push_back(std::filesystem::relative(entry.path(), root).string());
    }
  }
  std::sort(guides.begin(), guides.end());
  return guides;
}

std::vector<std::vector<std::string>> table_rows(const Guide& guide, std::string_view first_heading) {
  std::vector<std::vector<std::string>> rows;
  bool inside = false;
  for (const std::string& line : guide.lines) {
    if (!line.starts_with("|")) {
      inside = false;
      continue;
    }
    std::vector<std::string> cells;
    for (std::size_t begin = 1; begin < line.size();) {
      const std::size_t end = std::min(line.find('|', begin), line.size());
      cells.push_back(trimmed(std::string_view(line).substr(begin, end - begin)));
      begin = end + 1;
    }
    if (inside && !line.starts_with("|---")) rows.push_back(cells);
    if (!cells.empty() && cells.front() == first_heading) inside = true;
  }
  return rows;
}

std::string anchor_of(std::string_view heading) {
  std::string anchor;
  for (const char letter : heading) {
    if (letter == ' ') anchor += '-';
    if (std::isalnum(static_cast<unsigned char>(letter)) || letter == '-' || letter == '_')
      anchor += static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  }
  return anchor;
}

std::vector<Command> commands_of(const Block& block) {
  static const std::string comment = " # ", exit_code = "exit code ";
  std::vector<Command> commands;
  for (const std::string& line : split_lines(block.text)) {
    if (line.starts_with("$ ")) {
      Command command{.text = line.substr(2)};
      if (const std::size_t hash = command.text.find(comment); hash != std::string::npos) {
        const std::string said = command.text.substr(hash + comment.size());
        if (said.starts_with(exit_code)) command.exit_code = std::stoi(said.substr(exit_code.size()));
        command.text = without_end_blanks(command.text.substr(0, hash));
      }
      commands.push_back(command);
    } else if (commands.empty()) {
      throw std::runtime_error("a console block begins with a command: '$ stepgraph ...', not '" + line + "'");
    } else {
      commands.back().expected.push_back(line);
    }
  }
  return commands;
}

bool output_matches(const std::vector<std::string>& expected, const std::vector<std::string>& lines) {
  // matches[j]: the expected lines so far match the first j lines of the output.
  std::vector<char> matches(lines.size() + 1, 0);
  matches[0] = 1;
  for (const std::string& pattern : expected) {
    std::vector<char> next(lines.size() + 1, 0);
    if (pattern == "...") {
      bool any = false;
      for (std::size_t j = 0; j <= lines.size(); ++j) next[j] = any = any || matches[j];
    } else {
      for (std::size_t j = 0; j < lines.size(); ++j) next[j + 1] = matches[j] && line_matches(pattern, lines[j]);
    }
    matches = next;
  }
  return matches.back();
}

}  // namespace stepgraph::testing
