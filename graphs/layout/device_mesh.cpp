#include "graphs/layout/device_mesh.hpp"

#include <algorithm>
#include <array>
#include <numeric>

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"

namespace stepgraph {
namespace {

constexpr int most_axes = 3;
constexpr std::array<std::string_view, 3> strategy_names{"pipeline", "tensor", "hybrid"};

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorKind::config, "mesh: " + why); }

std::string shape_text(const std::vector<int>& shape) {
  return join_text(shape, "x", [](int size) { return str(size); });
}

std::vector<int> divisors(int number) {
  std::vector<int> all;
  for (int divisor = 1; divisor <= number / divisor; ++divisor) {
    if (number % divisor != 0) continue;
    all.push_back(divisor);
    if (divisor != number / divisor) all.push_back(number / divisor);
  }
  return all;
}

}  // namespace

DeviceMesh::DeviceMesh(std::vector<int> shape, std::vector<int> devices)
    : shape_(std::move(shape)), devices_(std::move(devices)), by_id_(devices_.size()) {
  if (shape_.empty() || shape_.size() > most_axes) refuse(str(shape_.size(), " axes (1 to ", most_axes, ")"));
  std::int64_t places = 1;
  for (const int size : shape_) {
    if (size < 1) refuse(str("shape ", shape_text(shape_), " has an axis of ", size, " (at least 1)"));
    places *= size;
    if (places > (std::int64_t{1} << 31)) refuse(str("shape ", shape_text(shape_), " is too large"));
  }
  if (places != static_cast<std::int64_t>(devices_.size()))
    refuse(str("shape ", shape_text(shape_), " has ", places, " places, but ", devices_.size(), " devices are given"));
  std::iota(by_id_.begin(), by_id_.end(), std::size_t{0});
  std::sort(by_id_.begin(), by_id_.end(), [&](std::size_t a, std::size_t b) { return devices_[a] < devices_[b]; });
  if (devices_[by_id_.front()] < 0) refuse(str("device ", devices_[by_id_.front()], " (ids from 0 on)"));
  for (std::size_t i = 1; i < by_id_.size(); ++i) {
    if (devices_[by_id_[i]] == devices_[by_id_[i - 1]])
      refuse(str("device ", devices_[by_id_[i]], " is given twice (distinct ids)"));
  }
}

void DeviceMesh::check_axis(int axis) const {
  if (axis < 0 || axis >= num_axes())
    refuse(str("axis ", axis, " of ", to_string(*this), " (0 to ", num_axes() - 1, ")"));
}

bool DeviceMesh::contains(int device) const noexcept {
  const auto found = std::lower_bound(by_id_.begin(), by_id_.end(), device,
                                      [&](std::size_t place, int id) { return devices_[place] < id; });
  return found != by_id_.end() && devices_[*found] == device;
}

std::size_t DeviceMesh::position(int device) const {
  if (!contains(device)) refuse(str("device ", device, " is not in ", to_string(*this)));
  return *std::lower_bound(by_id_.begin(), by_id_.end(), device,
                           [&](std::size_t place, int id) { return devices_[place] < id; });
}

int DeviceMesh::device(const std::vector<int>& coordinate) const {
  const auto text = [&] { return join_text(coordinate, ", ", [](int place) { return str(place); }); };
  if (coordinate.size() != shape_.size())
    refuse(str("coordinate (", text(), ") has ", coordinate.size(), " entries (", num_axes(), ", one for each axis)"));
  std::size_t position = 0;
  for (std::size_t axis = 0; axis < shape_.size(); ++axis) {
    if (coordinate[axis] < 0 || coordinate[axis] >= shape_[axis])
      refuse(str("coordinate (", text(), ") is outside ", shape_text(shape_)));
    position = position * static_cast<std::size_t>(shape_[axis]) + static_cast<std::size_t>(coordinate[axis]);
  }
  return devices_[position];
}

