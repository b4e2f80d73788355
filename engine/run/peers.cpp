#include "engine/run/peers.hpp"

#include <algorithm>
#include <exception>
#include <fstream>

#include "engine/base/error.hpp"
#include "engine/run/packed.hpp"

namespace stepgraph {
namespace {

// The part of a text that a message shows: from a little before `difference` on.
std::string excerpt(std::string_view text, std::size_t difference) {
  constexpr std::size_t before = 24, most = 96;
  const std::size_t begin     = difference <= before ? 0 : difference - before;
  const std::string_view rest = text.substr(std::min(begin, text.size()));
  return str("'", begin == 0 ? "" : "...", rest.substr(0, most), rest.size() > most ? "..." : "", "'");
}

}  // namespace

Bytes to_bytes(std::string_view text) {
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

std::string to_text(const Bytes& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

void Peers::barrier(std::string_view subject) {
  static_cast<void>(gather(subject, {}));
  static_cast<void>(broadcast(subject, {}));
}

void Peers::require_same(std::string_view subject, std::string_view text) {
  const std::vector<Bytes> all = gather(subject, to_bytes(text));
  std::string difference;
  for (std::size_t process = 1; process < all.size() && difference.empty(); ++process) {
    if (all[process] == all[0]) continue;
    const std::string other = to_text(all[process]);
    const auto place        = static_cast<std::size_t>(
        std::mismatch(text.begin(), text.end(), other.begin(), other.end()).first - text.begin());
    difference = str(subject, ": process 0 has ", excerpt(text, place), ", process ", process, " has ",
                     excerpt(other, place), " (the same in all processes)");
  }
  const std::string found = to_text(broadcast(subject, to_bytes(difference)));
  if (!found.empty()) throw Error(ErrorKind::config, found);
}

// No bytes: it has succeeded. Else the kind of the error, and its text.
void Peers::require_success(std::string_view subject, const std::optional<Error>& of_first) {
  Bytes mine;
  if (of_first && process() == 0) {
    mine = to_bytes(of_first->what());
    mine.insert(mine.begin(), static_cast<std::byte>(of_first->kind()));
  }
  const Bytes told = broadcast(subject, std::move(mine));
  if (told.empty()) return;
  throw Error(static_cast<ErrorKind>(told.front()), to_text(Bytes(told.begin() + 1, told.end())));
}

void in_first(Peers* peers, std::string_view subject, const std::function<void()>& work) {
  if (peers == nullptr) return work();
  std::optional<Error> error;
  try {
    if (peers->process() == 0) work();
  } catch (const Error& caught) {
    error = caught;
  } catch (const std::exception& caught) {
    error.emplace(ErrorKind::run, str(subject, ": ", caught.what()));
  }
  peers->require_success(subject, error);
}

void in_all(Peers* peers, std::string_view subject, const std::function<void()>& work) {
  if (peers == nullptr) return work();
  std::optional<Error> mine;
  try {
    work();
  } catch (const Error& caught) {
    mine = caught;
  } catch (const std::exception& caught) {
    mine.emplace(ErrorKind::run, str(subject, ": ", caught.what()));
  }
  Bytes first;  // no bytes: it has succeeded
  try {
    Bytes sent = mine ? Packer().add(mine->kind()).add_text(mine->what()).take() : Bytes();
    for (Bytes& bytes : peers->gather(subject, std::move(sent))) {
      if (first.empty()) first = std::move(bytes);
    }
    first = peers->broadcast(subject, std::move(first));
  } catch (const Error&) {
    if (!mine) throw;
    throw *mine;  // it says more than that a peer is gone
  }
  if (first.empty()) return;
  Unpacker received(first);
  const auto kind = received.get<ErrorKind>();
  throw Error(kind, received.get_text());
}

namespace {

// Another one after every start of a machine.
std::string machine_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

}  // namespace

// A broadcast cannot arrive before it is sent: of several, the one that took least time tells most.
std::chrono::nanoseconds clock_offset(Peers& peers) {
  using Clock                   = std::chrono::steady_clock;
  constexpr int num_rounds      = 16;
  const bool is_first           = peers.process() == 0;
  const std::string machine     = machine_id();
  const std::string other       = to_text(peers.broadcast("the machine", is_first ? to_bytes(machine) : Bytes()));
  std::chrono::nanoseconds best = std::chrono::nanoseconds::min();
  for (int round = 0; round < num_rounds; ++round) {
    static_cast<void>(peers.gather("clocks", {}));
    const std::int64_t sent = Clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
    const Bytes told        = peers.broadcast("clocks", is_first ? Packer().add(sent).take() : Bytes());
    const auto now          = Clock::now().time_since_epoch();
    best                    = std::max(best, std::chrono::nanoseconds(Unpacker(told).get<std::int64_t>()) - now);
  }
  return is_first || (!machine.empty() && machine == other) ? std::chrono::nanoseconds(0) : best;
}

int num_on_machine(Peers& peers) {
  const std::string machine = machine_id();
  Packer all;
  for (const Bytes& each : peers.gather("machines", to_bytes(machine))) all.add_text(to_text(each));
  const Bytes told = peers.broadcast("machines", peers.process() == 0 ? all.take() : Bytes());
  int count        = 0;
  for (Unpacker received(told); !received.empty();) count += received.get_text() == machine;
  return count;
}

}  // namespace stepgraph
