#include "backends/process/control.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "backends/process/message.hpp"
#include "backends/process/watchdog.hpp"
#include "engine/base/error.hpp"
#include "engine/base/words.hpp"

namespace stepgraph {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t wake_id   = ~std::uint64_t{0};
constexpr std::uint64_t signal_id = wake_id - 1;
constexpr auto departing_time     = 2s;

enum class Kind : std::uint8_t {
  beat = 1,   // with the progress
  failed,     // to process 0, with the rank that was the cause, and the text
  suspicion,  // to process 0, with rank and text
  verdict,    // of process 0
  written,    // to process 0: has written what it knows
  leave,      // of process 0: all have
  note,       // with the rank that has told it
  bye,
};

MessageWriter message(Kind kind) { return std::move(MessageWriter().number(static_cast<std::uint8_t>(kind))); }

Bytes verdict_message(const Verdict& verdict) {
  MessageWriter to = message(Kind::verdict);
  write(to, verdict);
  return to.bytes();
}

template <class Call>
void call_safely(const Call& call) noexcept {
  try {
    call();
  } catch (...) {  // the control thread goes on: the other processes count on it
  }
}

}  // namespace

Control::Control(ControlOptions options)
    : options_(std::move(options)),
      interval_(std::clamp<std::chrono::milliseconds>(options_.timeout / 8, 100ms, 1s)),
      events_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      signal_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      connections_(static_cast<std::size_t>(options_.size)),
      table_(static_cast<std::size_t>(options_.rank == 0 ? options_.size : 1)),
      written_(table_.size()) {
  for (const auto& [descriptor, id] : {std::pair{wake_.get(), wake_id}, std::pair{signal_.get(), signal_id}}) {
    epoll_event event{};
    event.events   = EPOLLIN;
    event.data.u64 = id;
    if (::epoll_ctl(events_.get(), EPOLL_CTL_ADD, descriptor, &event) != 0)
      throw Error(ErrorKind::backend, str("control: ", system_reason(errno)));
  }
  const Deadline now = Clock::now();
  next_beat_ = last_turn_ = judge_from_ = now;
  join_until_                           = now + options_.timeout;
  table_[0].joined                      = options_.rank == 0;
  table_[0].heard = table_[0].advanced = now;
  thread_                              = std::thread([this] { run(); });
}

Control::~Control() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake();
  thread_.join();
}

void Control::wake() noexcept {
  const std::uint64_t one = 1;
  static_cast<void>(!::write(wake_.get(), &one, sizeof one));
}

void Control::note_signal() noexcept {
  const std::uint64_t one = 1;
  static_cast<void>(!::write(signal_.get(), &one, sizeof one));
}

void Control::connect(int rank, Connection connection) {
  {
    const std::lock_guard lock(mutex_);
    new_connections_.emplace_back(rank, std::move(connection));
  }
  wake();
}

void Control::post(Bytes posted) {
  {
    const std::lock_guard lock(mutex_);
    posted_.push_back(std::move(posted));
  }
  wake();
}

std::optional<Verdict> Control::verdict() const {
  const std::lock_guard lock(mutex_);
  return verdict_;
}

std::string Control::line() const {
  const std::lock_guard lock(mutex_);
  return line_;
}

void Control::fail(const std::string& text, int by) {
  post(message(Kind::failed).number(by == options_.rank ? -1 : by).text(text.empty() ? "unknown error" : text).bytes());
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, Clock::now() + options_.suspicion_time, [&] { return shown_state_ == State::left; });
}

std::string Control::suspect(int rank, const std::string& text) {
  post(message(Kind::suspicion).number(rank).text(text).bytes());
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, Clock::now() + options_.suspicion_time, [&] { return verdict_.has_value(); });
  return verdict_ ? line_ : text;
}

void Control::misfit(int rank, const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    misfits_.push_back({.kind = VerdictKind::misfit, .rank = rank, .text = why});
  }
  wake();
}

void Control::tell(const std::string& note) { post(message(Kind::note).number(options_.rank).text(note).bytes()); }

bool Control::bye() {
  {
    const std::lock_guard lock(mutex_);
    bye_wanted_ = true;
  }
  wake();
  std::unique_lock lock(mutex_);
  // The thread gives up by itself, well before.
  changed_.wait_until(lock, Clock::now() + 2 * departing_time, [&] { return shown_state_ == State::left; });
  return shown_state_ == State::left && clean_ && !verdict_;
}

