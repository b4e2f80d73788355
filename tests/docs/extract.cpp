// Writes the C++ blocks of the guides as sources of one test program, and a test case for the commands of each guide.
//   extract ROOT OUT_DIR NUM_FILES GUIDE...
// A guide becomes a namespace and a block a function in it, so blocks share only the definitions of their guide.
// Compiler errors name the guide and its line.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <set>

#include "tests/docs/guide.hpp"

namespace fs = std::filesystem;
using stepgraph::testing::Block;
using stepgraph::testing::Guide;

namespace {

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path.string() + ": cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

// Does not rewrite a file that already has these bytes, so that it is not compiled again.
void write_text(const fs::path& path, const std::string& text) {
  if (fs::exists(path) && read_text(path) == text) return;
  std::ofstream(path, std::ios::binary) << text;
}

std::string line_mark(std::size_t line, const std::string& path) {
  return "#line " + std::to_string(line) + " \"" + path + "\"\n";
}

// Replaces characters that CTest and Catch2 would need to escape.
std::string test_name(std::string text) {
  std::erase_if(text, [](char letter) { return letter == ',' || letter == '[' || letter == ']' || letter == '`'; });
  return text;
}

struct Source {
  std::set<std::string> includes;
  std::string text;
};

// The lines of a block. Its #include lines are moved to the top of the file.
std::string without_includes(const Block& block, Source& source) {
  std::string text;
  for (const std::string& line : stepgraph::testing::split_lines(block.text)) {
    const bool include = line.starts_with("#include ");
    if (include) source.includes.insert(line.substr(0, line.find("  //")));
    text += (include ? "" : line) + "\n";
  }
  return text;
}

std::size_t add_blocks(const fs::path& root, const Guide& guide, std::size_t number, Source& source) {
  std::map<std::string, int> by_heading;
  std::size_t num_blocks = 0;
  source.text += "\nnamespace guide_" + std::to_string(number) + " {\nnamespace sg = stepgraph;\n";
  for (const Block& block : guide.blocks) {
    if (block.language != "cpp" || !block.runs()) continue;
    ++num_blocks;
    const std::string mark = line_mark(block.first_line, guide.path);
    std::string text       = without_includes(block, source);
    if (block.definitions) {
      source.text += mark + text;
      continue;
    }
    const std::string function             = "block_" + std::to_string(block.first_line);
    static const std::string main_function = "int main()";
    if (const std::size_t at = text.find(main_function); at != std::string::npos) {
      source.text += mark + text.replace(at, main_function.size(), "void " + function + "()");
    } else {
      source.text += "void " + function + "() {\n";
      if (block.prelude) {
        const std::string prelude = "tests/docs/preludes/" + *block.prelude + ".inc";
        source.text += line_mark(1, prelude) + read_text(root / prelude);
      }
      source.text += mark + text + "}\n";
    }
    const int count        = ++by_heading[block.heading];
    const std::string name = block.heading + (count > 1 ? " (" + std::to_string(count) + ")" : "");
    source.text += "TEST_CASE(\"" + test_name(guide.path + ": " + name) + "\", \"[docs][cpp]\") {\n  " +
                   "stepgraph::testing::run_block(\"" + guide.path + "\", " + function + ");\n}\n";
  }
  const bool has_commands = std::any_of(guide.blocks.begin(), guide.blocks.end(),
                                        [](const Block& block) { return block.language == "console" && block.runs(); });
  if (has_commands) {
    source.text += "TEST_CASE(\"" + guide.path + ": commands\", \"[docs][commands]\") {\n  " +
                   "stepgraph::testing::run_commands(\"" + guide.path + "\");\n}\n";
  }
  source.text += "}  // namespace\n";
  return num_blocks;
}

int run(const std::vector<std::string>& arguments) {
  const fs::path root = arguments.at(0), out = arguments.at(1);
  std::vector<Source> sources(std::stoul(arguments.at(2)));
  std::size_t num_blocks = 0;
  for (std::size_t i = 3; i < arguments.size(); ++i) {
    const Guide guide = stepgraph::testing::read_guide(root, arguments[i]);
    Source& shortest  = *std::min_element(
         sources.begin(), sources.end(), [](const Source& a, const Source& b) { return a.text.size() < b.text.size(); });
    num_blocks += add_blocks(root, guide, i, shortest);
  }
  for (std::size_t i = 0; i < sources.size(); ++i) {
    std::string text = "#include \"tests/docs/block.hpp\"\n";
    for (const std::string& include : sources[i].includes) text += include + "\n";
    text += sources[i].text;
    if (i == 0)
      text += "\nconst std::size_t stepgraph::testing::num_compiled_blocks = " + std::to_string(num_blocks) + ";\n";
    write_text(out / ("blocks_" + std::to_string(i) + ".cpp"), text);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
