#pragma once
#include <compare>
#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "engine/base/types.hpp"
#include "engine/graph/access.hpp"
#include "ops/tape/tensor_shape.hpp"

namespace stepgraph {

// Which indices of a dim a member has. For 10 over 4:
enum class PartitionKind : std::uint8_t {
  ceiling,     // blocks of ceil(size / members): 3 3 3 1. The last ones may be smaller, or empty
  balanced,    // the first size % members have one more: 3 3 2 2
  replicated,  // every member has all of it: 10 10 10 10
};
[[nodiscard]] std::string_view to_string(PartitionKind kind) noexcept;
inline std::ostream& operator<<(std::ostream& out, PartitionKind kind) { return out << to_string(kind); }

struct PartitionSpec {
  TensorShape shape                                                   = {};  // of the whole tensor
  int dim                                                             = 0;   // that is cut; replicated: not used, and 0
  int num_members                                                     = 1;
  PartitionKind kind                                                  = PartitionKind::ceiling;
  friend auto operator<=>(const PartitionSpec&, const PartitionSpec&) = default;
};

// Which block of a tensor each member of a group has. Members are counted from 0, in group order. Valid once made;
// plain data, so any thread may read it.
class Partition {
 public:
  explicit Partition(PartitionSpec spec);

  [[nodiscard]] const PartitionSpec& spec() const noexcept { return spec_; }
  [[nodiscard]] const TensorShape& shape() const noexcept { return spec_.shape; }
  [[nodiscard]] int num_members() const noexcept { return spec_.num_members; }
  [[nodiscard]] bool replicated() const noexcept { return spec_.kind == PartitionKind::replicated; }
  [[nodiscard]] std::int64_t dim_size() const noexcept { return dim_size_; }  // indices of the dim that is cut

  // The member's block: indices begin <= i < end of the dim. Blocks of one partition are in member order.
  [[nodiscard]] std::int64_t begin(int member) const;
  [[nodiscard]] std::int64_t end(int member) const;
  [[nodiscard]] TensorShape local_shape(int member) const;
  [[nodiscard]] std::int64_t local_elements(int member) const;
  [[nodiscard]] bool empty(int member) const { return local_elements(member) == 0; }

  // The member that has an index of the dim, and the index inside its block. Replicated: member 0.
  [[nodiscard]] int owner(std::int64_t dim_index) const;
  [[nodiscard]] std::int64_t local_index(std::int64_t dim_index) const;
  [[nodiscard]] std::int64_t global_index(int member, std::int64_t local_index) const;

  // Whether a member that uses the whole tensor, or indices begin to end of the dim, lacks some of it; and whether any
  // member does.
  [[nodiscard]] bool needs_communication(int member) const;
  [[nodiscard]] bool needs_communication(int member, std::int64_t begin, std::int64_t end) const;
  [[nodiscard]] bool needs_communication() const;

  // The bytes of a member's block inside the whole tensor, in normal form: one range where the dim is the first, else a
  // range for every place of the dims before it. So a collective may read or write blocks where they lie.
  [[nodiscard]] Region region(int member, DType type) const;
  [[nodiscard]] Access access(Buffer whole, int member, DType type) const { return {whole, region(member, type)}; }
  // One for each member: what a side that holds every member's shard declares (engine/graph/part.hpp).
  [[nodiscard]] AccessList accesses(Buffer whole, DType type) const;

  friend bool operator==(const Partition& a, const Partition& b) { return a.spec_ == b.spec_; }
  friend auto operator<=>(const Partition& a, const Partition& b) { return a.spec_ <=> b.spec_; }

 private:
  void check_member(int member) const;
  void check_index(std::int64_t dim_index) const;
  [[nodiscard]] std::int64_t boundary(std::int64_t member) const noexcept;  // where its block begins

  PartitionSpec spec_;
  std::int64_t dim_size_ = 1;
  std::int64_t outer_    = 1;  // elements of the dims before
  std::int64_t inner_    = 1;  // of those after
};
[[nodiscard]] std::string to_string(
    const Partition& partition);  // "10x4 dim 0 over 3 ceiling", "10x4 over 3 replicated"
[[nodiscard]] Partition parse_partition(std::string_view text);
inline std::ostream& operator<<(std::ostream& out, const Partition& partition) { return out << to_string(partition); }

}  // namespace stepgraph