std::vector<int> DeviceMesh::coordinate(int device) const {
  std::size_t rest = position(device);
  std::vector<int> places(shape_.size());
  for (std::size_t axis = shape_.size(); axis-- > 0;) {
    places[axis] = static_cast<int>(rest % static_cast<std::size_t>(shape_[axis]));
    rest /= static_cast<std::size_t>(shape_[axis]);
  }
  return places;
}

DeviceMesh DeviceMesh::along(int axis, int through) const {
  check_axis(axis);
  const auto a            = static_cast<std::size_t>(axis);
  std::vector<int> places = coordinate(through), line;
  for (places[a] = 0; places[a] < shape_[a]; ++places[a]) line.push_back(device(places));
  return DeviceMesh({shape_[a]}, std::move(line));
}

DeviceMesh DeviceMesh::at(int axis, int place) const {
  check_axis(axis);
  const auto a = static_cast<std::size_t>(axis);
  if (num_axes() == 1) refuse(str("the only axis of ", to_string(*this), " cannot be removed (two or more axes)"));
  if (place < 0 || place >= shape_[a])
    refuse(str("place ", place, " on axis ", axis, " of ", to_string(*this), " (0 to ", shape_[a] - 1, ")"));
  std::vector<int> shape = shape_, kept;
  shape.erase(shape.begin() + axis);
  for (const int device : devices_) {
    if (coordinate(device)[a] == place) kept.push_back(device);
  }
  return DeviceMesh(std::move(shape), std::move(kept));
}

std::string to_string(const DeviceMesh& mesh) {
  return str(shape_text(mesh.shape()), ": ", join_text(mesh.devices(), " ", [](int device) { return str(device); }));
}

DeviceMesh parse_device_mesh(std::string_view text) {
  const auto numbers = [&](std::string_view list, char separator) {
    std::vector<int> values;
    for (const std::string_view piece : split_text(list, separator)) {
      const auto number = to_number<int>(piece);
      if (!number) refuse(str("'", text, "': '", piece, "' is not a number (as in 2x2: 0 1 2 3)"));
      values.push_back(*number);
    }
    return values;
  };
  const std::size_t colon = text.find(": ");
  if (colon == std::string_view::npos) refuse(str("'", text, "' has no ': ' after its shape (as in 2x2: 0 1 2 3)"));
  std::vector<int> shape = numbers(text.substr(0, colon), 'x');
  return DeviceMesh(std::move(shape), numbers(text.substr(colon + 2), ' '));
}

std::string_view to_string(MeshStrategy strategy) noexcept {
  return strategy_names[static_cast<std::size_t>(strategy)];
}

MeshStrategy parse_mesh_strategy(std::string_view text) {
  for (std::size_t i = 0; i < strategy_names.size(); ++i) {
    if (text == strategy_names[i]) return static_cast<MeshStrategy>(i);
  }
  refuse(str("unknown strategy '", text, "' (known: pipeline, tensor, hybrid)"));
}

DeviceMesh make_mesh(MeshStrategy strategy, std::vector<int> devices) {
  if (devices.empty()) refuse(str("no devices for a ", to_string(strategy), " mesh (at least 1)"));
  const int num_axes     = static_cast<int>(strategy) + 1;
  std::vector<int> shape = balanced_factors(static_cast<int>(devices.size()), num_axes);
  return DeviceMesh(std::move(shape), std::move(devices));
}

std::vector<int> balanced_factors(int number, int num_factors) {
  if (number < 1 || num_factors < 1)
    refuse(str(number, " as a product of ", num_factors, " factors (both at least 1)"));
  std::vector<int> best{number};
  if (num_factors == 1) return best;
  best.insert(best.begin(), static_cast<std::size_t>(num_factors - 1), 1);
  const auto sum = [](const std::vector<int>& factors) {
    return std::accumulate(factors.begin(), factors.end(), std::int64_t{0});
  };
  for (const int largest : divisors(number)) {
    std::vector<int> factors = balanced_factors(number / largest, num_factors - 1);
    if (factors.back() > largest) continue;  // found again with that one as the largest
    factors.push_back(largest);
    if (sum(factors) < sum(best)) best = std::move(factors);
  }
  return best;
}

}  // namespace stepgraph