void Control::run() {
  for (;;) {
    const Deadline now = Clock::now();
    // This process was stopped for a while. What the others have sent since is read before they are judged.
    if (now - last_turn_ >= options_.timeout / 2) judge_from_ = now + 2 * interval_;
    if (state_ == State::working && options_.rank == 0 && now - last_turn_ >= options_.timeout + interval_) {
      // If the others ran meanwhile, they have left, and their connections are closed. If all were stopped, the job
      // goes on.
      stopped_for_   = std::chrono::duration_cast<std::chrono::milliseconds>(now - last_turn_);
      stopped_until_ = now + 2 * interval_;
    }
    last_turn_ = now;
    work(now);
    {
      const std::lock_guard lock(mutex_);
      if (stop_ && (state_ == State::working || state_ == State::left)) return;
    }
    std::array<epoll_event, 64> ready{};
    const int num_ready = ::epoll_wait(events_.get(), ready.data(), static_cast<int>(ready.size()), wait_ms(now));
    for (int i = 0; i < num_ready; ++i) {
      const epoll_event& event = ready[static_cast<std::size_t>(i)];
      std::uint64_t count      = 0;
      if (event.data.u64 == wake_id) {
        static_cast<void>(!::read(wake_.get(), &count, sizeof count));
      } else if (event.data.u64 == signal_id) {
        static_cast<void>(!::read(signal_.get(), &count, sizeof count));
        if (signal_at_ != Deadline::max()) continue;
        signal_at_ = Clock::now() + options_.signal_time;
        at_signal_ = progress_now();
      } else {
        handle(static_cast<int>(event.data.u64), event.events, Clock::now());
      }
    }
  }
}

int Control::wait_ms(Deadline now) const {
  Deadline next = std::min({state_until_, overdue_at_, signal_at_});
  if (state_ == State::working) next = std::min(next, next_beat_);
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(std::min(next, now + 1s) - now).count();
  return static_cast<int>(std::max<std::int64_t>(left, 0));
}

void Control::work(Deadline now) {
  take_posted(now);
  if (state_ == State::working && now >= next_beat_) beat(now);
  if (state_ == State::working) judge_all(now);
  continue_leaving(now);
  if (now >= signal_at_) {
    signal_at_ = Deadline::max();
    if (state_ == State::working && options_.on_signal) call_safely([&] { options_.on_signal(at_signal_); });
  }
  if (now >= overdue_at_ && state_ == State::left) {
    overdue_at_ = Deadline::max();
    call_overdue();
  }
}

void Control::call_overdue() noexcept {
  if (options_.on_overdue && !overdue_.exchange(true)) call_safely(options_.on_overdue);
}

// What other threads of this process have left.
void Control::take_posted(Deadline now) {
  std::vector<std::pair<int, Connection>> connections;
  std::vector<Bytes> posted;
  std::vector<Verdict> misfits;
  bool depart = false;
  {
    const std::lock_guard lock(mutex_);
    // Without a connection a message waits for it.
    if (options_.rank == 0 || connections_[0].is_open() || !new_connections_.empty()) posted.swap(posted_);
    connections.swap(new_connections_);
    misfits.swap(misfits_);
    depart = bye_wanted_ && state_ == State::working;
  }
  for (auto& [rank, connection] : connections) add(rank, std::move(connection), now);
  for (const Bytes& one : posted) {
    if (options_.rank == 0) {
      take_as_first(0, one, now);
    } else {
      send(0, one);
    }
  }
  if (!misfits.empty() && state_ == State::working) decide(misfits.front(), now);
  if (!depart || state_ != State::working) return;
  send_all(message(Kind::bye).bytes());
  if (options_.rank != 0) connections_[0].finish();
  state_until_ = now + departing_time;
  enter(State::departing);
}

void Control::add(int rank, Connection connection, Deadline now) {
  const auto row = static_cast<std::size_t>(rank);
  if (row >= connections_.size() || connections_[row].is_open()) return;
  epoll_event event{};
  event.events      = EPOLLIN;
  event.data.u64    = static_cast<std::uint64_t>(rank);
  connections_[row] = std::move(connection);
  static_cast<void>(::epoll_ctl(events_.get(), EPOLL_CTL_ADD, connections_[row].descriptor(), &event));
  table_[row].joined = true;
  table_[row].heard = table_[row].advanced = now;
  if (options_.rank == 0 && state_ != State::working && state_ != State::departing) {  // too late
    send(rank, verdict_message(*verdict()));
    send(rank, message(Kind::leave).bytes());
    connections_[row].finish();
  }
  handle(rank, EPOLLIN, now);  // bytes that have arrived with the last message of the handshake
}

