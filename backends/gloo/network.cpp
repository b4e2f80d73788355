#include "backends/gloo/network.hpp"

#include <gloo/transport/context.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "backends/process/message.hpp"
#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

// Gloo closes all connections when a wait runs out of time. So waits do not; interrupt() ends them.
constexpr std::chrono::milliseconds endless = std::chrono::hours(24 * 365);

constexpr std::uint64_t proof_slot = ~std::uint64_t{0};  // no message has it: its turn is too large

}  // namespace

std::shared_ptr<gloo::transport::Device> make_gloo_device(const Job& job) {
  gloo::transport::tcp::attr attr;
  if (const char* const interface = std::getenv("GLOO_SOCKET_IFNAME"); interface != nullptr && *interface != '\0') {
    attr.iface = interface;
  } else {
    attr.hostname = job.own_address();
  }
  try {
    return gloo::transport::tcp::CreateDevice(attr);
  } catch (const std::exception& error) {
    throw Error(ErrorKind::backend, str("gloo: cannot use ", attr.iface.empty() ? "address '" : "interface '",
                                        attr.iface.empty() ? attr.hostname : attr.iface, "': ", error.what()));
  }
}

GlooNetwork::GlooNetwork(Job& job, ProcessWorld::Hooks hooks, std::chrono::milliseconds timeout)
    : job_(job),
      hooks_(std::move(hooks)),
      timeout_(timeout),
      key_(job_key(job.place().secret, job.place().job)),
      device_(make_gloo_device(job)) {
  make_context();
}

GlooNetwork::~GlooNetwork() {
  close_pairs();
  messages_.clear();
}

void GlooNetwork::make_context() {
  context_ = device_->createContext(job_.rank(), job_.size());
  context_->setTimeout(
      std::max<std::chrono::milliseconds>(timeout_ / 5, std::chrono::milliseconds(200)));  // of each try
}

void GlooNetwork::throw_if_interrupted() const {
  if (why_) throw Error(ErrorKind::backend, *why_);
}

void GlooNetwork::fail(Rank peer, const std::string& problem) {
  {
    const std::lock_guard lock(mutex_);
    throw_if_interrupted();
  }
  throw Error(ErrorKind::backend, hooks_.explain(peer, "gloo: " + problem));
}

// --- connections ---------------------------------------------------------------------------------------------------

void GlooNetwork::connect(const Connections& connections) {
  std::vector<Rank> fresh;
  for (const Rank peer : connections.peers)
    if (peers_.insert(peer).second) fresh.push_back(peer);
  try {
    connect_to(fresh);
  } catch (const Error&) {
    const std::lock_guard lock(mutex_);
    if (!why_ || failed_) throw;
    // A peer has aborted its run already, and the connections were closed: recover() makes all of them.
  }
}

// All addresses are told before the first connection is made. A connection is accepted by the thread of Gloo, so
// processes can connect in any order.
void GlooNetwork::connect_to(const std::vector<Rank>& peers) {
  const Patience patience{Clock::now() + timeout_, interrupt_.get()};  // also of an abort
  const auto key_of = [&](int from, int to) { return str("gloo ", generation_, " ", from, " ", to); };
  std::map<Rank, Nonce> mine, theirs;
  std::map<Rank, std::vector<char>> addresses;
  for (const Rank peer : peers) {
    gloo::transport::Pair* const pair = context_->createPair(index(peer)).get();
    {
      const std::lock_guard lock(mutex_);
      throw_if_interrupted();
      pairs_[peer] = pair;
    }
    mine[peer]                      = random_nonce();
    const std::vector<char> address = pair->address().bytes();
    job_.store().set(key_of(job_.rank(), index(peer)),
                     MessageWriter().raw(mine[peer]).raw(std::as_bytes(std::span(address))).bytes(), patience);
  }
  for (const Rank peer : peers) {
    const Bytes told = job_.store().get(key_of(index(peer), job_.rank()), patience);
    MessageReader from(told);
    std::ranges::copy(from.take(theirs[peer].size()), theirs[peer].begin());
    for (const std::byte byte : from.rest()) addresses[peer].push_back(static_cast<char>(byte));
  }
  for (const Rank peer : peers) {
    try {
      pairs_.at(peer)->connect(addresses[peer]);
    } catch (const std::exception& error) {
      fail(peer, error.what());
    }
  }
  for (const Rank peer : peers) prove(peer, mine[peer], theirs[peer]);
}

