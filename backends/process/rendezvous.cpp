#include "backends/process/rendezvous.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "backends/process/environment.hpp"
#include "backends/process/message.hpp"
#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t listener_id = ~std::uint64_t{0};
constexpr std::uint64_t wake_id     = listener_id - 1;

enum class Request : std::uint8_t { set = 1, get = 2, add = 3 };

Bytes number_bytes(std::int64_t number) { return MessageWriter().number(number).bytes(); }
std::int64_t to_int(const Bytes& bytes) { return bytes.empty() ? 0 : MessageReader(bytes).number<std::int64_t>(); }

void watch_descriptor(int events, int operation, int descriptor, std::uint32_t what, std::uint64_t id) {
  epoll_event event{};
  event.events   = what;
  event.data.u64 = id;
  if (::epoll_ctl(events, operation, descriptor, &event) != 0)
    throw Error(ErrorKind::backend, str("epoll: ", system_reason(errno)));
}

}  // namespace

Rendezvous::Rendezvous(Descriptor listener, RendezvousOptions options)
    : options_(std::move(options)),
      listener_(std::move(listener)),
      events_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      port_(port_of(listener_.get())) {
  if (!events_.is_open() || !wake_.is_open()) throw Error(ErrorKind::backend, str("epoll: ", system_reason(errno)));
  allow_many_files();
  if (listener_.is_open()) watch_descriptor(events_.get(), EPOLL_CTL_ADD, listener_.get(), EPOLLIN, listener_id);
  watch_descriptor(events_.get(), EPOLL_CTL_ADD, wake_.get(), EPOLLIN, wake_id);
  thread_ = std::thread([this] { serve(); });
}

Rendezvous::~Rendezvous() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  const std::uint64_t one = 1;
  static_cast<void>(!::write(wake_.get(), &one, sizeof one));
  thread_.join();
}

// The thread: waits for connections, for bytes, and for the next stranger whose time is over.
void Rendezvous::serve() {
  for (;;) {
    try {
      if (!serve_once()) return;
    } catch (const std::exception&) {  // out of memory: what is not done yet is done in the next round
      std::this_thread::sleep_for(10ms);
    }
  }
}

bool Rendezvous::serve_once() {
  const Deadline now = Clock::now();
  limit_strangers(now, options_.most_strangers);
  wake_waiting();
  {
    const std::lock_guard lock(mutex_);
    if (stop_) return false;
  }
  if (!listening_ && now >= listen_again_) {
    epoll_event event{};
    event.events   = EPOLLIN;
    event.data.u64 = listener_id;
    listening_     = ::epoll_ctl(events_.get(), EPOLL_CTL_ADD, listener_.get(), &event) == 0;
    if (!listening_) listen_again_ = now + 100ms;
  }
  std::array<epoll_event, 64> ready{};
  const int num_ready = ::epoll_wait(events_.get(), ready.data(), static_cast<int>(ready.size()), 100);
  for (int i = 0; i < num_ready; ++i) {
    const epoll_event& event = ready[static_cast<std::size_t>(i)];
    if (event.data.u64 == listener_id) {
      accept_all(Clock::now());
    } else if (event.data.u64 == wake_id) {
      std::uint64_t count = 0;
      static_cast<void>(!::read(wake_.get(), &count, sizeof count));
    } else {
      handle(event.data.u64, event.events);
    }
  }
  return true;
}

void Rendezvous::accept_all(Deadline now) {
  for (int i = 0; i < 64; ++i) {  // then the others have their turn
    Descriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.is_open()) {
      const bool no_more_room = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
      if (no_more_room) {
        limit_strangers(now, options_.most_strangers / 2);
        listening_    = false;
        listen_again_ = now + 100ms;
        ::epoll_ctl(events_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
      }
      return;
    }
    if (options_.loopback_only && !is_loopback_peer(socket.get())) continue;
    const Id id = next_id_++;
    Guest guest;
    guest.until      = now + options_.time_of_strangers;
    guest.connection = Connection(std::move(socket), "stranger");
    epoll_event event{};
    event.events   = EPOLLIN;
    event.data.u64 = id;
    if (::epoll_ctl(events_.get(), EPOLL_CTL_ADD, guest.connection.descriptor(), &event) != 0) continue;
    guests_.emplace(id, std::move(guest));
    limit_strangers(now, options_.most_strangers);
  }
}

