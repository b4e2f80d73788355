#pragma once
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "backends/process/transport.hpp"
#include "engine/base/error.hpp"

namespace stepgraph::testing {

// Letters between processes that are threads. All members are thread-safe.
struct MemoryLetters {
  using Address = std::tuple<std::uint64_t, Rank, Rank, std::uint64_t>;  // generation, from, to, key
  std::mutex mutex;
  std::condition_variable changed;
  std::map<Address, std::vector<std::byte>> letters;
};

// The network of one process of a MessageWorld in tests: the simplest correct one. A send is a copy.
class MemoryNetwork final : public Network {
 public:
  explicit MemoryNetwork(MemoryLetters& all) : all_(all) {}

  [[nodiscard]] Request send(Rank from, Rank to, std::uint64_t key, std::span<const std::byte> bytes) override {
    const std::lock_guard lock(all_.mutex);
    if (!all_.letters.try_emplace({generation_, from, to, key}, bytes.begin(), bytes.end()).second)
      throw Error(ErrorKind::backend, "two messages under way have the same key");
    all_.changed.notify_all();
    return {0, to};
  }
  [[nodiscard]] Request receive(Rank from, Rank to, std::uint64_t key, std::span<std::byte> bytes) override {
    const std::lock_guard lock(all_.mutex);
    wanted_.emplace(++last_, Wanted{{generation_, from, to, key}, bytes, std::this_thread::get_id()});
    return {last_, from};
  }
  void wait(Request request) override {
    std::unique_lock lock(all_.mutex);
    if (request.id != 0) {
      const Wanted wanted = wanted_.at(request.id);
      all_.changed.wait(lock, [&] { return why_ || all_.letters.contains(wanted.address); });
      if (!why_) take(wanted, request.id);
    }
    if (why_) throw Error(ErrorKind::backend, *why_);
  }

  void connect(const Connections& made) override { connected.push_back(made); }
  void interrupt(Interruption, const std::string& why) noexcept override {
    const std::lock_guard lock(all_.mutex);
    why_ = why;
    all_.changed.notify_all();
  }
  void drop_requests() noexcept override {
    const std::lock_guard lock(all_.mutex);
    std::erase_if(wanted_, [](const auto& each) { return each.second.thread == std::this_thread::get_id(); });
  }
  void recover(std::uint64_t generation) override {
    const std::lock_guard lock(all_.mutex);
    generation_ = generation;
    why_        = std::nullopt;
    num_dropped_ += wanted_.size();
  }
  void close() override {}

  [[nodiscard]] std::size_t num_wanted() {
    const std::lock_guard lock(all_.mutex);
    return wanted_.size() + num_dropped_;
  }

  std::vector<Connections> connected;  // its groups are valid while their program lives

 private:
  struct Wanted {
    MemoryLetters::Address address;
    std::span<std::byte> bytes;
    std::thread::id thread;
  };
  void take(const Wanted& wanted, std::uint64_t request) {
    const auto letter = all_.letters.find(wanted.address);
    if (letter->second.size() != wanted.bytes.size())
      throw Error(ErrorKind::backend, str(letter->second.size(), " bytes came, ", wanted.bytes.size(), " expected"));
    std::copy(letter->second.begin(), letter->second.end(), wanted.bytes.begin());
    all_.letters.erase(letter);
    wanted_.erase(request);
  }

  MemoryLetters& all_;
  // With all_.mutex.
  std::uint64_t generation_ = 0;
  std::uint64_t last_       = 0;
  std::size_t num_dropped_  = 0;  // requests that a run has left: there must be none
  std::map<std::uint64_t, Wanted> wanted_;
  std::optional<std::string> why_;
};

}  // namespace stepgraph::testing
