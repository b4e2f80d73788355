#include "backends/mpi/network.hpp"

#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "backends/process/message.hpp"
#include "backends/process/watchdog.hpp"
#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

using namespace std::chrono_literals;

constexpr auto glance       = 20ms;  // between looks at `interrupted_`
constexpr auto closing_time = 30s;   // for the end of communicators; nothing watches the other processes any more

std::string text_of(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  return {text.data(), static_cast<std::size_t>(length)};
}

}  // namespace

// How a thread waits that tests messages. While nothing computes in this process, it tests again and again, and yields
// in between: a thread that is about to compute may have been woken on the same core. Beside a thread that computes it
// naps: a nap ends when its time is over, but a thread that yields gets the core back only after the slice of the
// other.
class MpiNetwork::Pause {
 public:
  explicit Pause(const MpiNetwork& network) : network_(network) {}

  void operator()() {
    if (num_tests_++ % tests_between_looks == 0) idle_ = network_.hooks_.is_idle();
    if (idle_ && num_tests_ < most_tests) {
      ::sched_yield();
      return;
    }
    std::this_thread::sleep_for(nap_);
    nap_  = std::min(2 * nap_, longest_nap);
    idle_ = network_.hooks_.is_idle();
  }
  void reset() {
    num_tests_ = 0;
    nap_       = shortest_nap;
  }

 private:
  static constexpr std::chrono::microseconds shortest_nap{50}, longest_nap{400};
  static constexpr int tests_between_looks = 32, most_tests = 100'000;  // tens of milliseconds

  const MpiNetwork& network_;
  int num_tests_                 = 0;
  bool idle_                     = false;
  std::chrono::microseconds nap_ = shortest_nap;
};

MpiNetwork::MpiNetwork(Job& job, ProcessWorld::Hooks hooks)
    : job_(job),
      hooks_(std::move(hooks)),
      num_sent_(static_cast<std::size_t>(job.size())),
      num_received_(static_cast<std::size_t>(job.size())) {
  check(MPI_Comm_dup(MPI_COMM_WORLD, &world_), "copying the communicator");
  check(MPI_Comm_set_errhandler(world_, MPI_ERRORS_RETURN), "setting the error handler");
  void* most   = nullptr;
  int is_there = 0;
  MPI_Comm_get_attr(world_, MPI_TAG_UB, &most, &is_there);
  const int largest = is_there != 0 ? *static_cast<int*>(most) : 32767;
  int bits          = 0;
  while (bits < 31 && (std::int64_t{1} << (bits + 1)) - 1 <= largest) ++bits;
  // One bit for messages, two for the run, the rest for turn and step: messages with equal tags keep their order.
  tag_step_bits_ = (bits - 3) / 2;
  tag_turn_bits_ = bits - 3 - tag_step_bits_;
}

MpiNetwork::~MpiNetwork() { stop_draining(); }

void MpiNetwork::throw_if_interrupted() {
  if (!interrupted_) return;
  const std::lock_guard lock(why_mutex_);
  throw Error(ErrorKind::backend, why_);
}

void MpiNetwork::check(int code, const char* doing, Rank peer) {
  if (code == MPI_SUCCESS) return;
  const std::string problem = str("mpi: ", doing, ": ", failed_ ? str("error ", code) : text_of(code));
  throw Error(ErrorKind::backend, peer == Rank{-1} ? problem : hooks_.explain(peer, problem));
}

// --- groups --------------------------------------------------------------------------------------------------------

void MpiNetwork::add_group(std::uint32_t number, MPI_Comm comm, std::map<Rank, int> rank_in) {
  check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "setting the error handler");
  groups_.emplace(number, Group{comm, std::move(rank_in)});
}

