#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <memory>

#include "engine/base/error.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/files/safetensors.hpp"
#include "graphs/train/trainer.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/commands/prompt.hpp"
#include "tools/stepgraph/processes/together.hpp"
#include "tools/stepgraph/processes/worlds.hpp"
#include "tools/stepgraph/session/config_options.hpp"
#include "tools/stepgraph/session/plan_text.hpp"
#include "tools/stepgraph/session/session.hpp"
#include "tools/stepgraph/session/targets.hpp"
#include "tools/stepgraph/terminal/interrupt.hpp"
#include "tools/stepgraph/terminal/output.hpp"
#include "tools/stepgraph/terminal/progress.hpp"

namespace stepgraph::cli {
namespace {

struct GenerateOptions {
  ConfigOptions config;
  std::string prompt;
  int tokens   = 64;
  bool as_text = false;
  bool force   = false;
  std::optional<std::string> dump_logits, flight;
};

// The logits of the token that follows the prompt. Collective.
void dump_logits(Generator& generator, const Prompt& prompt, World& world, const std::string& path) {
  const auto seen = std::min(prompt.tokens.size(), static_cast<std::size_t>(generator.run().step().batch.seq));
  const std::vector<double> logits                  = generator.logits(std::span(prompt.tokens).last(seen));
  const std::function<void(std::span<double>)> fill = [&](std::span<double> out) {
    std::ranges::copy(logits, out.begin());
  };
  in_first(world, "logits", [&] {
    const TensorToWrite tensor{.name = "logits", .shape = {std::ssize(logits)}, .fill = fill};
    write_safetensors(path, std::span(&tensor, 1), {{"format", "pt"}, {"written_by", "stepgraph"}});
  });
}

void print_json(const Prompt& prompt, const std::vector<std::int32_t>& generated) {
  JsonValue line = {{"type", "generate"}, {"prompt", prompt.tokens}, {"tokens", generated}};
  if (prompt.is_text) line.set("text", text_of(generated, false));
  // Bytes need not be UTF-8.
  print_line(json_line(line));
}

// Prints a token as soon as it is known: as text, or as an id after a comma.
void print_next(const Prompt& prompt, std::int32_t token, bool first) {
  std::cout << (prompt.is_text ? text_of({token}, isatty(STDOUT_FILENO) == 1) : str(first ? "" : ",", token));
  flush_output();
}

void run_generate(const GenerateOptions& options, const Config& config, World& world) {
  require_same_job(world, config,
                   str("--tokens ", options.tokens, options.as_text ? " --text" : "", " --prompt ", options.prompt,
                       option_text("--dump-logits", options.dump_logits)));
  in_first(world, "files to write", [&] {
    if (options.dump_logits == "-")
      throw Error(ErrorKind::config, "--dump-logits -: stdout is for the tokens (a file name)");
    check_target("--dump-logits", options.dump_logits, FileKind::safetensors, options.force);
  });
  const bool prints = is_first(world);
  if (prints) warn_about_threads(config.threads);
  const Start start   = make_start(config, prints);
  const Prompt prompt = parse_prompt(options.prompt, options.as_text, start.model.vocab);
  const auto wanted   = static_cast<std::int64_t>(prompt.tokens.size()) + std::max(options.tokens, 1) - 1;
  const std::optional<Machine> machine = chooser_machine(config);
  Generator generator(start.model, config.plan, static_cast<int>(std::min(start.model.context, wanted)), world,
                      {.threads       = threads_here(world, config.threads),
                       .stall_timeout = stall_timeout(config, world),
                       .reuse         = config.plan.reuse,
                       .machine       = pointer_to(machine),
                       .storage       = storage_of(config)});
  if (prints) note_rounded_weights("generate", config, generator.run().step());
  set_weights(generator.run(), start, config.seed);
  if (options.dump_logits) dump_logits(generator, prompt, world, *options.dump_logits);

  const Interrupt interrupt;
  std::vector<std::int32_t> seen = prompt.tokens, generated;
  Stop mine, stop;
  // Process 0 prints. If it cannot, all processes learn of it before the next token.
  const auto print = [&](const auto& text) {
    if (!prints || mine.output_closed || mine.failure) return;  // after a signal the tokens so far are printed
    try {
      text();
    } catch (const OutputClosed&) {
      mine.output_closed = true;
    } catch (const Error& error) {
      mine.failure = error;
    }
  };
  print([&] {
    if (options.config.json || !prompt.is_text) return;
    std::cout << text_of(prompt.tokens, isatty(STDOUT_FILENO) == 1);
    flush_output();
  });
  while (static_cast<int>(generated.size()) < options.tokens) {
    mine.signal = interrupt.signal();
    stop        = agree(world, mine);
    if (stop.wanted()) break;
    const std::int32_t next = generator.generate(seen, 1).front();
    seen.push_back(next);
    generated.push_back(next);
    print([&] {
      if (!options.config.json) print_next(prompt, next, generated.size() == 1);
    });
  }
  print([&] { options.config.json ? print_json(prompt, generated) : print_line(""); });
  if (!stop.wanted()) stop = agree(world, mine);
  if (stop.failure) throw *stop.failure;
  if (stop.output_closed) throw OutputClosed{};
  if (static_cast<int>(generated.size()) < options.tokens)
    throw Interrupted(stop.signal, str("interrupted after ", generated.size(), " of ", options.tokens, " tokens"));
}

}  // namespace

void add_generate(Command program) {
  Command command = program.subcommand(
      "generate",
      "Continue a prompt by greedy decoding: always append the most likely token. The model sees the last tokens "
      "that fit into its context");
  auto options = std::make_shared<GenerateOptions>();
  add_config_options(command, options->config, true);
  add_devices_option(command, options->config.devices);
  command
      .option("--prompt", options->prompt,
              "Token ids, separated by commas or blanks, or text in which each byte is a token")
      .required();
  command.option("--tokens", options->tokens, "Number of tokens to generate").between(1, 1 << 24);
  command.flag("--text", options->as_text, "The prompt is text even if it consists of numbers");
  command.option("--dump-logits", options->dump_logits,
                 "Write the logits of the token after the prompt to this .safetensors file, as one f64 tensor");
  add_flight_option(command, options->flight);
  add_force(command, options->force);
  command.footer("Example: stepgraph generate run.json --set 'model={\"load\": \"model\"}' --prompt 'Once upon'");
  command.run([options] {
    const Config config = read(options->config);
    check_offload_here(config);
    WorldOptions world_options{.command = "generate", .flight = options->flight};
    if (options->dump_logits) world_options.to_write.push_back(*options->dump_logits);
    in_world(world_options, config, [&](World& world) { run_generate(*options, config, world); });
  });
}

}  // namespace stepgraph::cli
