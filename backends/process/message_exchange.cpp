#include "backends/process/message_exchange.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "backends/loopback/bytes.hpp"
#include "engine/base/arithmetic.hpp"
#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

constexpr std::int64_t least_block  = 4 * 1024;          // of scratch memory
constexpr std::int64_t most_scratch = 64 * 1024 * 1024;  // of a thread, for groups up to some hundred members
constexpr std::int64_t max_ahead    = 4;                 // chunks under way to each peer
constexpr std::int64_t small_bytes  = 32 * 1024;         // an all-reduce of fewer bytes takes one message to each peer

// Memory of a thread in blocks, kept between exchanges.
class Scratch {
 public:
  std::byte* take(std::int64_t size) {
    const auto fits = [size](const Block& block) { return block.is_free && block.size >= size; };
    auto at         = std::find_if(blocks_.begin(), blocks_.end(), fits);
    if (at == blocks_.end()) {
      const auto rounded      = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(size)));
      const std::int64_t made = std::max(rounded, least_block);  // so that other sizes fit too
      at = blocks_.insert(blocks_.end(), {std::make_unique<std::byte[]>(static_cast<std::size_t>(made)), made, true});
    }
    at->is_free = false;
    return at->data.get();
  }
  void give_back(const std::byte* data) {
    std::find_if(blocks_.begin(), blocks_.end(), [data](const Block& block) {
      return block.data.get() == data;
    })->is_free = true;
  }
  // Of an exchange that failed.
  void give_all_back() {
    for (Block& block : blocks_) block.is_free = true;
  }

 private:
  struct Block {
    std::unique_ptr<std::byte[]> data;
    std::int64_t size;
    bool is_free;
  };
  std::vector<Block> blocks_;
};

Scratch& scratch() {
  thread_local Scratch mine;
  return mine;
}

std::span<std::byte> bytes_at(std::byte* data, std::int64_t length) { return {data, static_cast<std::size_t>(length)}; }

// The bytes of a stretch from `begin` on, at most `size` of them.
Stretch part_of(const Stretch& whole, std::int64_t begin, std::int64_t size) {
  return {whole.pieces, whole.begin + begin, size};
}

bool shares_memory(const LocalPart& part) {
  const auto end = [](const Piece& piece) {
    return piece.data + (piece.region.count - 1) * piece.region.stride + piece.region.length;
  };
  for (const Piece& in : part.in) {
    for (const Piece& out : part.out) {
      if (in.region.num_bytes() > 0 && out.region.num_bytes() > 0 && in.data < end(out) && out.data < end(in))
        return true;
    }
  }
  return false;
}

class Messages {
 public:
  Messages(const Exchange& exchange, Transport& transport, std::uint64_t run)
      : what_(exchange.what),
        members_(exchange.group.ranks),
        parts_(exchange.parts),
        transport_(transport),
        chunk_bytes_(chunk_for(transport, members_.size())),
        key_(key_of(exchange, run)) {
    scratch().give_all_back();
  }

  void run() {
    switch (what_.op) {
      case PartOp::all_reduce:
      case PartOp::reduce:
      case PartOp::reduce_scatter:
        return reduce();
      case PartOp::all_gather:
      case PartOp::gather:
      case PartOp::broadcast:
      case PartOp::scatter:
      case PartOp::all_to_all:
      case PartOp::permute:
      case PartOp::send:
      case PartOp::recv:
        return move();
      case PartOp::barrier:
        return barrier();
    }
  }

 private:
  using Request = Transport::Request;

  // A reduction has a chunk of each member for every step of its pipeline. So members of large groups send smaller
  // chunks.
  static std::int64_t chunk_for(const Transport& transport, std::size_t num_members) {
    const std::int64_t most = most_scratch / (2 * (max_ahead + 1) * static_cast<std::int64_t>(num_members));
    return std::min(transport.chunk_bytes(), std::max(most / least_block * least_block, least_block));
  }

  // Messages of two runs can be under way at the same time, of more cannot. Collectives and messages of a group are
  // counted apart.
  static std::uint64_t key_of(const Exchange& exchange, std::uint64_t run) {
    constexpr std::uint64_t most_communicators = std::uint64_t{1} << MessageKey::communicator_bits;
    constexpr std::uint64_t most_turns         = std::uint64_t{1} << MessageKey::turn_bits;
    if (exchange.communicator >= most_communicators || exchange.turn >= most_turns)
      throw Error(ErrorKind::backend, str("group '", exchange.group.name, "' has number ", exchange.communicator,
                                          " and turn ", exchange.turn, " (below 2^16 and 2^23)"));
    return MessageKey{.communicator = exchange.communicator,
                      .run          = static_cast<std::uint32_t>(run % (1 << MessageKey::run_bits)),
                      .is_message   = point_to_point(exchange.what.op),
                      .turn         = exchange.turn}
        .packed();
  }
  [[nodiscard]] std::uint64_t key(std::int64_t step) const {
    if (step >= std::int64_t{1} << MessageKey::step_bits)
      throw Error(ErrorKind::backend, str("an operation has more than 2^", MessageKey::step_bits, " messages"));
    return key_ | static_cast<std::uint64_t>(step);
  }

