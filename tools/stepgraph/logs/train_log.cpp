#include "tools/stepgraph/logs/train_log.hpp"

#include <charconv>
#include <fstream>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/base/output_file.hpp"
#include "engine/base/words.hpp"
#include "graphs/files/json_value.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::cli {
namespace {

struct LineStart {
  std::int64_t step = 0;
  bool eval         = false;
  double seconds    = 0;
};

template <class Number>
std::optional<Number> number_in(std::string_view text) {
  Number number{};
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), number);
  return failed == std::errc() && end == text.data() + text.size() ? std::optional(number) : std::nullopt;
}

// None for a line that is not one of a log.
std::optional<LineStart> parse_csv(std::string_view line) {
  const std::vector<std::string_view> cells = split_text(line, ',');
  if (cells.size() != 7) return std::nullopt;
  const auto step    = number_in<std::int64_t>(cells[0]);
  const auto seconds = number_in<double>(cells[5]);
  if (!step || !seconds) return std::nullopt;
  return LineStart{.step = *step, .eval = !cells[6].empty(), .seconds = *seconds};
}

std::optional<LineStart> parse_json_log(std::string_view line) {
  try {
    const JsonValue value    = parse_json(line);
    const std::string& type  = value.at("type").as_string();
    const JsonValue& seconds = value.at("seconds");
    if (type != "step" && type != "eval") return std::nullopt;
    return LineStart{.step    = value.at("step").as_integer(),
                     .eval    = type == "eval",
                     .seconds = seconds.is_null() ? 0 : seconds.as_real()};
  } catch (const Error&) {
    return std::nullopt;
  }
}

// For CSV: JSON has no infinity, CSV readers know it.
std::string cell(double number) { return short_number(number, 17); }

}  // namespace

TrainLog::TrainLog(const std::string& path, std::int64_t first_step) : path_(path), csv_(path.ends_with(".csv")) {
  if (!is_written_in_place(path)) {
    OutputFile kept(path);
    const auto write = [&](std::string_view text) { kept.write(std::as_bytes(std::span(text))); };
    if (csv_) write(csv_header);
    std::ifstream before;
    if (first_step > 0) before.open(path, std::ios::binary);
    std::string line;
    while (before.is_open() && std::getline(before, line) && !before.eof()) {  // eof: it has no newline, so it is cut
      const auto found = csv_ ? parse_csv(line) : parse_json_log(line);
      if (!found || found->step > first_step || (found->step == first_step && !found->eval)) continue;
      seconds_before_ = found->seconds;
      write(line += '\n');
    }
    kept.keep();
  }
  file_.emplace(path);
  if (csv_ && is_written_in_place(path)) file_->add(csv_header);
}

void TrainLog::add(const StepRecord& record) {
  const double seconds = seconds_before_ + record.seconds;
  if (csv_)
    return file_->add(str(record.step, ",", cell(record.loss), ",", cell(record.rate), ",", cell(record.grad_norm), ",",
                          cell(record.tokens_per_s), ",", cell(seconds), ",\n"));
  file_->add(str("{\"type\":\"step\",\"step\":", record.step, ",\"loss\":", digits(record.loss),
                 ",\"rate\":", digits(record.rate), ",\"grad_norm\":", digits(record.grad_norm),
                 ",\"tokens_per_s\":", digits(record.tokens_per_s), ",\"seconds\":", digits(seconds), "}\n"));
}

void TrainLog::add(const EvalRecord& record) {
  const double seconds = seconds_before_ + record.seconds;
  if (csv_) return file_->add(str(record.step, ",,,,,", cell(seconds), ",", cell(record.loss), "\n"));
  file_->add(str("{\"type\":\"eval\",\"step\":", record.step, ",\"loss\":", digits(record.loss),
                 ",\"seconds\":", digits(seconds), "}\n"));
}

}  // namespace stepgraph::cli
