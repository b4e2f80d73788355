#pragma once
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

namespace stepgraph {

// A flat run of elements (the parameters of a unit, one after another) cut into equal shards. It is padded at its end
// to a multiple of the number of members, so the last shards may end in padding or be nothing else.
class FlatShards {
 public:
  FlatShards(std::int64_t num_elements, int num_members);

  [[nodiscard]] std::int64_t num_elements() const noexcept { return num_elements_; }
  [[nodiscard]] int num_members() const noexcept { return num_members_; }
  [[nodiscard]] std::int64_t shard_elements() const noexcept { return shard_elements_; }  // padding included
  [[nodiscard]] std::int64_t padded_elements() const noexcept { return shard_elements_ * num_members_; }
  [[nodiscard]] std::int64_t padding() const noexcept { return padded_elements() - num_elements_; }

  // A member's elements, begin <= i < end, without its padding.
  [[nodiscard]] std::int64_t begin(int member) const;
  [[nodiscard]] std::int64_t end(int member) const;
  [[nodiscard]] std::int64_t padding(int member) const;  // how many of its shard's elements are none

  [[nodiscard]] int owner(std::int64_t element) const;
  [[nodiscard]] std::int64_t local_index(std::int64_t element) const;

  // Where a parameter that lies at begin <= i < end went: one piece for every member that has some of it, in order.
  struct MemberRange {
    int member;
    std::int64_t local_begin;  // in the member's shard
    std::int64_t offset;       // in the parameter
    std::int64_t num_elements;
    friend auto operator<=>(const MemberRange&, const MemberRange&) = default;
  };
  [[nodiscard]] std::vector<MemberRange> member_ranges(std::int64_t begin, std::int64_t end) const;

  friend auto operator<=>(const FlatShards&, const FlatShards&) = default;

 private:
  void check_member(int member) const;

  std::int64_t num_elements_;
  int num_members_;
  std::int64_t shard_elements_;
};
[[nodiscard]] std::string to_string(const FlatShards& shards);  // "10 elements over 4: shards of 3, 2 of padding"
inline std::ostream& operator<<(std::ostream& out, const FlatShards& shards) { return out << to_string(shards); }

}  // namespace stepgraph
