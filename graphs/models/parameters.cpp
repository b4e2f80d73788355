#include "graphs/models/parameters.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>

#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorKind::config, "parameters: " + why); }

bool fewer(const Parameter& a, const Parameter& b) { return a.num_elements() < b.num_elements(); }

std::string decimal(double value) {
  char text[64];
  std::snprintf(text, sizeof text, "%.1f", value);
  return text;
}

using Line = std::array<std::string, 5>;

// Words to the left, numbers to the right.
void append(std::string& out, const Line& line, const std::array<std::size_t, 5>& widths) {
  std::string text;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const std::string space(widths[i] - line[i].size(), ' ');
    text += (i == 0 ? "" : "  ") + (i < 3 ? line[i] + space : space + line[i]);
  }
  out += text + "\n";
}

}  // namespace

ParameterInventory::ParameterInventory(std::vector<Parameter> parameters) {
  for (Parameter& parameter : parameters) add(std::move(parameter));
}

void ParameterInventory::add(Parameter parameter) {
  if (parameter.name.empty()) refuse(str("parameter ", parameters_.size(), " has no name"));
  if (by_name_.contains(parameter.name)) refuse(str("'", parameter.name, "' is given twice (unique names)"));
  check_shape(parameter.shape, str("parameters: '", parameter.name, "'"));
  if (parameter.num_elements() == 0)
    refuse(
        str("'", parameter.name, "' of shape ", to_string(parameter.shape), " has no elements (dims of at least 1)"));
  if (parameter.num_bytes() > std::numeric_limits<std::int64_t>::max() - num_bytes_)
    refuse(str("'", parameter.name, "' brings the total to more than 2^63 bytes"));
  num_elements_ += parameter.num_elements();
  num_bytes_ += parameter.num_bytes();
  by_name_.emplace(parameter.name, parameters_.size());
  parameters_.push_back(std::move(parameter));
}

bool ParameterInventory::contains(std::string_view name) const { return by_name_.contains(std::string(name)); }

const Parameter& ParameterInventory::find(std::string_view name) const {
  const auto found = by_name_.find(std::string(name));
  if (found == by_name_.end()) refuse(str("there is no parameter '", name, "' among ", size()));
  return parameters_[found->second];
}

std::vector<std::string> ParameterInventory::names() const {
  std::vector<std::string> all;
  for (const Parameter& parameter : parameters_) all.push_back(parameter.name);
  return all;
}

void ParameterInventory::check_any(const char* what) const {
  if (parameters_.empty()) refuse(str("an empty inventory has no ", what));
}

double ParameterInventory::mean_elements() const {
  check_any("mean");
  return static_cast<double>(num_elements_) / static_cast<double>(size());
}

double ParameterInventory::median_elements() const {
  check_any("median");
  std::vector<std::int64_t> elements;
  for (const Parameter& parameter : parameters_) elements.push_back(parameter.num_elements());
  std::sort(elements.begin(), elements.end());
  const auto upper = static_cast<double>(elements[size() / 2]), lower = static_cast<double>(elements[(size() - 1) / 2]);
  return (lower + upper) / 2;
}

const Parameter& ParameterInventory::smallest() const {
  check_any("smallest");
  return *std::min_element(parameters_.begin(), parameters_.end(), fewer);
}

const Parameter& ParameterInventory::largest() const {
  check_any("largest");
  return *std::max_element(parameters_.begin(), parameters_.end(), fewer);
}

std::string to_string(const ParameterInventory& inventory) {
  std::vector<Line> lines{{"name", "shape", "type", "elements", "bytes"}};
  for (const Parameter& parameter : inventory.parameters()) {
    lines.push_back({parameter.name, to_string(parameter.shape), std::string(to_string(parameter.type)),
                     str(parameter.num_elements()), str(parameter.num_bytes())});
  }
  lines.push_back({"total", "", "", str(inventory.num_elements()), str(inventory.num_bytes())});
  std::array<std::size_t, 5> widths{};
  for (const Line& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  std::string out;
  for (const Line& line : lines) append(out, line, widths);
  if (inventory.size() == 0) return out;
  return out + str(inventory.size(), " parameters, elements each: mean ", decimal(inventory.mean_elements()),
                   ", median ", decimal(inventory.median_elements()), ", smallest ",
                   inventory.smallest().num_elements(), " (", inventory.smallest().name, "), largest ",
                   inventory.largest().num_elements(), " (", inventory.largest().name, ")\n");
}

}  // namespace stepgraph
