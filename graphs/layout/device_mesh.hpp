#pragma once
#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

namespace stepgraph {

// Devices on a grid of one, two or three axes. Ids are any distinct numbers from 0 on, so a mesh may be a part of a
// machine; they are given with the last axis fastest. Valid once made; plain data, so any thread may read it.
class DeviceMesh {
 public:
  DeviceMesh(std::vector<int> shape, std::vector<int> devices);

  [[nodiscard]] int num_axes() const noexcept { return static_cast<int>(shape_.size()); }
  [[nodiscard]] int num_devices() const noexcept { return static_cast<int>(devices_.size()); }
  [[nodiscard]] const std::vector<int>& shape() const noexcept { return shape_; }
  [[nodiscard]] const std::vector<int>& devices() const noexcept { return devices_; }

  [[nodiscard]] bool contains(int device) const noexcept;
  [[nodiscard]] int device(const std::vector<int>& coordinate) const;
  [[nodiscard]] std::vector<int> coordinate(int device) const;

  // The line of devices through this one along an axis, and the mesh of one axis fewer at a place of an axis.
  [[nodiscard]] DeviceMesh along(int axis, int device) const;
  [[nodiscard]] DeviceMesh at(int axis, int place) const;

  friend auto operator<=>(const DeviceMesh&, const DeviceMesh&) = default;

 private:
  void check_axis(int axis) const;
  [[nodiscard]] std::size_t position(int device) const;  // refuses a device that is not here

  std::vector<int> shape_;
  std::vector<int> devices_;
  std::vector<std::size_t> by_id_;  // positions, by ascending device
};
[[nodiscard]] std::string to_string(const DeviceMesh& mesh);  // "2x3: 0 1 2 3 4 5"
[[nodiscard]] DeviceMesh parse_device_mesh(std::string_view text);
inline std::ostream& operator<<(std::ostream& out, const DeviceMesh& mesh) { return out << to_string(mesh); }

// What devices are wanted for: stages after one another (a line), rows and columns of matrices (a grid, as square as
// their number allows), or both and data parallel (three axes, as cubic as their number allows).
enum class MeshStrategy : std::uint8_t { pipeline, tensor, hybrid };
[[nodiscard]] std::string_view to_string(MeshStrategy strategy) noexcept;
[[nodiscard]] MeshStrategy parse_mesh_strategy(std::string_view text);
[[nodiscard]] DeviceMesh make_mesh(MeshStrategy strategy, std::vector<int> devices);

// Factors whose product is `number` and whose sum is the least, ascending: 12 is 3x4, or 2x2x3.
[[nodiscard]] std::vector<int> balanced_factors(int number, int num_factors);

}  // namespace stepgraph