  [[nodiscard]] std::int64_t num_chunks(std::int64_t size) const { return (size + chunk_bytes_ - 1) / chunk_bytes_; }
  [[nodiscard]] std::int64_t chunk_length(std::int64_t size, std::int64_t chunk) const {
    return std::clamp<std::int64_t>(size - chunk * chunk_bytes_, 0, chunk_bytes_);
  }

  // --- one message -------------------------------------------------------------------------------------------------

  // Messages between two ranks of this process: the first post leaves its bytes here, the second copies.
  static constexpr Request local_request{~std::uint64_t{0}, Rank{-1}};
  struct LocalPost {
    std::span<const std::byte> sent;
    std::span<std::byte> wanted;
  };
  [[nodiscard]] const LocalPart* local(Rank rank) const {
    const auto at =
        std::find_if(parts_.begin(), parts_.end(), [&](const LocalPart& part) { return part.rank == rank; });
    return at == parts_.end() ? nullptr : &*at;
  }
  Request meet_locally(Rank from, Rank to, std::int64_t step, const LocalPost& post) {
    const auto [at, first] = local_.try_emplace({from, to, step}, post);
    if (first) return local_request;
    const LocalPost& other = at->second;
    const auto sent        = post.sent.data() != nullptr ? post.sent : other.sent;
    const auto wanted      = post.sent.data() != nullptr ? other.wanted : post.wanted;
    std::memmove(wanted.data(), sent.data(), sent.size());
    local_.erase(at);
    return local_request;
  }

  Request send(Rank from, Rank to, std::int64_t step, std::span<const std::byte> bytes) {
    if (local(to) != nullptr) return meet_locally(from, to, step, {bytes, {}});
    return transport_.send(from, to, key(step), bytes);
  }
  Request receive(Rank from, Rank to, std::int64_t step, std::span<std::byte> bytes) {
    if (local(from) != nullptr) return meet_locally(from, to, step, {{}, bytes});
    return transport_.receive(from, to, key(step), bytes);
  }
  void wait(Request request) {
    if (request.id != local_request.id) transport_.wait(request);
  }

  // Blocks of a chunk, which goes through the pipeline.
  using Taken = std::vector<std::byte*>;
  static std::byte* take(std::int64_t size, Taken& taken) { return taken.emplace_back(scratch().take(size)); }
  static void give_back(const Taken& taken) {
    for (const std::byte* const block : taken) scratch().give_back(block);
  }

  // Contiguous bytes of a stretch, for reading: its own, or a copy.
  static std::byte* to_read(const Stretch& of, Taken& taken) {
    if (std::byte* const data = loopback::range(of, 0, of.size)) return data;
    std::byte* const packed = take(of.size, taken);
    loopback::copy_out(of, 0, of.size, packed);
    return packed;
  }
  // Contiguous bytes to write to; unpack() puts them where they belong.
  struct Target {
    std::byte* data;
    bool packed;
  };
  static Target to_write(const Stretch& of, Taken& taken, bool apart = false) {
    if (!apart) {
      if (std::byte* const data = loopback::range(of, 0, of.size)) return {data, false};
    }
    return {take(of.size, taken), true};
  }
  static void unpack(const Target& target, const Stretch& to) {
    if (target.packed) loopback::copy_in(target.data, to, 0, to.size);
  }

  // --- operations that move bytes ----------------------------------------------------------------------------------

  struct Transfer {  // of a rank of this process, with another member or with itself
    Rank from, to;
    Stretch bytes;
  };
  struct Arrival {
    Request request;
    Target target;
    Stretch to;
  };