void Control::handle(int rank, unsigned events, Deadline now) {
  Connection& connection = connections_[static_cast<std::size_t>(rank)];
  if (!connection.is_open()) return;
  bool open = true;
  try {
    if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) {
      open = connection.fill();
      while (connection.is_open()) {
        const std::optional<Bytes> frame = connection.next();
        if (!frame) break;
        take(rank, *frame, now);
      }
    }
    if (!connection.is_open()) return;
    if ((events & EPOLLOUT) != 0) open = connection.flush() && open;
  } catch (const Error&) {  // not our protocol
    open = false;
  }
  if (!open) return closed(rank, now);
  epoll_event event{};
  event.events   = EPOLLIN | (connection.has_output() ? unsigned{EPOLLOUT} : 0U);
  event.data.u64 = static_cast<std::uint64_t>(rank);
  ::epoll_ctl(events_.get(), EPOLL_CTL_MOD, connection.descriptor(), &event);
}

void Control::send(int rank, const Bytes& sent) {
  Connection& connection = connections_[static_cast<std::size_t>(rank)];
  if (!connection.is_open()) return;
  connection.queue(sent);
  static_cast<void>(connection.flush());  // a broken one is reported as an event
  if (!connection.has_output()) return;
  epoll_event event{};
  event.events   = EPOLLIN | EPOLLOUT;
  event.data.u64 = static_cast<std::uint64_t>(rank);
  ::epoll_ctl(events_.get(), EPOLL_CTL_MOD, connection.descriptor(), &event);
}

void Control::send_all(const Bytes& sent, int except) {
  for (std::size_t rank = 0; rank < connections_.size(); ++rank)
    if (static_cast<int>(rank) != except || options_.rank != 0) send(static_cast<int>(rank), sent);
}

void Control::take(int rank, const Bytes& frame, Deadline now) {
  if (options_.rank == 0) {
    take_as_first(rank, frame, now);
  } else {
    take_as_other(frame, now);
  }
}

void Control::take_as_first(int rank, const Bytes& frame, Deadline now) {
  MessageReader from(frame);
  ProcessRecord& row = table_[static_cast<std::size_t>(rank)];
  row.heard          = now;
  switch (static_cast<Kind>(from.number<std::uint8_t>())) {
    case Kind::beat: {
      Progress next = read_progress(from);
      if (next.phase != Phase::run || next.run != row.progress.run || next.nodes_done != row.progress.nodes_done ||
          row.progress.phase != Phase::run)
        row.advanced = now;
      row.progress = std::move(next);
      break;
    }
    case Kind::failed:
      if (!row.failed.empty()) break;
      row.failed_by   = from.number<int>();
      row.failed      = from.text();
      row.failed_turn = ++num_failures_;
      judge_due_      = true;
      break;
    case Kind::written:
      written_[static_cast<std::size_t>(rank)] = true;
      break;
    case Kind::note:
      send_all(frame, rank);
      if (const int teller = from.number<int>(); rank != 0 && options_.on_note)
        call_safely([&] { options_.on_note(teller, from.text()); });
      break;
    case Kind::bye:
      row.left = true;
      connections_[static_cast<std::size_t>(rank)].close();  // nothing follows
      break;
    default:  // a suspicion needs no action: if it is right, the rules find the rank
      break;
  }
}

void Control::take_as_other(const Bytes& frame, Deadline now) {
  MessageReader from(frame);
  table_[0].heard = now;
  switch (static_cast<Kind>(from.number<std::uint8_t>())) {
    case Kind::beat:
      table_[0].progress = read_progress(from);
      break;
    case Kind::verdict:
      if (state_ == State::working || state_ == State::departing) decide(read_verdict(from), now);
      break;
    case Kind::leave:
      if (state_ != State::leaving) break;
      connections_[0].close();
      enter(State::left);
      break;
    case Kind::note:
      if (const int teller = from.number<int>(); options_.on_note)
        call_safely([&] { options_.on_note(teller, from.text()); });
      break;
    case Kind::bye:
      table_[0].left = true;
      break;
    default:
      break;
  }
}

void Control::closed(int rank, Deadline now) {
  connections_[static_cast<std::size_t>(rank)].close();
  table_[static_cast<std::size_t>(rank)].closed = true;
  judge_due_                                    = true;
  if (options_.rank == 0 && state_ == State::working && now < stopped_until_) {
    const std::string text = str("it did not run for ", stopped_for_.count(), " ms");
    return decide(verdict_on(VerdictKind::silent, 0, table_, text), now);
  }
  if (options_.rank == 0) {  // the rules find it
    const std::lock_guard lock(mutex_);
    clean_ = clean_ && state_ != State::departing;
    return;
  }
  if (state_ == State::working && !table_[0].left) decide(verdict_on(VerdictKind::gone, 0, table_), now);
  if (state_ == State::leaving || state_ == State::departing) enter(State::left);
}

