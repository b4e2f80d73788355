#include "graphs/layout/device_mesh.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <numeric>
#include <random>
#include <set>

#include "engine/base/error.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::Message;
using Catch::Matchers::MessageMatches;

namespace {

std::vector<int> first_devices(int count) {
  std::vector<int> devices(static_cast<std::size_t>(count));
  std::iota(devices.begin(), devices.end(), 0);
  return devices;
}

sg::DeviceMesh random_mesh(std::mt19937& random) {
  std::vector<int> shape(1 + random() % 3);
  int places = 1;
  for (int& size : shape) places *= size = static_cast<int>(1 + random() % 4);
  std::set<int> devices;
  while (static_cast<int>(devices.size()) < places) devices.insert(static_cast<int>(random() % 1000));
  std::vector<int> list(devices.begin(), devices.end());
  std::shuffle(list.begin(), list.end(), random);
  return sg::DeviceMesh(shape, list);
}

}  // namespace

TEST_CASE("a mesh finds devices by coordinate and coordinates by device", "[graphs][mesh]") {
  const sg::DeviceMesh mesh({2, 3}, {7, 3, 9, 1, 0, 4});
  CHECK(mesh.device({0, 0}) == 7);
  CHECK(mesh.device({1, 2}) == 4);
  CHECK(mesh.coordinate(1) == std::vector{1, 0});
  CHECK(mesh.along(0, 3) == sg::DeviceMesh({2}, {3, 0}));
  CHECK(mesh.along(1, 3) == sg::DeviceMesh({3}, {7, 3, 9}));
  CHECK(mesh.at(0, 1) == sg::DeviceMesh({3}, {1, 0, 4}));
  CHECK(mesh.at(1, 2) == sg::DeviceMesh({2}, {9, 4}));
  CHECK(sg::to_string(mesh) == "2x3: 7 3 9 1 0 4");
}

TEST_CASE("the two lookups of a mesh are inverse to each other, and its text parses back", "[graphs][mesh]") {
  std::mt19937 random(3);
  for (int i = 0; i < sg::testing::cases(400); ++i) {
    const sg::DeviceMesh mesh = random_mesh(random);
    INFO(mesh);
    CHECK(sg::parse_device_mesh(sg::to_string(mesh)) == mesh);
    std::set<std::vector<int>> seen;
    for (const int device : mesh.devices()) {
      const std::vector<int> coordinate = mesh.coordinate(device);
      CHECK(mesh.device(coordinate) == device);
      CHECK(seen.insert(coordinate).second);
      for (int axis = 0; axis < mesh.num_axes(); ++axis) {
        const auto a              = static_cast<std::size_t>(axis);
        const sg::DeviceMesh line = mesh.along(axis, device);
        CHECK(line.num_devices() == mesh.shape()[a]);
        CHECK(line.coordinate(device) == std::vector{coordinate[a]});
        if (mesh.num_axes() == 1) continue;
        std::vector<int> others = coordinate;
        others.erase(others.begin() + axis);
        CHECK(mesh.at(axis, coordinate[a]).coordinate(device) == others);
      }
    }
    CHECK_FALSE(mesh.contains(1000));
  }
}

TEST_CASE("a strategy gives a line, a balanced grid or three balanced axes", "[graphs][mesh]") {
  const auto shape = [](sg::MeshStrategy strategy, int devices) {
    return sg::make_mesh(strategy, first_devices(devices)).shape();
  };
  using enum sg::MeshStrategy;
  CHECK(shape(pipeline, 12) == std::vector{12});
  CHECK(shape(tensor, 12) == std::vector{3, 4});
  CHECK(shape(tensor, 16) == std::vector{4, 4});
  CHECK(shape(tensor, 7) == std::vector{1, 7});
  CHECK(shape(hybrid, 8) == std::vector{2, 2, 2});
  CHECK(shape(hybrid, 12) == std::vector{2, 2, 3});
  CHECK(shape(hybrid, 512) == std::vector{8, 8, 8});
  CHECK(shape(hybrid, 1) == std::vector{1, 1, 1});
  CHECK(sg::make_mesh(tensor, {5, 2, 8, 1}) == sg::DeviceMesh({2, 2}, {5, 2, 8, 1}));
  for (const auto strategy : {pipeline, tensor, hybrid})
    CHECK(sg::parse_mesh_strategy(sg::to_string(strategy)) == strategy);
}

