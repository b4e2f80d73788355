#include "tools/stepgraph/command_line.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/base/nearest.hpp"
#include "engine/base/size.hpp"
#include "engine/run/threads/numa_nodes.hpp"

namespace stepgraph::cli {
namespace {

// Ends the parsing. Derives from Success, so CLI11 does not treat it as an error.
struct PrintAndEnd : CLI::Success {
  explicit PrintAndEnd(std::string what) : text(std::move(what)) {}
  std::string text;
};

template <class Target>
Option add_option(CLI::App& app, const std::string& name, Target& target, const std::string& help) {
  return Option(app.add_option(name, target, help)->capture_default_str());
}

template <class Item>
Option add_list(CLI::App& app, const std::string& name, std::vector<Item>& target, const std::string& help) {
  return Option(app.add_option(name, target, help)->delimiter(',')->capture_default_str());
}

std::string path_of(const CLI::App& app) {
  std::string path = app.get_name();
  for (const CLI::App* sub : app.get_subcommands()) path += " " + path_of(*sub);
  return path;
}

bool is_option(const std::string& text) { return text.size() > 1 && text[0] == '-' && text != "--"; }

std::string unknown_option(const CLI::App& app, const std::string& argument) {
  const std::string given = argument.substr(0, argument.find('='));
  if (app.get_option_no_throw("command") != nullptr)  // of Command::rest()
    return str("unknown option '", given, "' (options of the command come after --, as in ", app.get_name(),
               " -n 2 -- train run.json --set layout.dp=2)");
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_group().empty()) continue;  // hidden
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  std::string hint = did_you_mean(given, std::vector<std::string_view>(names.begin(), names.end()));
  if (!hint.empty()) {
    hint.pop_back();
  } else if (app.get_option_no_throw("--set") != nullptr) {
    hint = "a key of the config is changed with --set, as in --set layout.dp=2";
  }
  return str("unknown option '", given, "'", hint.empty() ? "" : str(" (", hint, ")"));
}

std::string unknown_subcommand(const CLI::App& app, const std::string& given) {
  std::vector<std::string_view> names;
  std::string known;
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(sub->get_name());
    known += (known.empty() ? "" : ", ") + sub->get_name();
  }
  return str("unknown subcommand '", given, "' (", did_you_mean(given, names), "known: ", known, ")");
}

// Describes an error in the arguments. CLI11's own message does not name an unknown subcommand.
std::string explain(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* last = &app;
  while (!last->get_subcommands().empty()) last = last->get_subcommands().back();
  const std::vector<std::string> unknown = last->remaining();
  const bool extra                       = error.get_exit_code() == static_cast<int>(CLI::ExitCodes::ExtrasError);
  if (unknown.empty() || (error.get_name() != "RequiredError" && !extra)) return error.what();
  if (extra) {
    const auto option = std::find_if(unknown.begin(), unknown.end(), is_option);
    return option == unknown.end() ? str("unexpected argument '", unknown.front(), "'")
                                   : unknown_option(*last, *option);
  }
  return is_option(unknown.front()) ? unknown_option(*last, unknown.front())
                                    : unknown_subcommand(*last, unknown.front());
}

}  // namespace

