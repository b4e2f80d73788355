#pragma once
#include <string>
#include <string_view>

// What commands print on stdout.
namespace stepgraph::cli {

// Thrown when whoever reads stdout has gone (`stepgraph train ... | head`): nothing is left to be said, so the program
// ends, quietly and with 0.
struct OutputClosed {};

// One line, at once. Throws OutputClosed, or Error(backend) where stdout cannot be written for another reason.
void print_line(std::string_view line);

// What was printed so far, at once; throws as print_line does.
void flush_output();

// 17 significant digits, which say every double exactly; as JSON has no such numbers, null where it is not finite.
[[nodiscard]] std::string digits(double number);
// A few digits, for people.
[[nodiscard]] std::string short_number(double number, int num_digits = 6);

// A writer has to see that its reader has gone instead of being ended by it, so that it can clean up.
void ignore_broken_pipes();

}  // namespace stepgraph::cli
