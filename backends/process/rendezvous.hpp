#pragma once
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>

#include "backends/process/admission.hpp"
#include "backends/process/socket.hpp"

namespace stepgraph {

// Small values under names, for all processes of a job. Process 0 has them (Rendezvous), the others ask it
// (RemoteStore). Any thread. Throws Error(config) once the job has ended because its processes do not fit together.
class Store {
 public:
  virtual ~Store()                                                                = default;
  virtual void set(const std::string& key, Bytes value, const Patience& patience) = 0;
  // Waits until the key is set. Error(backend) at the deadline.
  [[nodiscard]] virtual Bytes get(const std::string& key, const Patience& patience) = 0;
  // Adds to a number, which is 0 at first, and returns the sum.
  virtual std::int64_t add(const std::string& key, std::int64_t number, const Patience& patience) = 0;
};

struct RendezvousOptions {
  int size            = 1;
  std::string version = {};
  Digest key          = {};
  bool loopback_only  = false;  // connections from other machines are closed at once

  // Called on the thread of the rendezvous with the connections for these purposes. Must be quick.
  std::function<void(int rank, Connection)> control = {};
  std::function<void(int rank, Connection)> peers   = {};
  // A process that has the secret does not fit into the job: the job has ended. Same thread.
  std::function<void(int rank, const std::string& why)> on_misfit = {};

  // Connections that have not shown the secret: the oldest makes room for a new one.
  std::size_t most_strangers                  = 64;
  std::chrono::milliseconds time_of_strangers = std::chrono::seconds(5);
};

// The meeting point of a job, in process 0. One thread serves all connections and never waits for one of them. What a
// connection without the job's secret does has no effect. A second connection of a rank for the same purpose is
// refused. A process that has the secret but another world size or program version ends the job: its Store calls, and
// those of all other processes, throw an error that says so. Once all ranks have joined, it is refused and changes
// nothing.
class Rendezvous final : public Store {
 public:
  Rendezvous(Descriptor listener, RendezvousOptions options);  // a job of one process needs no listener
  ~Rendezvous() override;
  Rendezvous(const Rendezvous&)            = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  void set(const std::string& key, Bytes value, const Patience& patience) override;
  [[nodiscard]] Bytes get(const std::string& key, const Patience& patience) override;
  std::int64_t add(const std::string& key, std::int64_t number, const Patience& patience) override;

  void end(const std::string& why);  // the job has ended; any thread
  // After end: waits until each rank was told why, or has a control connection over which it hears it, or until the
  // deadline. A process that starts later finds no meeting point.
  void wait_until_told(Deadline until);

  [[nodiscard]] int port() const noexcept { return port_; }
  // The address of this machine at which an admitted process has reached it: one that other machines can use, if there
  // was one. Empty: no process has joined.
  [[nodiscard]] std::string own_address() const;
  [[nodiscard]] std::size_t num_strangers() const;  // connections that have not shown the secret

 private:
  struct Guest {  // a connection
    Connection connection;
    Deadline until{};  // of a stranger
    std::optional<Handshake> handshake = {};
    int rank                           = -1;     // of an admitted one
    bool closing                       = false;  // when its output is sent
  };
  using Id = std::uint64_t;
  struct Waiting {  // for a key
    Id guest;
    std::uint64_t request;
  };

  void serve();
  [[nodiscard]] bool serve_once();  // false: the end
  void accept_all(Deadline now);
  void handle(Id id, unsigned events);
  // False: the connection is closed.
  [[nodiscard]] bool take(Id id, Guest& guest, const Bytes& frame);
  [[nodiscard]] bool admit(Id id, Guest& guest, const Claim& claim);
  void serve_request(Id id, const Bytes& frame);
  [[nodiscard]] std::optional<std::string> misfit(const Claim& claim) const;
  void answer(Id id, std::uint64_t request, bool good, std::span<const std::byte> value);
  void put(const std::string& key, Bytes value);  // with mutex_
  void wake_waiting();
  void watch(Id id, Guest& guest);
  void remove(Id id);
  void limit_strangers(Deadline now, std::size_t most);
  void throw_if_ended() const;  // with mutex_

  RendezvousOptions options_;
  Descriptor listener_;
  Descriptor events_;  // epoll
  Descriptor wake_;    // eventfd
  int port_ = 0;

  // Of the thread.
  std::map<Id, Guest> guests_;
  std::set<std::pair<Purpose, int>> present_;
  std::multimap<std::string, Waiting> waiting_;
  bool complete_         = false;  // all ranks have joined
  Id next_id_            = 0;
  bool listening_        = true;  // false for a moment when the system has no more descriptors
  Deadline listen_again_ = {};

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, Bytes> values_;
  std::set<std::string> fresh_;  // keys that were set, and whose waiting guests have no answer yet
  std::optional<std::string> ended_;
  std::set<int> told_;  // ranks that know, or will hear, that it has ended
  std::size_t num_strangers_ = 0;
  std::string own_address_   = {};
  bool stop_                 = false;

  std::thread thread_;
};

// The store of process 0, over a connection for Purpose::store. One request at a time: a thread that waits for a key
// keeps the others of this process waiting.
class RemoteStore final : public Store {
 public:
  // `explain`: as in SocketPeersOptions.
  explicit RemoteStore(Connection connection, std::function<std::string(const std::string& problem)> explain = {})
      : connection_(std::move(connection)), explain_(std::move(explain)) {}

  void set(const std::string& key, Bytes value, const Patience& patience) override;
  [[nodiscard]] Bytes get(const std::string& key, const Patience& patience) override;
  std::int64_t add(const std::string& key, std::int64_t number, const Patience& patience) override;
  // The address of this machine towards process 0.
  [[nodiscard]] std::string own_address() const { return own_address_of(connection_.descriptor()); }

 private:
  [[nodiscard]] Bytes request(std::uint8_t what, const std::string& key, std::span<const std::byte> value,
                              const Patience& patience);

  std::mutex mutex_;
  std::condition_variable free_;
  bool busy_ = false;  // a request is under way
  Connection connection_;
  std::function<std::string(const std::string&)> explain_;
  std::uint64_t num_requests_ = 0;
};

}  // namespace stepgraph