  // `apart`: bytes may be received where others are sent from, so they arrive elsewhere and are copied when the sends
  // of the same chunk are done.
  void transfer(const std::vector<Transfer>& sends, const std::vector<Transfer>& receives, bool apart) {
    std::int64_t longest = 0;
    for (const auto* const list : {&sends, &receives}) {
      for (const Transfer& each : *list) longest = std::max(longest, each.bytes.size);
    }
    struct Turn {
      std::vector<Request> sent;
      std::vector<Arrival> arrivals;
      Taken taken;
    };
    std::deque<Turn> under_way;
    const auto finish_first = [&] {
      Turn& chunk = under_way.front();
      for (const Request request : chunk.sent) wait(request);
      for (const Arrival& arrival : chunk.arrivals) {
        wait(arrival.request);
        unpack(arrival.target, arrival.to);
      }
      give_back(chunk.taken);
      under_way.pop_front();
    };
    for (std::int64_t chunk = 0; chunk < num_chunks(longest); ++chunk) {
      Turn& now = under_way.emplace_back();
      for (const Transfer& each : receives) {
        const std::int64_t length = chunk_length(each.bytes.size, chunk);
        if (length == 0) continue;
        const Stretch to    = part_of(each.bytes, chunk * chunk_bytes_, length);
        const Target target = to_write(to, now.taken, apart);
        now.arrivals.push_back({receive(each.from, each.to, chunk, bytes_at(target.data, length)), target, to});
      }
      for (const Transfer& each : sends) {
        const std::int64_t length = chunk_length(each.bytes.size, chunk);
        if (length == 0) continue;
        std::byte* const data = to_read(part_of(each.bytes, chunk * chunk_bytes_, length), now.taken);
        now.sent.push_back(send(each.from, each.to, chunk, bytes_at(data, length)));
      }
      if (std::ssize(under_way) > max_ahead) finish_first();
    }
    while (!under_way.empty()) finish_first();
  }

  [[nodiscard]] PartSide in(const LocalPart& part) const { return {part.in, members_.size()}; }
  [[nodiscard]] PartSide out(const LocalPart& part) const { return {part.out, members_.size()}; }

  // Every rank sends and receives at most one message from each member, so the tables say all. Bytes that stay on a
  // rank are copied.
  void move() {
    std::vector<Transfer> sends, receives;
    bool apart         = false;
    const auto connect = [&](const LocalPart& part, Rank other, const Stretch* sent, const Stretch* received) {
      if (other == part.rank) {
        if (sent != nullptr && received != nullptr) loopback::copy(*sent, *received, 0, received->size);
        return;
      }
      if (sent != nullptr) sends.push_back({part.rank, other, *sent});
      if (received != nullptr) receives.push_back({other, part.rank, *received});
    };
    for (const LocalPart& part : parts_) {
      const Stretch all_in = in(part).all(), all_out = out(part).all();
      switch (what_.op) {
        case PartOp::send:
        case PartOp::recv:
          move_message(part, sends, receives);
          break;
        case PartOp::permute:
          if (part.peer != Rank{-1}) connect(part, part.peer, &all_in, nullptr);
          if (part.source != Rank{-1}) connect(part, part.source, nullptr, &all_out);
          break;
        default:
          apart = apart || (what_.op == PartOp::all_to_all && shares_memory(part));
          for (std::size_t member = 0; member < members_.size(); ++member) {
            const Rank other = members_[member];
            Stretch sent, received;
            const bool sends_it = sent_to(part, member, sent), gets_it = received_from(part, member, received);
            connect(part, other, sends_it ? &sent : nullptr, gets_it ? &received : nullptr);
          }
      }
    }
    transfer(sends, receives, apart);
  }

  // What a part sends to a member, and receives from it.
  bool sent_to(const LocalPart& part, std::size_t member, Stretch& bytes) const {
    switch (what_.op) {
      case PartOp::all_gather:
        bytes = in(part).all();
        return true;
      case PartOp::gather:
        bytes = in(part).all();
        return members_[member] == what_.root;
      case PartOp::broadcast:
        bytes = in(part).all();
        return part.rank == what_.root;
      case PartOp::scatter:
        if (part.rank == what_.root) bytes = in(part).shard(member);
        return part.rank == what_.root;
      default:  // all_to_all
        bytes = in(part).shard(member);
        return true;
    }
  }
  bool received_from(const LocalPart& part, std::size_t member, Stretch& bytes) const {
    switch (what_.op) {
      case PartOp::all_gather:
        bytes = out(part).shard(member);
        return true;
      case PartOp::gather:
        if (part.rank == what_.root) bytes = out(part).shard(member);
        return part.rank == what_.root;
      case PartOp::broadcast:
      case PartOp::scatter:
        bytes = out(part).all();
        return members_[member] == what_.root;
      default:  // all_to_all
        bytes = out(part).shard(member);
        return true;
    }
  }

