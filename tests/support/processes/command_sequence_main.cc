// Runs several commands of `stepgraph` in one process, so that one search for leaks at its end covers all of them. Each
// line of the file named by the argument is one command: the exit code that it must have, then its arguments, separated
// by spaces.
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "tools/stepgraph/program.hpp"

int main(int argc, char** argv) {
  std::ifstream file(argc == 2 ? argv[1] : "");
  int failed = 0, num_run = 0;
  for (std::string line; std::getline(file, line);) {
    std::vector<std::string> words;
    std::istringstream fields(line);
    for (std::string word; fields >> word;) words.push_back(word);
    const int expected = std::stoi(words.at(0));
    words[0]           = "stepgraph";
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    const int code = stepgraph::cli::run_program(static_cast<int>(arguments.size()), arguments.data());
    ++num_run;
    if (code == expected) continue;
    std::cerr << "exit code " << code << ", expected " << expected << ": " << line << "\n";
    failed = 1;
  }
  if (num_run == 0) std::cerr << "command_sequence: no commands (a file with one to a line)\n";
  return num_run == 0 ? 2 : failed;
}
