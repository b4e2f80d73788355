#include "graphs/layout/partition.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <random>

#include "engine/base/error.hpp"
#include "tests/support/enumerators.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::Message;
using Catch::Matchers::MessageMatches;
using sg::PartitionKind;

namespace {

std::vector<std::int64_t> sizes(const sg::Partition& partition) {
  std::vector<std::int64_t> list;
  for (int member = 0; member < partition.num_members(); ++member)
    list.push_back(partition.end(member) - partition.begin(member));
  return list;
}

sg::PartitionSpec random_spec(std::mt19937& random) {
  sg::PartitionSpec spec{.num_members = static_cast<int>(1 + random() % 9),
                         .kind        = static_cast<PartitionKind>(random() % 3)};
  spec.shape.resize(1 + random() % 4);
  for (std::int64_t& size : spec.shape) size = static_cast<std::int64_t>(random() % 8);
  if (spec.kind != PartitionKind::replicated) spec.dim = static_cast<int>(random() % spec.shape.size());
  return spec;
}

template <class Check>
void for_random_partitions(Check check) {
  std::mt19937 random(11);
  for (int i = 0; i < sg::testing::cases(2000); ++i) {
    const sg::Partition partition(random_spec(random));
    INFO(partition);
    check(partition);
  }
}

}  // namespace

TEST_CASE("ceiling blocks are equal until the indices run out, and balanced blocks differ by at most one",
          "[graphs][partition]") {
  const auto cut = [](std::int64_t size, int members, PartitionKind kind) {
    return sizes(sg::Partition({.shape = {size}, .num_members = members, .kind = kind}));
  };
  using Sizes = std::vector<std::int64_t>;
  CHECK(cut(10, 4, PartitionKind::ceiling) == Sizes{3, 3, 3, 1});
  CHECK(cut(9, 6, PartitionKind::ceiling) == Sizes{2, 2, 2, 2, 1, 0});
  CHECK(cut(2, 4, PartitionKind::ceiling) == Sizes{1, 1, 0, 0});
  CHECK(cut(10, 4, PartitionKind::balanced) == Sizes{3, 3, 2, 2});
  CHECK(cut(9, 6, PartitionKind::balanced) == Sizes{2, 2, 2, 1, 1, 1});
  CHECK(cut(2, 4, PartitionKind::balanced) == Sizes{1, 1, 0, 0});
  CHECK(cut(10, 2, PartitionKind::replicated) == Sizes{10, 10});
  CHECK(cut(0, 2, PartitionKind::ceiling) == Sizes{0, 0});
}

TEST_CASE("blocks cover every index once, and the owner of an index has it in its block", "[graphs][partition]") {
  for_random_partitions([](const sg::Partition& partition) {
    if (partition.replicated()) return;
    std::int64_t at = 0, elements = 0;
    for (int member = 0; member < partition.num_members(); ++member) {
      CHECK(partition.begin(member) == at);
      CHECK(partition.end(member) >= at);
      for (; at < partition.end(member); ++at) {
        CHECK(partition.owner(at) == member);
        CHECK(partition.local_index(at) == at - partition.begin(member));
        CHECK(partition.global_index(member, partition.local_index(at)) == at);
      }
      sg::TensorShape local                                 = partition.shape();
      local[static_cast<std::size_t>(partition.spec().dim)] = partition.end(member) - partition.begin(member);
      CHECK(partition.local_shape(member) == local);
      CHECK(partition.local_elements(member) == sg::num_elements(local));
      CHECK(partition.empty(member) == (sg::num_elements(local) == 0));
      elements += partition.local_elements(member);
    }
    CHECK(at == partition.dim_size());
    CHECK(elements == sg::num_elements(partition.shape()));
  });
}