void Control::beat(Deadline now) {
  next_beat_        = now + interval_;
  judge_due_        = true;
  Progress progress = progress_now();
  MessageWriter to  = message(Kind::beat);
  if (options_.rank != 0) {
    write(to, progress);
    return send(0, to.bytes());
  }
  Progress brief = progress;  // to the others: what they need to name the last node of rank 0
  brief.waits.clear();
  write(to, brief);
  MessageWriter own = message(Kind::beat);
  write(own, progress);
  take_as_first(0, own.bytes(), now);
  for (std::size_t rank = 1; rank < connections_.size(); ++rank)  // none to a process that does not read them
    if (connections_[rank].is_open() && !connections_[rank].has_output()) send(static_cast<int>(rank), to.bytes());
}

Progress Control::progress_now() const {
  Progress progress;
  if (options_.progress) call_safely([&] { progress = options_.progress(); });
  return progress;
}

void Control::judge_all(Deadline now) {
  if (now < judge_from_ || !judge_due_) return;
  judge_due_ = false;
  if (options_.rank != 0) {
    if (connections_[0].is_open() && !table_[0].left && now - table_[0].heard >= options_.timeout)
      decide(verdict_on(VerdictKind::silent, 0, table_, str("for ", options_.timeout.count(), " ms")), now);
    return;
  }
  if (std::optional<Verdict> found = judge(table_, now, options_.timeout)) return decide(*std::move(found), now);
  if (now < join_until_) return;
  std::vector<std::size_t> missing;
  for (std::size_t rank = 0; rank < table_.size(); ++rank)
    if (!table_[rank].joined) missing.push_back(rank);
  if (missing.empty()) {
    join_until_ = Deadline::max();
    return;
  }
  std::string text = str("within ", options_.timeout.count(), " ms");
  if (missing.size() > 1)
    text += str("; missing: ", join_text(missing, ", ", [](std::size_t rank) { return str(rank); }));
  decide(verdict_on(VerdictKind::missing, static_cast<int>(missing.front()), table_, text), now);
}

// The others are told first. Then this process writes what it knows. Then its main thread is woken up.
void Control::decide(Verdict verdict, Deadline now) {
  if (options_.rank == 0) send_all(verdict_message(verdict));
  const std::string line = line_of(verdict, options_.rank, progress_now());
  {
    const std::lock_guard lock(mutex_);
    verdict_ = verdict;
    line_    = line;
  }
  if (options_.on_verdict) {
    // It writes to a terminal and to files, which can block.
    std::optional<Watchdog> watchdog;
    if (options_.on_overdue) {
      call_safely([&] { watchdog.emplace("the report", options_.unwind_time, [this] { call_overdue(); }); });
    }
    call_safely([&] { options_.on_verdict(verdict, line); });
  }
  interrupt_.raise(line);
  changed_.notify_all();
  overdue_at_  = now + options_.unwind_time;
  state_until_ = Clock::now() + options_.leaving_time;
  enter(State::leaving);
  written_[0] = true;
  if (options_.rank == 0) return;
  send(0, message(Kind::written).bytes());
  if (!connections_[0].is_open()) enter(State::left);  // process 0 is gone, and cannot say when all have
}

bool Control::all_written() const {
  for (std::size_t rank = 0; rank < written_.size(); ++rank)
    if (!written_[rank] && connections_[rank].is_open()) return false;
  return true;
}

bool Control::all_closed() const {
  return std::none_of(connections_.begin(), connections_.end(), [](const Connection& one) { return one.is_open(); });
}

void Control::continue_leaving(Deadline now) {
  const bool late = now >= state_until_;
  if (state_ == State::leaving && options_.rank == 0 && (late || all_written())) {
    send_all(message(Kind::leave).bytes());
    for (Connection& connection : connections_)
      if (connection.is_open()) connection.finish();
    state_until_ = now + options_.leaving_time;
    return enter(all_closed() ? State::left : State::draining);
  }
  if (state_ == State::draining && (late || all_closed())) enter(State::left);
  if (state_ == State::leaving && options_.rank != 0 && late) {
    connections_[0].close();
    enter(State::left);
  }
  if (state_ == State::departing && (late || all_closed())) {
    if (late) {
      const std::lock_guard lock(mutex_);
      clean_ = false;
    }
    for (Connection& connection : connections_) connection.close();
    enter(State::left);
  }
}

void Control::enter(State state) {
  state_ = state;
  if (state == State::left) state_until_ = Deadline::max();
  const std::lock_guard lock(mutex_);
  shown_state_ = state;
  changed_.notify_all();
}

}  // namespace stepgraph
