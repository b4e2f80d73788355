#include "graphs/layout/partition.hpp"

#include <algorithm>
#include <array>

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"

namespace stepgraph {
namespace {

constexpr std::array<std::string_view, 3> kind_names{"ceiling", "balanced", "replicated"};

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorKind::config, "partition: " + why); }

}  // namespace

std::string_view to_string(PartitionKind kind) noexcept { return kind_names[static_cast<std::size_t>(kind)]; }

Partition::Partition(PartitionSpec spec) : spec_(std::move(spec)) {
  check_shape(spec_.shape, "partition");
  if (spec_.num_members < 1) refuse(str("over ", spec_.num_members, " members (at least 1)"));
  const auto num_dims = static_cast<int>(spec_.shape.size());
  if (replicated()) {
    if (spec_.dim != 0) refuse(str("dim ", spec_.dim, " of a replicated tensor (0, because no dim is cut)"));
    dim_size_ = spec_.shape.empty() ? 1 : spec_.shape[0];
  } else if (spec_.shape.empty()) {
    refuse("a scalar has no dim to cut (replicated)");
  } else if (spec_.dim < 0 || spec_.dim >= num_dims) {
    refuse(str("dim ", spec_.dim, " of shape ", to_string(spec_.shape), " (0 to ", num_dims - 1, ")"));
  } else {
    dim_size_ = spec_.shape[static_cast<std::size_t>(spec_.dim)];
  }
  for (int dim = 0; dim < num_dims; ++dim) {
    if (dim < spec_.dim) outer_ *= spec_.shape[static_cast<std::size_t>(dim)];
    if (dim > spec_.dim) inner_ *= spec_.shape[static_cast<std::size_t>(dim)];
  }
}

void Partition::check_member(int member) const {
  if (member < 0 || member >= num_members())
    refuse(str("member ", member, " of ", *this, " (0 to ", num_members() - 1, ")"));
}

void Partition::check_index(std::int64_t dim_index) const {
  if (dim_index >= 0 && dim_index < dim_size_) return;
  refuse(
      str("index ", dim_index, " of ", *this, " (", dim_size_ == 0 ? "it has none" : str("0 to ", dim_size_ - 1), ")"));
}

std::int64_t Partition::boundary(std::int64_t member) const noexcept {
  const std::int64_t n = num_members(), each = dim_size_ / n, rest = dim_size_ % n;
  if (spec_.kind == PartitionKind::balanced) return member * each + std::min(member, rest);
  return std::min(dim_size_, member * (each + (rest > 0 ? 1 : 0)));
}

std::int64_t Partition::begin(int member) const {
  check_member(member);
  return replicated() ? 0 : boundary(member);
}

std::int64_t Partition::end(int member) const {
  check_member(member);
  return replicated() ? dim_size_ : boundary(member + std::int64_t{1});
}

TensorShape Partition::local_shape(int member) const {
  const std::int64_t size = end(member) - begin(member);
  TensorShape shape       = spec_.shape;
  if (!replicated()) shape[static_cast<std::size_t>(spec_.dim)] = size;
  return shape;
}

std::int64_t Partition::local_elements(int member) const { return outer_ * (end(member) - begin(member)) * inner_; }

int Partition::owner(std::int64_t dim_index) const {
  check_index(dim_index);
  if (replicated()) return 0;
  const std::int64_t n = num_members(), each = dim_size_ / n, rest = dim_size_ % n;
  const std::int64_t larger = each + (rest > 0 ? 1 : 0);  // at least 1: there is an index
  if (spec_.kind == PartitionKind::ceiling || dim_index < rest * larger) return static_cast<int>(dim_index / larger);
  return static_cast<int>(rest + (dim_index - rest * larger) / each);
}

std::int64_t Partition::local_index(std::int64_t dim_index) const { return dim_index - begin(owner(dim_index)); }

std::int64_t Partition::global_index(int member, std::int64_t local_index) const {
  const std::int64_t size = end(member) - begin(member);
  if (local_index < 0 || local_index >= size)
    refuse(str("local index ", local_index, " of member ", member, " of ", *this, ", which has ", size, " indices"));
  return begin(member) + local_index;
}

bool Partition::needs_communication(int member) const { return needs_communication(member, 0, dim_size_); }

bool Partition::needs_communication(int member, std::int64_t first, std::int64_t last) const {
  check_member(member);
  if (first < 0 || last > dim_size_ || first > last)
    refuse(str("indices ", first, " to ", last, " of ", *this, " (inside 0 to ", dim_size_, ")"));
  if (first == last || outer_ * inner_ == 0) return false;  // nothing is used
  return first < begin(member) || last > end(member);
}

bool Partition::needs_communication() const {
  for (int member = 0; member < std::min(num_members(), 2); ++member) {  // the first may have all, the others then none
    if (needs_communication(member)) return true;
  }
  return false;
}

Region Partition::region(int member, DType type) const {
  const std::int64_t row = inner_ * static_cast<std::int64_t>(size_bytes(type));
  const Region block{.offset = begin(member) * row,
                     .length = (end(member) - begin(member)) * row,
                     .stride = dim_size_ * row,
                     .count  = outer_};
  if (block.num_bytes() == 0) return {};
  if (block.count == 1 || block.length == block.stride) return {.offset = block.offset, .length = block.num_bytes()};
  return block;
}

AccessList Partition::accesses(Buffer whole, DType type) const {
  AccessList list;
  for (int member = 0; member < num_members(); ++member) list.push_back(access(whole, member, type));
  return list;
}

std::string to_string(const Partition& partition) {
  const PartitionSpec& spec = partition.spec();
  const std::string cut     = partition.replicated() ? "" : str(" dim ", spec.dim);
  return str(to_string(spec.shape), cut, " over ", spec.num_members, " ", to_string(spec.kind));
}

Partition parse_partition(std::string_view text) {
  const std::vector<std::string_view> words = split_text(text, ' ');
  const auto junk = [&] { refuse(str("'", text, "' cannot be parsed (as in '10x4 dim 0 over 3 ceiling')")); };
  const bool cut  = words.size() == 6;
  if ((!cut && words.size() != 4) || words[words.size() - 3] != "over" || (cut && words[1] != "dim")) junk();
  const auto kind    = std::find(kind_names.begin(), kind_names.end(), words.back());
  const auto dim     = cut ? to_number<int>(words[2]) : std::optional(0);
  const auto members = to_number<int>(words[words.size() - 2]);
  if (kind == kind_names.end() || !dim || !members) junk();
  const auto parsed = static_cast<PartitionKind>(kind - kind_names.begin());
  if (cut == (parsed == PartitionKind::replicated)) junk();
  return Partition({.shape = parse_tensor_shape(words[0]), .dim = *dim, .num_members = *members, .kind = parsed});
}

}  // namespace stepgraph
