#pragma once
#include <algorithm>
#include <array>
#include <compare>
#include <cstddef>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <vector>

#include "engine/base/types.hpp"

namespace stepgraph {

// Ranks in an order, each at most once: the members of a communicator. Groups of a layout are meshes, which take the
// same memory for any number of ranks, and in which a rank is found at once.
class RankList {
 public:
  RankList() = default;
  RankList(std::initializer_list<Rank> ranks) : RankList(std::vector<Rank>(ranks)) {}
  RankList(std::vector<Rank> ranks);  // NOLINT: a vector is a list

  // Ranks first + i * a.stride + j * b.stride + k * c.stride, with k counting fastest. Each stride is longer than all
  // ranks of the axes after it together, so ranks ascend; throws Error(config) if not.
  struct Axis {
    int count                                        = 1;
    int stride                                       = 0;
    friend bool operator==(const Axis&, const Axis&) = default;
  };
  [[nodiscard]] static RankList mesh(Rank first, std::initializer_list<Axis> axes);  // up to three, slowest first

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  [[nodiscard]] Rank operator[](std::size_t place) const noexcept {
    if (!listed_.empty()) return listed_[place];
    int rank  = index(first_);
    auto rest = static_cast<int>(place);
    for (std::size_t i = axes_.size(); i-- > 0;) {
      rank += rest % axes_[i].count * axes_[i].stride;
      rest /= axes_[i].count;
    }
    return Rank{rank};
  }
  [[nodiscard]] Rank front() const noexcept { return (*this)[0]; }
  [[nodiscard]] Rank back() const noexcept { return (*this)[size_ - 1]; }
  [[nodiscard]] std::optional<std::size_t> find(Rank rank) const noexcept;  // its place
  [[nodiscard]] bool contains(Rank rank) const noexcept { return find(rank).has_value(); }
  [[nodiscard]] bool is_mesh() const noexcept { return listed_.empty(); }  // then ranks ascend

  class Iterator {
   public:
    using iterator_category = std::random_access_iterator_tag;
    using difference_type   = std::ptrdiff_t;
    using value_type        = Rank;
    using reference         = Rank;
    using pointer           = void;
    Iterator()              = default;
    Iterator(const RankList* list, std::size_t place) : list_(list), place_(static_cast<difference_type>(place)) {}
    Rank operator*() const noexcept { return (*list_)[static_cast<std::size_t>(place_)]; }
    Rank operator[](difference_type n) const noexcept { return *(*this + n); }
    Iterator& operator++() noexcept { return ++place_, *this; }
    Iterator operator++(int) noexcept { return Iterator(list_, place_++, {}); }
    Iterator& operator--() noexcept { return --place_, *this; }
    Iterator operator--(int) noexcept { return Iterator(list_, place_--, {}); }
    Iterator& operator+=(difference_type n) noexcept { return place_ += n, *this; }
    Iterator& operator-=(difference_type n) noexcept { return place_ -= n, *this; }
    friend Iterator operator+(Iterator it, difference_type n) noexcept { return it += n; }
    friend Iterator operator+(difference_type n, Iterator it) noexcept { return it += n; }
    friend Iterator operator-(Iterator it, difference_type n) noexcept { return it -= n; }
    friend difference_type operator-(const Iterator& a, const Iterator& b) noexcept { return a.place_ - b.place_; }
    friend bool operator==(const Iterator& a, const Iterator& b) noexcept { return a.place_ == b.place_; }
    friend auto operator<=>(const Iterator& a, const Iterator& b) noexcept { return a.place_ <=> b.place_; }

   private:
    struct Raw {};
    Iterator(const RankList* list, difference_type place, Raw) : list_(list), place_(place) {}
    const RankList* list_  = nullptr;
    difference_type place_ = 0;
  };
  [[nodiscard]] Iterator begin() const noexcept { return {this, 0}; }
  [[nodiscard]] Iterator end() const noexcept { return {this, size_}; }

  friend bool operator==(const RankList& a, const RankList& b) noexcept {
    if (a.size_ != b.size_) return false;
    if (a.listed_.empty() && b.listed_.empty() && a.first_ == b.first_ && a.axes_ == b.axes_) return true;
    return std::equal(a.begin(), a.end(), b.begin());
  }
  friend std::strong_ordering operator<=>(const RankList& a, const RankList& b) noexcept {
    return std::lexicographical_compare_three_way(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  std::vector<Rank> listed_;  // empty: a mesh
  Rank first_ = {};
  std::array<Axis, 3> axes_{};
  std::size_t size_ = 0;
};

}  // namespace stepgraph