TEST_CASE("the regions of a partition cover every byte of the tensor once", "[graphs][partition]") {
  for_random_partitions([](const sg::Partition& partition) {
    if (partition.replicated()) return;
    const sg::DType type =
        sg::testing::all_types[static_cast<std::size_t>(partition.num_members()) % sg::testing::all_types.size()];
    const auto element = static_cast<std::int64_t>(sg::size_bytes(type));
    std::vector<int> owner(static_cast<std::size_t>(sg::num_elements(partition.shape()) * element), -1);
    for (int member = 0; member < partition.num_members(); ++member) {
      const sg::Region region = partition.region(member, type);
      CHECK(region.num_bytes() == partition.local_elements(member) * element);
      CHECK((region.contiguous() ? region.stride == 0 : region.length < region.stride));
      for (std::int64_t i = 0; i < region.count; ++i) {
        for (std::int64_t k = 0; k < region.length; ++k) {
          int& byte = owner.at(static_cast<std::size_t>(region.offset + i * region.stride + k));
          CHECK(byte == -1);
          byte = member;
        }
      }
    }
    for (std::size_t i = 0; i < owner.size(); ++i) {
      std::int64_t rest = static_cast<std::int64_t>(i) / element;
      for (auto dim = static_cast<int>(partition.shape().size()) - 1; dim > partition.spec().dim; --dim)
        rest /= partition.shape()[static_cast<std::size_t>(dim)];
      CHECK(owner[i] == partition.owner(rest % partition.dim_size()));
    }
  });
}

TEST_CASE("a block is one range along the first dim and a strided set along another", "[graphs][partition]") {
  const sg::TensorShape shape{4, 6};
  const sg::Partition rows({.shape = shape, .num_members = 2}), columns({.shape = shape, .dim = 1, .num_members = 2});
  CHECK((rows.region(1, sg::DType::f32) == sg::Region{.offset = 48, .length = 48}));
  CHECK((columns.region(1, sg::DType::f32) == sg::Region{.offset = 12, .length = 12, .stride = 24, .count = 4}));
  const sg::Partition alone({.shape = shape, .dim = 1});
  CHECK((alone.region(0, sg::DType::f32) == sg::Region{.length = 96}));
  const sg::Partition copies({.shape = shape, .num_members = 2, .kind = PartitionKind::replicated});
  CHECK((copies.region(1, sg::DType::f64) == sg::Region{.length = 192}));
  CHECK(columns.accesses({}, sg::DType::f32).view().size() == 2);
}

TEST_CASE("a member that lacks indices it uses needs communication", "[graphs][partition]") {
  const sg::Partition cut({.shape = {10, 2}, .num_members = 4}),
      copies({.shape = {10, 2}, .num_members = 4, .kind = PartitionKind::replicated});
  CHECK(cut.needs_communication());
  CHECK(cut.needs_communication(0));
  CHECK_FALSE(cut.needs_communication(1, 3, 6));
  CHECK_FALSE(cut.needs_communication(1, 9, 9));
  CHECK(cut.needs_communication(1, 2, 6));
  CHECK(cut.needs_communication(1, 3, 7));
  CHECK_FALSE(copies.needs_communication());
  CHECK_FALSE(copies.needs_communication(3, 0, 10));
  const sg::Partition one_has_all({.shape = {1, 2}, .num_members = 3});
  CHECK_FALSE(one_has_all.needs_communication(0));
  CHECK(one_has_all.needs_communication(1));
  CHECK(one_has_all.needs_communication());
  for_random_partitions([](const sg::Partition& partition) {
    bool any = false;
    for (int member = 0; member < partition.num_members(); ++member) {
      const bool lacks = partition.local_elements(member) < sg::num_elements(partition.shape());
      CHECK(partition.needs_communication(member) == lacks);
      any |= lacks;
    }
    CHECK(partition.needs_communication() == any);
  });
}

TEST_CASE("every member has all of a replicated tensor, also of a scalar", "[graphs][partition]") {
  const sg::Partition scalar({.shape = {}, .num_members = 3, .kind = PartitionKind::replicated});
  CHECK(scalar.local_shape(2).empty());
  CHECK(scalar.local_elements(2) == 1);
  CHECK((scalar.region(2, sg::DType::f32) == sg::Region{.length = 4}));
  CHECK_FALSE(scalar.needs_communication());
  const sg::Partition copies({.shape = {4, 3}, .num_members = 2, .kind = PartitionKind::replicated});
  CHECK(copies.local_shape(1) == sg::TensorShape{4, 3});
  CHECK(copies.owner(3) == 0);
  CHECK(copies.local_index(3) == 3);
  CHECK(copies.global_index(1, 3) == 3);
}