Option& Option::required() {
  option_->required()->default_str("");
  return *this;
}
Option& Option::hidden() {
  option_->group("");
  return *this;
}
Option& Option::one_of(std::vector<std::string> all) {
  option_->check(CLI::IsMember(std::move(all)));
  return *this;
}
Option& Option::size() {
  const auto to_bytes = [](std::string& text) {
    try {
      text = std::to_string(parse_size(text));
      return std::string();
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  option_->transform(CLI::Validator(to_bytes, ""))->type_name("SIZE");
  return *this;
}
Option& Option::between(int least, int most) { return between(std::int64_t{least}, std::int64_t{most}); }
Option& Option::between(std::int64_t least, std::int64_t most) {
  option_->check(CLI::Range(least, most));
  return *this;
}
Option& Option::between(double least, double most) {
  option_->check(CLI::Range(least, most));
  return *this;
}

Command Command::subcommand(const std::string& name, const std::string& help) {
  return Command(*app_->add_subcommand(name, help));
}
void Command::require_subcommand() { app_->require_subcommand(1); }
std::vector<std::string> Command::subcommand_names() const {
  std::vector<std::string> names;
  for (const CLI::App* sub : app_->get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(sub->get_name());
  return names;
}
void Command::footer(const std::string& text) { app_->footer(text); }
void Command::run(std::function<void()> work) {
  app_->callback([work = std::move(work)] {
    (void)chosen_numa_nodes();  // throws for a wrong variable, before anything is built
    work();
  });
}
Option Command::flag(const std::string& name, bool& target, const std::string& help) {
  return Option(app_->add_flag(name, target, help));
}
void Command::print_flag(const std::string& name, const std::string& help, std::function<std::string()> text) {
  app_->add_flag_callback(
      name, [text = std::move(text)] { throw PrintAndEnd(text()); }, help);
}

Option Command::option(const std::string& name, int& target, const std::string& help) {
  return add_option(*app_, name, target, help);
}
Option Command::option(const std::string& name, std::int64_t& target, const std::string& help) {
  return add_option(*app_, name, target, help);
}
Option Command::option(const std::string& name, std::uint32_t& target, const std::string& help) {
  return add_option(*app_, name, target, help);
}
Option Command::option(const std::string& name, double& target, const std::string& help) {
  return add_option(*app_, name, target, help);
}
Option Command::option(const std::string& name, std::string& target, const std::string& help) {
  return add_option(*app_, name, target, help);
}
Option Command::option(const std::string& name, std::optional<int>& target, const std::string& help) {
  return Option(app_->add_option(name, target, help));
}
Option Command::option(const std::string& name, std::optional<std::int64_t>& target, const std::string& help) {
  return Option(app_->add_option(name, target, help));
}
Option Command::option(const std::string& name, std::optional<double>& target, const std::string& help) {
  return Option(app_->add_option(name, target, help));
}
Option Command::option(const std::string& name, std::optional<std::string>& target, const std::string& help) {
  return Option(app_->add_option(name, target, help));
}
Option Command::optional_value(const std::string& name, std::optional<std::string>& target, const std::string& what,
                               const std::string& help) {
  const auto set = [&target](const CLI::results_t& values) {
    target = values.empty() || values.front() == "{}" ? std::string() : values.front();
    return true;
  };
  return Option(app_->add_option(name, set, help)->expected(0, 1)->type_name("[" + what + "]"));
}
Option Command::list(const std::string& name, std::vector<int>& target, const std::string& help) {
  return add_list(*app_, name, target, help);
}
Option Command::list(const std::string& name, std::vector<std::int64_t>& target, const std::string& help) {
  return add_list(*app_, name, target, help);
}
Option Command::list(const std::string& name, std::vector<std::uint32_t>& target, const std::string& help) {
  return add_list(*app_, name, target, help);
}
Option Command::list(const std::string& name, std::vector<std::string>& target, const std::string& help) {
  return add_list(*app_, name, target, help);
}
Option Command::rest(const std::string& name, std::vector<std::string>& target, const std::string& help) {
  return Option(app_->add_option(name, target, help));
}
Option Command::repeated(const std::string& name, std::vector<std::string>& target, const std::string& help) {
  return Option(app_->add_option(name, target, help)->allow_extra_args(false));
}

CommandLine::CommandLine(const std::string& program, const std::string& description)
    : app_(std::make_unique<CLI::App>(description, program)) {}
CommandLine::~CommandLine() = default;

Command CommandLine::command() { return Command(*app_); }

std::string CommandLine::path() const { return path_of(*app_); }

void CommandLine::run(int argc, char** argv) {
  try {
    app_->parse(argc, argv);
  } catch (const PrintAndEnd& end) {
    std::cout << end.text;
  } catch (const CLI::Success& help) {
    app_->exit(help, std::cout, std::cerr);
  } catch (const CLI::ParseError& error) {
    throw UsageError(str(path(), ": ", explain(*app_, error), " (see ", path(), " --help)"));
  }
}

}  // namespace stepgraph::cli