  // The parts of a message: the sender, the receiver, or both of them.
  void move_message(const LocalPart& part, std::vector<Transfer>& sends, std::vector<Transfer>& receives) const {
    const bool is_first = &part == &parts_.front();
    const bool sends_it = what_.op == PartOp::send && is_first;
    const Rank other    = is_first ? what_.peer : parts_.front().rank;
    if (sends_it) {
      sends.push_back({part.rank, other, in(part).all()});
    } else {
      receives.push_back({other, part.rank, out(part).all()});
    }
  }

  void barrier() {
    static const std::byte nothing{0};
    std::vector<Request> requests;
    Taken taken;
    for (const LocalPart& part : parts_) {
      for (const Rank other : members_) {
        if (local(other) != nullptr) continue;
        requests.push_back(transport_.receive(other, part.rank, key(0), {take(1, taken), 1}));
        requests.push_back(transport_.send(part.rank, other, key(0), {&nothing, 1}));
      }
    }
    for (const Request request : requests) wait(request);
    give_back(taken);
  }

  // --- reductions --------------------------------------------------------------------------------------------------

  // The shard of a sum that a member computes: bytes of the member's `in`, for each member at the same place.
  [[nodiscard]] Stretch shard_of(const LocalPart& part, std::size_t member) const {
    if (what_.op == PartOp::reduce_scatter) return in(part).shard(member);
    const Stretch all = in(part).all();
    if (what_.op == PartOp::reduce) return part_of(all, 0, members_[member] == what_.root ? all.size : 0);
    const IndexedShard at = even_shard(all.size, member);
    return part_of(all, at.begin, at.size);
  }
  // Where a part's result goes: that of the member's shard.
  [[nodiscard]] Stretch result_of(const LocalPart& part, std::size_t member) const {
    const Stretch all = out(part).all();
    if (what_.op != PartOp::all_reduce) return all;
    const IndexedShard at = even_shard(all.size, member);
    return part_of(all, at.begin, at.size);
  }
  struct IndexedShard {
    std::int64_t begin, size;
  };
  [[nodiscard]] IndexedShard even_shard(std::int64_t size, std::size_t member) const {
    const auto unit = static_cast<std::int64_t>(size_bytes(what_.type)), n = std::ssize(members_);
    const std::int64_t elements = size / unit, i = static_cast<std::int64_t>(member);
    const std::int64_t begin = elements * i / n, end = elements * (i + 1) / n;
    return {begin * unit, (end - begin) * unit};
  }

  // A step of the pipeline: the chunk of each member's shard with the same number.
  struct Chunk {
    std::vector<Request> sent;                        // inputs, to the members that add them
    std::vector<Request> came;                        // inputs that this process adds
    std::vector<std::vector<std::byte*>> came_bytes;  // [local part][member]; null: its own
    std::vector<Arrival> results;
    std::vector<Request> results_sent;
    Taken taken;
  };

  void reduce() {
    if (what_.op == PartOp::all_reduce && in(parts_.front()).all().size <= small_bytes) return reduce_small();
    std::int64_t longest = 0;
    for (std::size_t member = 0; member < members_.size(); ++member)
      longest = std::max(longest, shard_of(parts_.front(), member).size);
    const std::int64_t count = num_chunks(longest);
    std::deque<Chunk> under_way;  // inputs were posted
    std::deque<Chunk> results;    // results were posted
    std::int64_t first = 0;       // the number of the first chunk of `under_way`
    const auto step    = [&] {
      add(under_way.front(), first++);
      results.push_back(std::move(under_way.front()));
      under_way.pop_front();
      if (std::ssize(results) > max_ahead) finish(results);
    };
    for (std::int64_t chunk = 0; chunk < count; ++chunk) {
      post_inputs(under_way.emplace_back(), chunk);
      if (std::ssize(under_way) > max_ahead) step();
    }
    while (!under_way.empty()) step();
    while (!results.empty()) finish(results);
  }

