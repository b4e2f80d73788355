#include "graphs/layout/flat_shards.hpp"

#include <algorithm>

#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorKind::config, "flat shards: " + why); }

}  // namespace

FlatShards::FlatShards(std::int64_t num_elements, int num_members)
    : num_elements_(num_elements), num_members_(num_members), shard_elements_(0) {
  constexpr std::int64_t most = (std::int64_t{1} << 60) - 1;
  if (num_elements < 0 || num_elements > most) refuse(str(num_elements, " elements (0 or more, fewer than 2^60)"));
  if (num_members < 1) refuse(str("over ", num_members, " members (at least 1)"));
  shard_elements_ = (num_elements + num_members - 1) / num_members;
}

void FlatShards::check_member(int member) const {
  if (member < 0 || member >= num_members_) refuse(str("member ", member, " (0 to ", num_members_ - 1, ")"));
}

std::int64_t FlatShards::begin(int member) const {
  check_member(member);
  return std::min(num_elements_, member * shard_elements_);
}

std::int64_t FlatShards::end(int member) const {
  check_member(member);
  return std::min(num_elements_, (member + std::int64_t{1}) * shard_elements_);
}

std::int64_t FlatShards::padding(int member) const { return shard_elements_ - (end(member) - begin(member)); }

int FlatShards::owner(std::int64_t element) const {
  if (element < 0 || element >= num_elements_)
    refuse(str("element ", element, " of ", num_elements_, " (from 0 on, and none of the padding)"));
  return static_cast<int>(element / shard_elements_);
}

std::int64_t FlatShards::local_index(std::int64_t element) const { return element - begin(owner(element)); }

std::vector<FlatShards::MemberRange> FlatShards::member_ranges(std::int64_t first, std::int64_t last) const {
  if (first < 0 || last > num_elements_ || first > last)
    refuse(str("elements ", first, " to ", last, " (inside 0 to ", num_elements_, ")"));
  std::vector<MemberRange> all;
  for (std::int64_t at = first; at < last;) {
    const int member        = owner(at);
    const std::int64_t stop = std::min(last, end(member));
    all.push_back({.member = member, .local_begin = local_index(at), .offset = at - first, .num_elements = stop - at});
    at = stop;
  }
  return all;
}

std::string to_string(const FlatShards& shards) {
  return str(shards.num_elements(), " elements over ", shards.num_members(), ": shards of ", shards.shard_elements(),
             ", ", shards.padding(), " of padding");
}

}  // namespace stepgraph