TEST_CASE("the chosen factors of a number have the smallest sum", "[graphs][mesh]") {
  for (int number = 1; number <= 200 / sg::testing::scale(); ++number) {
    int two = number + 1, three = number + 2;
    for (int a = 1; a <= number; ++a) {
      for (int b = 1; a * b <= number; ++b) {
        if (a * b == number) two = std::min(two, a + b);
        if (number % (a * b) == 0) three = std::min(three, a + b + number / a / b);
      }
    }
    for (const auto& [count, sum] : {std::pair(2, two), std::pair(3, three)}) {
      const std::vector<int> factors = sg::balanced_factors(number, count);
      CHECK(std::accumulate(factors.begin(), factors.end(), 0) == sum);
      CHECK(std::accumulate(factors.begin(), factors.end(), 1, std::multiplies<>()) == number);
      CHECK(std::is_sorted(factors.begin(), factors.end()));
    }
  }
}

TEST_CASE("an impossible mesh is refused with its numbers", "[graphs][mesh][refuses]") {
  const auto says = [](const char* what) { return Message(what); };
  CHECK_THROWS_MATCHES(sg::DeviceMesh({}, {}), sg::Error, says("mesh: 0 axes (1 to 3)"));
  CHECK_THROWS_MATCHES(sg::DeviceMesh({1, 1, 1, 1}, {0}), sg::Error, says("mesh: 4 axes (1 to 3)"));
  CHECK_THROWS_MATCHES(sg::DeviceMesh({2, 0}, {}), sg::Error, says("mesh: shape 2x0 has an axis of 0 (at least 1)"));
  CHECK_THROWS_MATCHES(sg::DeviceMesh({2, 2}, {0, 1, 2}), sg::Error,
                       says("mesh: shape 2x2 has 4 places, but 3 devices are given"));
  CHECK_THROWS_MATCHES(sg::DeviceMesh({3}, {4, 1, 4}), sg::Error, says("mesh: device 4 is given twice (distinct ids)"));
  CHECK_THROWS_MATCHES(sg::DeviceMesh({2}, {0, -1}), sg::Error, says("mesh: device -1 (ids from 0 on)"));
  CHECK_THROWS_MATCHES(sg::make_mesh(sg::MeshStrategy::tensor, {}), sg::Error,
                       says("mesh: no devices for a tensor mesh (at least 1)"));
  const sg::DeviceMesh mesh({2, 2}, {0, 1, 2, 3});
  CHECK_THROWS_MATCHES(mesh.coordinate(4), sg::Error, says("mesh: device 4 is not in 2x2: 0 1 2 3"));
  CHECK_THROWS_MATCHES(mesh.device({0, 2}), sg::Error, says("mesh: coordinate (0, 2) is outside 2x2"));
  CHECK_THROWS_MATCHES(mesh.device({0}), sg::Error, MessageMatches(ContainsSubstring("(2, one for each axis)")));
  CHECK_THROWS_MATCHES(mesh.along(2, 0), sg::Error, says("mesh: axis 2 of 2x2: 0 1 2 3 (0 to 1)"));
  CHECK_THROWS_MATCHES(mesh.at(0, 2), sg::Error, says("mesh: place 2 on axis 0 of 2x2: 0 1 2 3 (0 to 1)"));
  CHECK_THROWS_MATCHES(mesh.at(0, 1).at(0, 0), sg::Error, MessageMatches(ContainsSubstring("the only axis of")));
  CHECK_THROWS_MATCHES(sg::parse_mesh_strategy("line"), sg::Error,
                       says("mesh: unknown strategy 'line' (known: pipeline, tensor, hybrid)"));
}

TEST_CASE("a mesh's text with junk in it is refused", "[graphs][mesh][refuses]") {
  const char* text =
      GENERATE("", "2x2", "2x2: 0 1 2", "2x2: 0 1 2 3 ", "2x2: 0 1 2 3x", "2xx2: 0 1 2 3", "2x2:0 1 2 3");
  CAPTURE(text);
  CHECK_THROWS_AS(sg::parse_device_mesh(text), sg::Error);
}
