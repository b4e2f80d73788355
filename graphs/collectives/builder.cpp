#include "graphs/collectives/builder.hpp"

#include <algorithm>
#include <utility>

namespace stepgraph::collective {

void Builder::circle_reduce_scatter(const std::vector<Circle>& circles) {
  const int length = static_cast<int>(circles.front().members.size());
  for (int round = 0; round + 1 < length; ++round) {
    next_round();
    for (const Circle& circle : circles) {
      for (int i = 0; i < length; ++i) {
        const Bytes& segment = circle.segments[static_cast<std::size_t>((i - round - 1 + 2 * length) % length)];
        send(circle.members[static_cast<std::size_t>(i)], segment,
             circle.members[static_cast<std::size_t>((i + 1) % length)], segment, /*reduce=*/true);
      }
    }
  }
}

void Builder::circle_all_gather(const std::vector<Circle>& circles) {
  const int length = static_cast<int>(circles.front().members.size());
  for (int round = 0; round + 1 < length; ++round) {
    next_round();
    for (const Circle& circle : circles) {
      for (int i = 0; i < length; ++i) {
        const Bytes& segment = circle.segments[static_cast<std::size_t>((i - round + length) % length)];
        send(circle.members[static_cast<std::size_t>(i)], segment,
             circle.members[static_cast<std::size_t>((i + 1) % length)], segment);
      }
    }
  }
}

std::vector<std::vector<Edge>> Builder::up(const std::vector<Members>& lists) {
  std::vector<std::vector<Edge>> rounds;
  const std::size_t length = lists.front().size();
  for (std::size_t mask = 1; mask < length; mask *= 2) {
    rounds.emplace_back();
    for (const Members& list : lists) {
      for (std::size_t p = mask; p < length; p += 2 * mask) rounds.back().emplace_back(list[p], list[p - mask]);
    }
  }
  return rounds;
}

std::vector<std::vector<Edge>> Builder::down(std::vector<std::vector<Edge>> rounds) {
  std::reverse(rounds.begin(), rounds.end());
  for (auto& round : rounds) {
    for (Edge& edge : round) std::swap(edge.first, edge.second);
  }
  return rounds;
}

void Builder::reduce_up(const std::vector<std::vector<Edge>>& rounds, int root, Store total, Store partial) {
  std::vector<char> holds(static_cast<std::size_t>(n_), 0);  // a sum of its own
  const auto sum = [&](int member) { return all(member == root ? total : partial); };
  for (const auto& round : rounds) {
    for (const auto& [from, to] : round) hold(to, sum(to), holds);
  }
  for (const auto& round : rounds) {
    next_round();
    for (const auto& [from, to] : round) {
      send(from, {holds[static_cast<std::size_t>(from)] ? sum(from) : all(Store::in)}, to, {sum(to)},
           /*reduce=*/true);
    }
  }
  end_average(root, {sum(root)});
}

void Builder::broadcast_down(const std::vector<std::vector<Edge>>& rounds, int root, Store at_root) {
  for (const auto& round : rounds) {
    next_round();
    for (const auto& [from, to] : round) send(from, {all(from == root ? at_root : Store::out)}, to, {all(Store::out)});
  }
}

void Builder::gather_up(const std::vector<std::vector<Edge>>& rounds, int root, Store waiting) {
  std::vector<Members> held = shards_of_their_own();
  for (const auto& round : rounds) {
    next_round();
    for (const auto& [from, to] : round) {
      Bytes source, target;
      for (const int s : held[static_cast<std::size_t>(from)]) {
        source.push_back(s == from ? own(Store::in, s) : shard(waiting, s));
        target.push_back(shard(to == root ? Store::out : waiting, s));
      }
      if (to != root && waiting == Store::work) need_work(to, shape_.bytes);
      send(from, std::move(source), to, std::move(target));
      auto& more = held[static_cast<std::size_t>(to)];
      more.insert(more.end(), held[static_cast<std::size_t>(from)].begin(), held[static_cast<std::size_t>(from)].end());
    }
  }
}

void Builder::scatter_down(const std::vector<std::vector<Edge>>& upwards, int root, Store at_root) {
  struct Message {
    int from, to;
    Members shards;
  };
  std::vector<Members> held = shards_of_their_own();
  std::vector<std::vector<Message>> rounds;
  for (const auto& round : upwards) {
    rounds.emplace_back();
    for (const auto& [child, parent] : round) {
      rounds.back().push_back({parent, child, held[static_cast<std::size_t>(child)]});
      auto& more = held[static_cast<std::size_t>(parent)];
      more.insert(more.end(), held[static_cast<std::size_t>(child)].begin(),
                  held[static_cast<std::size_t>(child)].end());
    }
  }
  std::reverse(rounds.begin(), rounds.end());
  for (const auto& round : rounds) {
    next_round();
    for (const Message& message : round) {
      Bytes source, target;
      for (const int s : message.shards) {
        source.push_back(shard(message.from == root ? at_root : Store::work, s));
        target.push_back(s == message.to ? own(Store::out, s) : shard(Store::work, s));
        if (s != message.to) need_work(message.to, shape_.bytes);
      }
      send(message.from, std::move(source), message.to, std::move(target));
    }
  }
}

void Builder::no_bytes(const std::vector<std::vector<Edge>>& rounds) {
  out_.keep_empty = true;
  for (const auto& round : rounds) {
    next_round();
    for (const auto& [from, to] : round) send(from, {}, to, {});
  }
}

void Builder::hold(int member, const ByteRange& sum, std::vector<char>& holds) {
  if (std::exchange(holds[static_cast<std::size_t>(member)], 1)) return;
  if (sum.store == Store::work) need_work(member, shape_.bytes);
  if (sum.store == Store::work || !in_place(member)) copy(member, {sum}, {all(Store::in)});
}

std::vector<Members> Builder::shards_of_their_own() const {
  std::vector<Members> held;
  for (int i = 0; i < n_; ++i) held.push_back({i});
  return held;
}

}  // namespace stepgraph::collective