TEST_CASE("a partition's text parses back to it", "[graphs][partition]") {
  CHECK(sg::to_string(sg::Partition({.shape = {10, 4}, .dim = 1, .num_members = 3})) == "10x4 dim 1 over 3 ceiling");
  CHECK(sg::to_string(sg::Partition({.num_members = 2, .kind = PartitionKind::replicated})) ==
        "scalar over 2 replicated");
  for_random_partitions(
      [](const sg::Partition& partition) { CHECK(sg::parse_partition(sg::to_string(partition)) == partition); });
}

TEST_CASE("a partition's text with junk in it is refused", "[graphs][partition][refuses]") {
  const char* text =
      GENERATE("", "10x4", "10x4 dim 0 over 3", "10x4 dim 0 over 3 ceilings", "10x4 dim 0 over 3 replicated",
               "10x4 over 3 ceiling", "10x4 dim 0junk over 3 ceiling", "10x4x dim 0 over 3 ceiling",
               "10x4 dim 0 over 3 ceiling ", "10x4 axis 0 over 3 ceiling", "10x-4 dim 0 over 3 ceiling");
  CAPTURE(text);
  CHECK_THROWS_AS(sg::parse_partition(text), sg::Error);
}

TEST_CASE("an impossible partition is refused with its numbers", "[graphs][partition][refuses]") {
  const auto says = [](const char* what) { return Message(what); };
  CHECK_THROWS_MATCHES(sg::Partition({.shape = {4, 2}, .dim = 2}), sg::Error,
                       says("partition: dim 2 of shape 4x2 (0 to 1)"));
  CHECK_THROWS_MATCHES(sg::Partition({.shape = {4, 2}, .dim = -1}), sg::Error,
                       says("partition: dim -1 of shape 4x2 (0 to 1)"));
  CHECK_THROWS_MATCHES(sg::Partition({.shape = {4}, .num_members = 0}), sg::Error,
                       says("partition: over 0 members (at least 1)"));
  CHECK_THROWS_MATCHES(sg::Partition({.shape = {4, -2}}), sg::Error,
                       says("partition: shape 4x-2 has a dim of -2 (0 or more)"));
  CHECK_THROWS_MATCHES(sg::Partition({.shape = {1 << 30, 1 << 30}}), sg::Error,
                       says("partition: shape 1073741824x1073741824 has too many elements (fewer than 2^60)"));
  CHECK_THROWS_MATCHES(sg::Partition({.shape = {}}), sg::Error,
                       says("partition: a scalar has no dim to cut (replicated)"));
  CHECK_THROWS_MATCHES(sg::Partition({.shape = {4}, .dim = 1, .kind = PartitionKind::replicated}), sg::Error,
                       says("partition: dim 1 of a replicated tensor (0, because no dim is cut)"));
  const sg::Partition partition({.shape = {4}, .num_members = 2});
  CHECK_THROWS_MATCHES(partition.begin(2), sg::Error, says("partition: member 2 of 4 dim 0 over 2 ceiling (0 to 1)"));
  CHECK_THROWS_MATCHES(partition.owner(4), sg::Error, says("partition: index 4 of 4 dim 0 over 2 ceiling (0 to 3)"));
  CHECK_THROWS_MATCHES(sg::Partition({.shape = {0}}).owner(0), sg::Error,
                       MessageMatches(ContainsSubstring("(it has none)")));
  CHECK_THROWS_MATCHES(partition.global_index(0, 2), sg::Error,
                       MessageMatches(ContainsSubstring("local index 2 of member 0")));
  CHECK_THROWS_MATCHES(partition.needs_communication(0, 1, 5), sg::Error,
                       says("partition: indices 1 to 5 of 4 dim 0 over 2 ceiling (inside 0 to 4)"));
}

TEST_CASE("a shape's text parses back to it", "[graphs][partition]") {
  for (const sg::TensorShape& shape : {sg::TensorShape{}, sg::TensorShape{7}, sg::TensorShape{4, 0, 12}})
    CHECK(sg::parse_tensor_shape(sg::to_string(shape)) == shape);
  CHECK_THROWS_MATCHES(sg::parse_tensor_shape("4xa"), sg::Error,
                       Message("shape '4xa': 'a' is not a size (as in 4x10)"));
}