  void post_inputs(Chunk& now, std::int64_t chunk) {
    now.came_bytes.assign(parts_.size(), std::vector<std::byte*>(members_.size(), nullptr));
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      const LocalPart& part     = parts_[p];
      const std::int64_t length = chunk_length(shard_of(part, own(part)).size, chunk);
      for (std::size_t member = 0; member < members_.size() && length > 0; ++member) {
        if (member == own(part)) continue;
        now.came_bytes[p][member] = take(length, now.taken);
        now.came.push_back(
            receive(members_[member], part.rank, 2 * chunk, bytes_at(now.came_bytes[p][member], length)));
      }
    }
    for (const LocalPart& part : parts_) {
      for (std::size_t member = 0; member < members_.size(); ++member) {
        const Stretch shard       = shard_of(part, member);
        const std::int64_t length = chunk_length(shard.size, chunk);
        if (member == own(part) || length == 0) continue;
        std::byte* const data = to_read(part_of(shard, chunk * chunk_bytes_, length), now.taken);
        now.sent.push_back(send(part.rank, members_[member], 2 * chunk, bytes_at(data, length)));
      }
    }
  }

  // Adds what came, in group order. Results replace inputs in place only when these have been sent.
  void add(Chunk& now, std::int64_t chunk) {
    for (const Request request : now.came) wait(request);
    for (const Request request : now.sent) wait(request);
    struct Sum {
      std::byte* data;
      std::int64_t length;
    };
    std::vector<Sum> sums(parts_.size(), {nullptr, 0});
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      const LocalPart& part     = parts_[p];
      const Stretch mine        = shard_of(part, own(part));
      const std::int64_t length = chunk_length(mine.size, chunk);
      if (length == 0) continue;
      std::vector<const std::byte*> inputs(now.came_bytes[p].begin(), now.came_bytes[p].end());
      inputs[own(part)]   = to_read(part_of(mine, chunk * chunk_bytes_, length), now.taken);
      const Stretch to    = part_of(result_of(part, own(part)), chunk * chunk_bytes_, length);
      const Target target = to_write(to, now.taken);
      stepgraph::reduce(inputs, std::array{target.data}, static_cast<std::size_t>(length), what_.type, what_.reduction);
      unpack(target, to);
      sums[p] = {target.data, length};
    }
    if (what_.op != PartOp::all_reduce) return;
    for (const LocalPart& part : parts_) {
      for (std::size_t member = 0; member < members_.size(); ++member) {
        const Stretch shard       = result_of(part, member);
        const std::int64_t length = chunk_length(shard.size, chunk);
        if (member == own(part) || length == 0) continue;
        const Stretch to    = part_of(shard, chunk * chunk_bytes_, length);
        const Target target = to_write(to, now.taken);
        now.results.push_back(
            {receive(members_[member], part.rank, 2 * chunk + 1, bytes_at(target.data, length)), target, to});
      }
    }
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      for (std::size_t member = 0; member < members_.size() && sums[p].length > 0; ++member) {
        if (member == own(parts_[p])) continue;
        now.results_sent.push_back(
            send(parts_[p].rank, members_[member], 2 * chunk + 1, bytes_at(sums[p].data, sums[p].length)));
      }
    }
  }

  void finish(std::deque<Chunk>& chunks) {
    for (const Arrival& arrival : chunks.front().results) {
      wait(arrival.request);
      unpack(arrival.target, arrival.to);
    }
    for (const Request request : chunks.front().results_sent) wait(request);
    give_back(chunks.front().taken);
    chunks.pop_front();
  }

  // Every member gets all inputs and adds them itself: one message to each, and no second round.
  void reduce_small() {
    const std::int64_t length = in(parts_.front()).all().size;
    if (length == 0) return;
    Taken taken;
    std::vector<Request> requests;
    std::vector<std::vector<const std::byte*>> inputs(parts_.size(), std::vector<const std::byte*>(members_.size()));
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      for (std::size_t member = 0; member < members_.size(); ++member) {
        if (member == own(parts_[p])) continue;
        std::byte* const data = take(length, taken);
        inputs[p][member]     = data;
        requests.push_back(receive(members_[member], parts_[p].rank, 0, bytes_at(data, length)));
      }
    }
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      std::byte* const mine     = to_read(in(parts_[p]).all(), taken);
      inputs[p][own(parts_[p])] = mine;
      for (const Rank other : members_) {
        if (other != parts_[p].rank) requests.push_back(send(parts_[p].rank, other, 0, bytes_at(mine, length)));
      }
    }
    for (const Request request : requests) wait(request);
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      const Stretch to    = out(parts_[p]).all();
      const Target target = to_write(to, taken);
      stepgraph::reduce(inputs[p], std::array{target.data}, static_cast<std::size_t>(length), what_.type,
                        what_.reduction);
      unpack(target, to);
    }
    give_back(taken);
  }

  static std::size_t own(const LocalPart& part) { return static_cast<std::size_t>(part.member); }

  const Graph::PartView& what_;
  const RankList& members_;
  std::span<const LocalPart> parts_;
  Transport& transport_;
  std::int64_t chunk_bytes_;
  std::uint64_t key_;
  std::map<std::tuple<Rank, Rank, std::int64_t>, LocalPost> local_;
};

}  // namespace

void exchange_by_messages(const Exchange& exchange, Transport& transport, std::uint64_t run) {
  Messages(exchange, transport, run).run();
}

}  // namespace stepgraph