// Closes strangers whose time is over, and the oldest ones beyond a number: first those that have said nothing.
void Rendezvous::limit_strangers(Deadline now, std::size_t most) {
  std::vector<Id> strangers, with_hello;  // the oldest first
  for (const auto& [id, guest] : guests_)
    if (guest.rank < 0) (guest.handshake ? with_hello : strangers).push_back(id);
  strangers.insert(strangers.end(), with_hello.begin(), with_hello.end());
  std::size_t num_left = strangers.size();
  for (const Id id : strangers) {
    if (num_left <= most && now < guests_.at(id).until) continue;
    remove(id);
    --num_left;
  }
  const std::lock_guard lock(mutex_);
  num_strangers_ = num_left;
}

void Rendezvous::remove(Id id) {
  const auto at = guests_.find(id);
  if (at == guests_.end()) return;
  ::epoll_ctl(events_.get(), EPOLL_CTL_DEL, at->second.connection.descriptor(), nullptr);
  if (at->second.rank >= 0) present_.erase({Purpose::store, at->second.rank});
  std::erase_if(waiting_, [&](const auto& entry) { return entry.second.guest == id; });
  guests_.erase(at);
}

void Rendezvous::handle(Id id, unsigned events) {
  const auto at = guests_.find(id);
  if (at == guests_.end()) return;  // removed since
  Guest& guest = at->second;
  bool open    = true;
  try {
    if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) {
      open = guest.connection.fill();
      while (!guest.closing) {
        const std::optional<Bytes> frame = guest.connection.next();
        if (!frame) break;
        if (!take(id, guest, *frame)) return;  // `guest` is gone
      }
    }
    if (guest.closing) open = open && guest.connection.has_output();
    open = open && guest.connection.flush();
    if (guest.closing) open = open && guest.connection.has_output();
  } catch (const std::exception&) {  // not our protocol, or no memory
    open = false;
  }
  if (!open) return remove(id);
  watch(id, guest);
}

void Rendezvous::watch(Id id, Guest& guest) {
  epoll_event event{};
  event.events   = EPOLLIN | (guest.connection.has_output() ? unsigned{EPOLLOUT} : 0U);
  event.data.u64 = id;
  ::epoll_ctl(events_.get(), EPOLL_CTL_MOD, guest.connection.descriptor(), &event);
}

bool Rendezvous::take(Id id, Guest& guest, const Bytes& frame) {
  if (guest.rank >= 0) {
    serve_request(id, frame);
    return true;
  }
  if (!guest.handshake) {
    const std::optional<Nonce> nonce = read_hello(ProofSide::client, frame);
    if (!nonce) throw Error(ErrorKind::backend, "not a hello");
    guest.handshake = Handshake{options_.key, *nonce, random_nonce()};
    guest.connection.queue(hello_message(ProofSide::server, guest.handshake->server));
    return true;
  }
  if (const std::optional<Claim> claim = guest.handshake->read_claim(frame)) return admit(id, guest, *claim);
  guest.connection.queue(Bytes(sizeof(Digest)));  // an answer without a proof: this side has another secret
  guest.closing = true;
  return true;
}

std::optional<std::string> Rendezvous::misfit(const Claim& claim) const {
  if (claim.version != options_.version)
    return str("program version: rank ", claim.rank, " has '", claim.version, "', rank 0 has '", options_.version,
               "' (the same program on all ranks)");
  if (claim.size != options_.size)
    return str("world size: rank ", claim.rank, " has ", claim.size, ", rank 0 has ", options_.size,
               " (the same on all ranks)");
  if (claim.rank < 1 || claim.rank >= options_.size)
    return str("rank: a process other than rank 0 has rank ", claim.rank, " (1 to ", options_.size - 1, ")");
  return std::nullopt;
}

