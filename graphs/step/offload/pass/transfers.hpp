#pragma once
#include <map>
#include <string>
#include <vector>

#include "graphs/step/offload/pass/slots.hpp"

// The nodes that copy bytes between homes and slots. Internal to graphs/step/offload.
namespace stepgraph::offload {

class Transfers {
 public:
  Transfers(Graph& out, const HomeTable& table, const HomePlan& plan, const std::vector<Buffer>& slots)
      : out_(out), table_(table), plan_(plan), slots_(slots) {}

  // The bytes of a used buffer, wherever they are during the use.
  [[nodiscard]] Access at(const Use& use, const UsedBuffer& buffer, const Region& region) const;

  // `after`: tokens that the copies to the slot wait for.
  void fill(const Use& use, const UsedBuffer& buffer, const AccessList& after = {});
  // What has to be done on the compute lane directly before the first node of the use: earlier it would hold up the
  // nodes of other uses.
  void finish_fill(const Use& use, const UsedBuffer& buffer);
  void back(const Use& use, const UsedBuffer& buffer, const AccessList& done = {});

  // A copy of a small buffer of the device, for nodes on the host.
  Buffer mirror(Buffer of, const Labels& labels);

 private:
  struct Ring {
    std::vector<Buffer> pieces = {};
    std::size_t next           = 0;
  };
  Buffer next_piece(Rank rank);
  void copy(const std::string& what, const Access& to, const Access& from, const Labels& labels,
            const AccessList& done = {}, const AccessList& after = {});
  // Between a home on disk and memory of the device, through the pieces of the ring.
  void read_disk(const KnownHome& home, const Access& to, const Labels& labels, const AccessList& after);
  void write_disk(const KnownHome& home, const Access& from, const Labels& labels, const AccessList& done);
  void pack(const KnownHome& home, const Access& packed, const Access& raw, LaneKind lane, const Labels& labels,
            bool unpack);
  // Lossless kinds, chunk by chunk: on the host, through the ring.
  void fill_lossless(const Use& use, const UsedBuffer& buffer, const AccessList& after);
  void back_lossless(const Use& use, const UsedBuffer& buffer, const AccessList& done);
  [[nodiscard]] Buffer slot_of(const Use& use) const { return slots_[use.slot]; }
  [[nodiscard]] std::string name_of(const KnownHome& home, const Labels& labels) const;

  Graph& out_;
  const HomeTable& table_;
  const HomePlan& plan_;
  const std::vector<Buffer>& slots_;
  std::map<Rank, Ring> rings_;
};

}  // namespace stepgraph::offload
