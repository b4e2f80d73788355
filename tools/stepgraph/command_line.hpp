#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

// The command line of a program, on top of CLI11. Only command_line.cpp includes CLI11's header, which takes seconds to
// compile.
namespace stepgraph::cli {

// An option of a command. Each function adds a rule and returns the option, so calls can be chained.
class Option {
 public:
  explicit Option(CLI::Option* option) : option_(option) {}

  Option& required();
  Option& hidden();                              // not in --help
  Option& one_of(std::vector<std::string> all);  // refuses every other value
  Option& size();                                // bytes, or a size such as 24GiB
  Option& between(int least, int most);          // refuses every other number; both ends are allowed
  Option& between(std::int64_t least, std::int64_t most);
  Option& between(double least, double most);

 private:
  CLI::Option* option_;
};

// A command or subcommand: a handle, freely copied, valid while its CommandLine lives. Option targets must live as
// long; their values when the option is added are shown as defaults in --help.
class Command {
 public:
  explicit Command(CLI::App& app) : app_(&app) {}

  Command subcommand(const std::string& name, const std::string& help);
  void require_subcommand();
  [[nodiscard]] std::vector<std::string> subcommand_names() const;
  void footer(const std::string& text);  // at the end of --help
  void run(std::function<void()> work);  // sets the work of the command

  Option flag(const std::string& name, bool& target, const std::string& help);
  // A flag that prints a text and ends the program, as --version.
  void print_flag(const std::string& name, const std::string& help, std::function<std::string()> text);

  // An option with a value. A name without dashes is a positional argument.
  Option option(const std::string& name, int& target, const std::string& help);
  Option option(const std::string& name, std::int64_t& target, const std::string& help);
  Option option(const std::string& name, std::uint32_t& target, const std::string& help);
  Option option(const std::string& name, double& target, const std::string& help);
  Option option(const std::string& name, std::string& target, const std::string& help);
  Option option(const std::string& name, std::optional<int>& target, const std::string& help);
  Option option(const std::string& name, std::optional<std::int64_t>& target, const std::string& help);
  Option option(const std::string& name, std::optional<double>& target, const std::string& help);
  Option option(const std::string& name, std::optional<std::string>& target, const std::string& help);
  // An option whose value may be left out: the target is then an empty text. `what` names the value in --help.
  Option optional_value(const std::string& name, std::optional<std::string>& target, const std::string& what,
                        const std::string& help);
  // Several values in one argument, with commas between them.
  Option list(const std::string& name, std::vector<int>& target, const std::string& help);
  Option list(const std::string& name, std::vector<std::int64_t>& target, const std::string& help);
  Option list(const std::string& name, std::vector<std::uint32_t>& target, const std::string& help);
  Option list(const std::string& name, std::vector<std::string>& target, const std::string& help);
  // All arguments after "--", as they are.
  Option rest(const std::string& name, std::vector<std::string>& target, const std::string& help);
  // One value for each time that the option is given.
  Option repeated(const std::string& name, std::vector<std::string>& target, const std::string& help);

 private:
  CLI::App* app_;
};

// The arguments are wrong. The message names the command and says how to get help.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class CommandLine {
 public:
  CommandLine(const std::string& program, const std::string& description);
  ~CommandLine();
  CommandLine(const CommandLine&)            = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  [[nodiscard]] Command command();
  // Parses the arguments, then runs the command that they name, or prints help. Throws UsageError, and whatever the
  // command throws.
  void run(int argc, char** argv);
  // "stepgraph bench overhead": the program and the subcommands that run() found.
  [[nodiscard]] std::string path() const;

 private:
  std::unique_ptr<CLI::App> app_;
};

}  // namespace stepgraph::cli
