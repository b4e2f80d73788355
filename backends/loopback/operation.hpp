#pragma once
#include <cstdint>

#include "engine/run/context.hpp"
#include "engine/run/world.hpp"

namespace stepgraph::loopback {

// One communication whose members are all in this process. Reads inputs once and writes outputs once; intermediate data
// stays in the first-level caches. It is cut into tiles by its shape alone, and the pool's threads share the tiles of
// large ones. Allocates nothing for a message of one piece per member.
class Operation {
 public:
  Operation(const Context& context, const Exchange& exchange) noexcept
      : context_(context), what_(exchange.what), group_(exchange.group), parts_(exchange.parts) {}

  void run() const;

 private:
  [[nodiscard]] std::size_t num_members() const noexcept { return parts_.size(); }
  [[nodiscard]] PartSide in(std::size_t member) const noexcept { return {parts_[member].in, num_members()}; }
  [[nodiscard]] PartSide out(std::size_t member) const noexcept { return {parts_[member].out, num_members()}; }
  [[nodiscard]] std::size_t root() const noexcept;

  void all_reduce() const;
  void reduce() const;
  void reduce_scatter() const;
  void broadcast() const;
  void all_gather() const;
  void gather() const;
  void scatter() const;
  void all_to_all() const;
  void permute() const;
  void message() const;

  template <class Tile>
  void for_tiles(std::size_t num_stretches, std::int64_t longest, std::int64_t bytes_each, const Tile& tile) const;
  template <class In, class Out>
  void reduce_tile(std::int64_t begin, std::int64_t length, std::size_t num_out, const In& in, const Out& out) const;

  const Context& context_;
  const Graph::PartView& what_;
  const GroupSpec& group_;
  std::span<const LocalPart> parts_;
};

}  // namespace stepgraph::loopback