// In the order of numbers, which all processes share, so none waits for a process that waits for it.
void MpiNetwork::connect(const Connections& connections) {
  const std::lock_guard lock(mutex_);
  if (failed_) throw_if_interrupted();
  for (const std::uint32_t number : connections.partial) {
    if (failed_) throw_if_interrupted();
    MPI_Comm comm = MPI_COMM_NULL;
    check(MPI_Comm_dup(world_, &comm), "making a communicator of all processes");
    add_group(number, comm, {});
  }
  MPI_Group all = MPI_GROUP_NULL;
  check(MPI_Comm_group(world_, &all), "asking for the group of all processes");
  for (const auto& [spec, number] : connections.groups) {
    if (failed_) throw_if_interrupted();
    std::vector<int> members;
    std::map<Rank, int> rank_in;
    for (const Rank rank : spec->ranks) {
      rank_in[rank] = static_cast<int>(members.size());
      members.push_back(index(rank));
    }
    MPI_Group some = MPI_GROUP_NULL;
    MPI_Comm comm  = MPI_COMM_NULL;
    check(MPI_Group_incl(all, static_cast<int>(members.size()), members.data(), &some), "making a group");
    constexpr int most_tags = 32768;  // every MPI has as many
    check(MPI_Comm_create_group(world_, some, static_cast<int>(number % most_tags), &comm), "making a communicator");
    MPI_Group_free(&some);
    add_group(number, comm, std::move(rank_in));
  }
  MPI_Group_free(&all);
}

void MpiNetwork::close() {
  stop_draining();
  const std::lock_guard lock(mutex_);
  if (failed_) return;
  const Watchdog watchdog("freeing MPI communicators", closing_time);
  for (auto& [number, group] : groups_) MPI_Comm_free(&group.comm);
  groups_.clear();
  MPI_Comm_free(&world_);
}

// --- messages ------------------------------------------------------------------------------------------------------

int MpiNetwork::tag_of(const MessageKey& key) const noexcept {
  const auto low    = [](std::uint32_t value, int bits) { return value & ((std::uint32_t{1} << bits) - 1); };
  std::uint32_t tag = key.is_message ? 1 : 0;
  tag               = tag << 2 | low(key.run, 2);
  tag               = tag << tag_turn_bits_ | low(key.turn, tag_turn_bits_);
  return static_cast<int>(tag << tag_step_bits_ | low(key.step, tag_step_bits_));
}

Transport::Request MpiNetwork::post(bool sends, Rank peer, std::uint64_t bits, void* data, std::size_t size) {
  const MessageKey key = MessageKey::unpacked(bits);
  const int tag        = tag_of(key);
  const Lock lock(mutex_);
  throw_if_interrupted();
  const Group& group  = groups_.at(key.communicator);
  const int other     = group.rank_in.empty() ? index(peer) : group.rank_in.at(peer);
  const auto count    = static_cast<int>(size);
  MPI_Request request = MPI_REQUEST_NULL;
  check(sends ? MPI_Isend(data, count, MPI_BYTE, other, tag, group.comm, &request)
              : MPI_Irecv(data, count, MPI_BYTE, other, tag, group.comm, &request),
        sends ? "sending" : "receiving", peer);
  const std::uint64_t id = ++last_;
  messages_[id]          = {.sends = sends, .peer = peer, .thread = std::this_thread::get_id()};
  requests_.push_back(request);
  ids_.push_back(id);
  if (sends) ++num_sent_[static_cast<std::size_t>(index(peer))];
  return {id, peer};
}

Transport::Request MpiNetwork::send(Rank, Rank to, std::uint64_t key, std::span<const std::byte> bytes) {
  return post(true, to, key, const_cast<std::byte*>(bytes.data()), bytes.size());
}

Transport::Request MpiNetwork::receive(Rank from, Rank, std::uint64_t key, std::span<std::byte> bytes) {
  return post(false, from, key, bytes.data(), bytes.size());
}