// Gloo takes the first connection to an address as that of the peer. So the first message proves that it is.
void GlooNetwork::prove(Rank peer, const Nonce& mine, const Nonce& theirs) {
  const auto proof = [&](const Nonce& from, const Nonce& to) {
    return hmac_sha256(key_, MessageWriter().text("gloo").raw(from).raw(to).bytes());
  };
  Digest sent = proof(mine, theirs), received{};
  try {
    const Request send_it = post(true, peer, proof_slot, sent.data(), sent.size());
    const Request get_it  = post(false, peer, proof_slot, received.data(), received.size());
    wait(get_it);
    wait(send_it);
  } catch (...) {
    drop_requests();
    throw;
  }
  if (!equal_in_constant_time(received, proof(theirs, mine)))
    throw Error(ErrorKind::backend, str("gloo: the connection of rank ", peer, " was taken by a stranger"));
}

void GlooNetwork::close_pairs() noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& [peer, pair] : pairs_) {
    try {
      pair->close();
    } catch (const std::exception&) {  // it is broken already
    }
  }
}

void GlooNetwork::close() { close_pairs(); }

void GlooNetwork::recover(std::uint64_t generation) {
  close_pairs();
  {
    const std::lock_guard lock(mutex_);
    messages_.clear();
    pairs_.clear();
    if (!failed_) {
      why_.reset();
      interrupt_ = std::make_unique<Interrupt>();
    }
  }
  generation_ = generation;
  make_context();
  connect_to({peers_.begin(), peers_.end()});
}

// --- messages ------------------------------------------------------------------------------------------------------

Transport::Request GlooNetwork::post(bool sends, Rank peer, std::uint64_t key, void* data, std::size_t size) {
  std::unique_ptr<Buffer> buffer = context_->createUnboundBuffer(data, size);
  Buffer* const posted           = buffer.get();
  std::uint64_t id               = 0;
  {
    const std::lock_guard lock(mutex_);
    throw_if_interrupted();
    id = ++last_;
    messages_.emplace(id, Message{std::move(buffer), sends, std::this_thread::get_id()});
  }
  try {
    if (sends) {
      posted->send(index(peer), key);
    } else {
      posted->recv(index(peer), key);
    }
  } catch (const std::exception& error) {
    fail(peer, error.what());
  }
  return {id, peer};
}

Transport::Request GlooNetwork::send(Rank, Rank to, std::uint64_t key, std::span<const std::byte> bytes) {
  return post(true, to, key, const_cast<std::byte*>(bytes.data()), bytes.size());
}

Transport::Request GlooNetwork::receive(Rank from, Rank, std::uint64_t key, std::span<std::byte> bytes) {
  return post(false, from, key, bytes.data(), bytes.size());
}

void GlooNetwork::wait(Request request) {
  Buffer* buffer = nullptr;
  bool sends     = false;
  {
    const std::lock_guard lock(mutex_);
    throw_if_interrupted();
    const Message& message = messages_.at(request.id);
    buffer                 = message.buffer.get();
    sends                  = message.sends;
  }
  try {
    const bool done = sends ? buffer->waitSend(endless) : buffer->waitRecv(endless);
    if (!done) fail(request.peer, "the wait was ended");
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    fail(request.peer, error.what());
  }
  const std::lock_guard lock(mutex_);
  messages_.erase(request.id);
}

void GlooNetwork::interrupt(Interruption kind, const std::string& why) noexcept {
  {
    const std::lock_guard lock(mutex_);
    why_    = why;
    failed_ = failed_ || kind == Interruption::failed;
    interrupt_->raise(why);
    for (const auto& [id, message] : messages_)
      message.sends ? message.buffer->abortWaitSend() : message.buffer->abortWaitRecv();
  }
  close_pairs();
}

// A buffer that is gone is not written any more. Messages for it would keep the thread of Gloo busy, so connections
// were closed before (interrupt), or are now.
void GlooNetwork::drop_requests() noexcept {
  close_pairs();
  const std::lock_guard lock(mutex_);
  std::erase_if(messages_, [](const auto& each) { return each.second.thread == std::this_thread::get_id(); });
}

}  // namespace stepgraph