bool Rendezvous::admit(Id id, Guest& guest, const Claim& claim) {
  std::optional<std::string> ended;
  const std::optional<std::string> why = misfit(claim);
  const bool late = why && complete_;  // a job that runs is not ended by a process that comes later
  if (why && !late) {
    end(*why);
    if (options_.on_misfit) options_.on_misfit(claim.rank, *why);
    ended = why;
  } else {
    const std::lock_guard lock(mutex_);
    ended = ended_;
  }
  Answer answer{.text = ended.value_or("")};
  const bool known = claim.purpose == Purpose::store || (claim.purpose == Purpose::control && options_.control) ||
                     (claim.purpose == Purpose::peers && options_.peers);
  if (ended) {
    answer.kind = Answer::Kind::ended;
  } else if (late) {
    answer = {Answer::Kind::refused, str("all ranks have joined already; ", *why)};
  } else if (!known) {
    answer = {Answer::Kind::refused, str("no connections for ", to_string(claim.purpose))};
  } else if (present_.contains({claim.purpose, claim.rank})) {
    answer = {Answer::Kind::refused, str("there is a rank ", claim.rank, " already")};
  }
  guest.connection.queue(guest.handshake->message(answer));  // handle() sends it before this thread can end
  guest.closing = answer.kind != Answer::Kind::admitted;
  if (ended || (claim.purpose == Purpose::control && !guest.closing)) {
    const std::lock_guard lock(mutex_);
    told_.insert(claim.rank);
    changed_.notify_all();
  }
  if (guest.closing) return true;
  present_.insert({claim.purpose, claim.rank});
  const std::size_t num_purposes =
      1 + std::size_t{options_.control != nullptr} + std::size_t{options_.peers != nullptr};
  complete_ = complete_ || present_.size() == num_purposes * static_cast<std::size_t>(options_.size - 1);
  guest.connection.admit(str("rank ", claim.rank));
  if (const std::string own = own_address_of(guest.connection.descriptor()); !own.empty()) {
    const std::lock_guard lock(mutex_);
    if (own_address_.empty() || is_loopback_name(own_address_)) own_address_ = own;
  }
  if (claim.purpose == Purpose::store) {
    guest.rank = claim.rank;
    return true;
  }
  // A few bytes always fit into the buffer of a new connection.
  static_cast<void>(guest.connection.flush());
  Connection connection = std::move(guest.connection);
  ::epoll_ctl(events_.get(), EPOLL_CTL_DEL, connection.descriptor(), nullptr);
  guests_.erase(id);
  const auto& take_over = claim.purpose == Purpose::control ? options_.control : options_.peers;
  take_over(claim.rank, std::move(connection));
  return false;
}

void Rendezvous::serve_request(Id id, const Bytes& frame) {
  MessageReader reader(frame);
  const auto what    = static_cast<Request>(reader.number<std::uint8_t>());
  const auto request = reader.number<std::uint64_t>();
  std::string key    = reader.text();
  std::unique_lock lock(mutex_);
  if (ended_) {
    const std::string why = *ended_;
    lock.unlock();
    return answer(id, request, false, std::as_bytes(std::span(why)));
  }
  Bytes result;
  switch (what) {
    case Request::set: {
      const std::span<const std::byte> value = reader.rest();
      put(key, Bytes(value.begin(), value.end()));
      break;
    }
    case Request::add:
      result = number_bytes(to_int(values_[key]) + reader.number<std::int64_t>());
      put(key, result);
      break;
    case Request::get: {
      const auto at = values_.find(key);
      if (at == values_.end()) {
        waiting_.emplace(std::move(key), Waiting{id, request});
        return;
      }
      result = at->second;
      break;
    }
    default:
      throw Error(ErrorKind::backend, "unknown request");
  }
  lock.unlock();
  answer(id, request, true, result);
}

void Rendezvous::answer(Id id, std::uint64_t request, bool good, std::span<const std::byte> value) {
  const auto at = guests_.find(id);
  if (at == guests_.end()) return;
  at->second.connection.queue(MessageWriter().number(request).number(std::uint8_t{good}).raw(value).bytes());
  static_cast<void>(at->second.connection.flush());  // a broken one is reported as an event
  watch(id, at->second);
}

void Rendezvous::put(const std::string& key, Bytes value) {
  values_[key] = std::move(value);
  fresh_.insert(key);
  changed_.notify_all();
}

// Answers guests whose key has been set, or all of them when the job has ended.
void Rendezvous::wake_waiting() {
  struct Reply {
    Waiting to;
    bool good;
    Bytes value;
  };
  std::vector<Reply> replies;
  {
    const std::lock_guard lock(mutex_);
    for (auto at = waiting_.begin(); at != waiting_.end();) {
      if (!ended_ && !fresh_.contains(at->first)) {
        ++at;
        continue;
      }
      replies.push_back({at->second, !ended_, ended_ ? to_bytes(*ended_) : values_.at(at->first)});
      at = waiting_.erase(at);
    }
    fresh_.clear();
  }
  for (const Reply& reply : replies) answer(reply.to.guest, reply.to.request, reply.good, reply.value);
}

void Rendezvous::throw_if_ended() const {
  if (ended_) throw Error(ErrorKind::config, *ended_);
}