bool MpiNetwork::progress() {
  if (requests_.empty() || failed_) return false;
  int num_done = 0;
  indices_.resize(requests_.size());
  statuses_.resize(requests_.size());
  const int code =
      MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &num_done, indices_.data(), statuses_.data());
  if (num_done == MPI_UNDEFINED) return false;
  for (int i = 0; i < num_done; ++i) {
    const auto at    = static_cast<std::size_t>(indices_[static_cast<std::size_t>(i)]);
    Message& message = messages_.at(ids_[at]);
    message.done     = true;
    if (code == MPI_ERR_IN_STATUS) message.error = statuses_[static_cast<std::size_t>(i)].MPI_ERROR;
    int cancelled = 0;
    if (!message.sends) MPI_Test_cancelled(&statuses_[static_cast<std::size_t>(i)], &cancelled);
    message.cancelled = cancelled != 0;
    if (!message.sends && cancelled == 0) ++num_received_[static_cast<std::size_t>(index(message.peer))];
    ids_[at] = 0;
  }
  std::size_t kept = 0;
  for (std::size_t i = 0; i < ids_.size(); ++i) {
    if (ids_[i] == 0) continue;
    ids_[kept]        = ids_[i];
    requests_[kept++] = requests_[i];
  }
  ids_.resize(kept);
  requests_.resize(kept);
  if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) check(code, "exchanging");  // else its owner throws it
  return num_done > 0;
}

void MpiNetwork::wait(Request request) {
  Lock lock(mutex_);
  const Message& message = messages_.at(request.id);  // references stay valid
  while (!message.done) {
    throw_if_interrupted();
    if (leading_) {
      changed_.wait_for(lock, glance);
      continue;
    }
    leading_ = true;
    try {
      for (Pause pause(*this); !message.done && !interrupted_;) {
        if (progress()) {
          pause.reset();
          changed_.notify_all();
          continue;
        }
        lock.unlock();
        pause();
        lock.lock();
      }
    } catch (...) {
      leading_ = false;
      changed_.notify_all();
      throw;
    }
    leading_ = false;
    changed_.notify_all();
  }
  throw_if_interrupted();
  const int error = message.error;
  messages_.erase(request.id);
  lock.unlock();  // the cause of an error is waited for
  check(error, "exchanging", request.peer);
}

// --- aborted runs --------------------------------------------------------------------------------------------------

// Messages that were sent and will not be received keep their senders waiting. So every process receives what comes, on
// a thread of its own, until all have ended the run.
void MpiNetwork::interrupt(Interruption kind, const std::string& why) noexcept {
  if (kind == Interruption::failed) failed_ = true;
  try {
    const std::lock_guard lock(why_mutex_);
    why_         = why;
    interrupted_ = true;
    changed_.notify_all();
    if (kind == Interruption::aborted && !failed_ && !drainer_.joinable()) {
      drains_  = true;
      drainer_ = std::thread([this] { drain(); });
    }
  } catch (const std::exception&) {  // no memory, or no thread: drop_requests reports it
    interrupted_ = undrained_ = true;
  }
}

void MpiNetwork::drain() {
  Pause pause(*this);
  while (drains_ && !failed_) {
    bool some = false;
    try {
      const Lock lock(mutex_);
      some = progress();
      for (const auto& [number, group] : groups_) some = receive_stray(group, MPI_ANY_SOURCE) || some;
      if (some) changed_.notify_all();
    } catch (const std::exception&) {  // the thread that waits for it gets the error, or runs out of time
    }
    some ? pause.reset() : pause();
  }
}

void MpiNetwork::stop_draining() noexcept {
  drains_ = false;
  std::thread thread;
  {
    const std::lock_guard lock(why_mutex_);
    thread = std::move(drainer_);
  }
  if (thread.joinable()) thread.join();
}

bool MpiNetwork::receive_stray(const Group& group, int source) {
  if (failed_) return false;
  int is_there        = 0;
  MPI_Message message = MPI_MESSAGE_NULL;
  MPI_Status status{};
  check(MPI_Improbe(source, MPI_ANY_TAG, group.comm, &is_there, &message, &status), "looking for messages");
  if (is_there == 0) return false;
  int size = 0;
  MPI_Get_count(&status, MPI_BYTE, &size);
  std::vector<std::byte> bytes(static_cast<std::size_t>(std::max(size, 1)));
  const auto sender = std::ranges::find(group.rank_in, status.MPI_SOURCE, [](const auto& each) { return each.second; });
  const int rank    = sender == group.rank_in.end() ? status.MPI_SOURCE : index(sender->first);
  check(MPI_Mrecv(bytes.data(), size, MPI_BYTE, &message, &status), "receiving a message of an aborted run");
  ++num_received_[static_cast<std::size_t>(rank)];
  return true;
}

