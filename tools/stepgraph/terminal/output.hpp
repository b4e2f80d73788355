#pragma once
#include <string>
#include <string_view>

#include "engine/base/error.hpp"

// Printing on stdout, and redrawing a line on stderr.
namespace stepgraph::cli {

// Thrown when the reader of stdout has closed its pipe (`stepgraph train ... | head`). The program then ends with exit
// code 0 and without a message.
struct OutputClosed {};

// Ends the program with an exit code; all has been said.
struct Exit {
  int code;
};
[[nodiscard]] int exit_code(ErrorKind kind) noexcept;  // of a program that ends with such an error

// Prints a line and flushes. Throws OutputClosed, or Error(backend) if stdout cannot be written for another reason.
void print_line(std::string_view line);

// Flushes stdout; throws as print_line does.
void flush_output();

// 17 significant digits, enough to read back the same double. "null" if it is not finite: JSON has no such numbers.
[[nodiscard]] std::string digits(double number);
// A rounded number for text output.
[[nodiscard]] std::string short_number(double number, int num_digits = 6);

// Whether a line on stderr can be redrawn: it is a terminal. `clear_line` removes the line.
[[nodiscard]] bool stderr_can_redraw();
[[nodiscard]] int stderr_columns();
inline constexpr std::string_view clear_line = "\r\x1b[K";

// Ignores SIGPIPE and SIGXFSZ: writing to a closed pipe, or past the limit of file sizes (ulimit -f), then fails with
// an error instead of ending the process, so commands can clean up.
void ignore_signals_of_writes();

}  // namespace stepgraph::cli