void Rendezvous::set(const std::string& key, Bytes value, const Patience&) {
  {
    const std::lock_guard lock(mutex_);
    throw_if_ended();
    put(key, std::move(value));
  }
  const std::uint64_t one = 1;
  static_cast<void>(!::write(wake_.get(), &one, sizeof one));
}

Bytes Rendezvous::get(const std::string& key, const Patience& patience) {
  std::unique_lock lock(mutex_);
  for (;;) {
    throw_if_ended();
    if (const auto at = values_.find(key); at != values_.end()) return at->second;
    if (patience.interrupt != nullptr && patience.interrupt->raised())
      throw Error(ErrorKind::backend, str("store: '", key, "': ", patience.interrupt->why()));
    const Deadline now = Clock::now();
    if (now >= patience.deadline) throw Error(ErrorKind::backend, str("store: '", key, "' was not set in time"));
    // An interrupt does not notify the condition.
    changed_.wait_until(lock, patience.interrupt ? std::min(patience.deadline, now + 20ms) : patience.deadline);
  }
}

std::int64_t Rendezvous::add(const std::string& key, std::int64_t number, const Patience&) {
  std::int64_t sum = 0;
  {
    const std::lock_guard lock(mutex_);
    throw_if_ended();
    sum = to_int(values_[key]) + number;
    put(key, number_bytes(sum));
  }
  const std::uint64_t one = 1;
  static_cast<void>(!::write(wake_.get(), &one, sizeof one));
  return sum;
}

void Rendezvous::end(const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    if (!ended_) ended_ = why;
    changed_.notify_all();
  }
  const std::uint64_t one = 1;
  static_cast<void>(!::write(wake_.get(), &one, sizeof one));
}

void Rendezvous::wait_until_told(Deadline until) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, until, [&] {
    for (int rank = 1; rank < options_.size; ++rank)
      if (!told_.contains(rank)) return false;
    return true;
  });
}

std::string Rendezvous::own_address() const {
  const std::lock_guard lock(mutex_);
  return own_address_;
}

std::size_t Rendezvous::num_strangers() const {
  const std::lock_guard lock(mutex_);
  return num_strangers_;
}

Bytes RemoteStore::request(std::uint8_t what, const std::string& key, std::span<const std::byte> value,
                           const Patience& patience) {
  {
    std::unique_lock lock(mutex_);
    if (!free_.wait_until(lock, patience.deadline, [&] { return !busy_; }))
      throw Error(ErrorKind::backend, str("store: '", key, "': another request has not ended in time"));
    busy_ = true;
  }
  struct Release {
    RemoteStore& store;
    ~Release() {
      const std::lock_guard lock(store.mutex_);
      store.busy_ = false;
      store.free_.notify_one();
    }
  } const release{*this};
  const std::uint64_t number = num_requests_++;
  try {
    connection_.send(MessageWriter().number(what).number(number).text(key).raw(value).bytes(), patience);
    for (;;) {
      const Bytes reply = connection_.receive(patience);
      MessageReader reader(reply);
      if (reader.number<std::uint64_t>() != number) continue;  // of a request that was given up
      const bool good                       = reader.number<std::uint8_t>() != 0;
      const std::span<const std::byte> rest = reader.rest();
      if (good) return {rest.begin(), rest.end()};
      throw Error(ErrorKind::config, to_text({rest.begin(), rest.end()}));
    }
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::backend) throw;
    // The connection may close in the same moment: the reason of the interrupt says more.
    const bool interrupted    = patience.interrupt != nullptr && patience.interrupt->raised();
    const std::string problem = str("store: '", key, "': ", interrupted ? patience.interrupt->why() : error.what());
    const bool closed         = !interrupted && Clock::now() < patience.deadline;
    throw Error(ErrorKind::backend, closed && explain_ ? explain_(problem) : problem);
  }
}

void RemoteStore::set(const std::string& key, Bytes value, const Patience& patience) {
  static_cast<void>(request(static_cast<std::uint8_t>(Request::set), key, value, patience));
}

Bytes RemoteStore::get(const std::string& key, const Patience& patience) {
  return request(static_cast<std::uint8_t>(Request::get), key, {}, patience);
}

std::int64_t RemoteStore::add(const std::string& key, std::int64_t number, const Patience& patience) {
  return to_int(request(static_cast<std::uint8_t>(Request::add), key, number_bytes(number), patience));
}

}  // namespace stepgraph