void MpiNetwork::drop_requests() noexcept {
  const auto mine = [](const Message& message) { return message.thread == std::this_thread::get_id(); };
  try {
    if (undrained_) job_.control().fail("cannot receive the messages of an aborted run: no thread");
  } catch (const std::exception&) {  // no memory either: time-outs end the job
  }
  Lock lock(mutex_, std::try_to_lock);
  while (!lock.owns_lock()) {
    if (failed_) return;  // a thread may hang in MPI
    std::this_thread::sleep_for(100us);
    static_cast<void>(lock.try_lock());
  }
  for (std::size_t i = 0; i < ids_.size() && !failed_; ++i) {
    const auto message = messages_.find(ids_[i]);
    if (message != messages_.end() && mine(message->second) && !message->second.sends) MPI_Cancel(&requests_[i]);
  }
  const auto is_over = [&] {
    return std::none_of(messages_.begin(), messages_.end(),
                        [&](const auto& each) { return mine(each.second) && !each.second.done; });
  };
  // However long it takes: until then MPI may use the memory. A peer that does not answer is found by the control
  // channel, and after a failure MPI is not called any more.
  for (Pause pause(*this); !failed_ && !is_over();) {
    try {
      if (progress()) {
        pause.reset();
        changed_.notify_all();
        continue;
      }
    } catch (const std::exception&) {  // the error of the run has been thrown already
    }
    lock.unlock();
    pause();
    lock.lock();
  }
  std::erase_if(messages_, [&](const auto& each) { return mine(each.second) && each.second.done; });
}

// All processes have ended the aborted run, so all sends have ended. What is still under way is counted. No process
// goes on before all have counted: its next message would be taken for one of the aborted run.
void MpiNetwork::recover(std::uint64_t generation) {
  stop_draining();
  const Patience patience{Clock::now() + std::chrono::minutes(5), &job_.control().interrupt()};
  const auto key_of = [&](int rank) { return str("mpi ", generation, " ", rank); };
  {
    const Lock lock(mutex_);
    MessageWriter sent;
    for (const std::uint64_t count : num_sent_) sent.number(count);
    job_.store().set(key_of(job_.rank()), sent.bytes(), patience);
  }
  for (int rank = 0; rank < job_.size(); ++rank) {
    if (rank == job_.rank()) continue;
    const Bytes told = job_.store().get(key_of(rank), patience);
    MessageReader from(told);
    std::uint64_t expected = 0;
    for (int to = 0; to <= job_.rank(); ++to) expected = from.number<std::uint64_t>();
    Pause pause(*this);
    for (;;) {
      const Lock lock(mutex_);
      if (num_received_[static_cast<std::size_t>(rank)] >= expected) break;
      bool some = progress();
      for (const auto& [number, group] : groups_) {
        const bool is_member = group.rank_in.empty() || group.rank_in.contains(Rank{rank});
        if (is_member) some = receive_stray(group, group.rank_in.empty() ? rank : group.rank_in.at(Rank{rank})) || some;
      }
      if (failed_) break;
      if (Clock::now() >= patience.deadline)
        throw Error(ErrorKind::backend, str("mpi: messages of rank ", rank, " from an aborted run do not come"));
      some ? pause.reset() : pause();
    }
  }
  const auto counted = [&](int rank) { return str("mpi ", generation, " counted ", rank); };
  const auto all     = str("mpi ", generation, " counted by all");
  job_.store().set(counted(job_.rank()), {}, patience);
  if (job_.rank() == 0) {
    for (int rank = 0; rank < job_.size(); ++rank) static_cast<void>(job_.store().get(counted(rank), patience));
    job_.store().set(all, {}, patience);
  }
  static_cast<void>(job_.store().get(all, patience));
  const std::lock_guard lock(why_mutex_);
  if (!failed_) interrupted_ = false;
}

}  // namespace stepgraph
