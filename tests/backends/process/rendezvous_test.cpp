#include "backends/process/rendezvous.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <memory>
#include <random>
#include <thread>

#include "engine/base/error.hpp"
#include "tests/backends/process/processes.hpp"

namespace sg = stepgraph;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using sg::testing::brief;
using sg::testing::error_of;
using sg::testing::eventually;
using sg::testing::patient;

namespace {

const sg::Digest key = sg::job_key("the secret", "");

// A rendezvous on a free port of this machine.
struct Meeting {
  explicit Meeting(int size, sg::RendezvousOptions options = {}) {
    options.size    = size;
    options.version = "1.0";
    options.key     = key;
    server          = std::make_unique<sg::Rendezvous>(sg::listen_on({.address = "127.0.0.1"}), std::move(options));
  }

  [[nodiscard]] sg::MeetingPoint point() const { return {"127.0.0.1", server->port(), false, key, true}; }
  [[nodiscard]] sg::Claim claim(int rank) const { return {sg::Purpose::store, rank, 3, "1.0"}; }
  [[nodiscard]] sg::RemoteStore store(int rank) const {
    return sg::RemoteStore(sg::join(point(), claim(rank), patient()));
  }

  // A connection of a program that is not part of the job.
  [[nodiscard]] sg::Descriptor stranger() const {
    std::string problem;
    return sg::connect_to("127.0.0.1", server->port(), true, patient(), problem);
  }

  // The rendezvous serves rank 0 and rank 2.
  void check_works() const {
    sg::RemoteStore two = store(2);
    two.set("from 2", sg::to_bytes("two"), patient());
    CHECK(sg::to_text(server->get("from 2", patient())) == "two");
  }

  std::unique_ptr<sg::Rendezvous> server;
};

void write_all(const sg::Descriptor& socket, std::string_view text) {
  static_cast<void>(!::send(socket.get(), text.data(), text.size(), MSG_NOSIGNAL));
}

// Whether the other end closes the connection.
bool is_closed_by_peer(const sg::Descriptor& socket) {
  for (;;) {
    if (sg::wait_for(socket.get(), POLLIN, patient()) <= 0) return false;
    char bytes[4096];
    if (::recv(socket.get(), bytes, sizeof bytes, 0) <= 0) return true;
  }
}

// The error of a join that cannot succeed. It is tried for 150 ms, which is enough unless this machine is busy, and
// then for longer, until the error has the text.
std::string refusal(const sg::MeetingPoint& point, const sg::Claim& claim, const std::string& text) {
  std::string error;
  for (const auto time : {150ms, 1000ms, 8000ms}) {
    error = error_of([&] { static_cast<void>(sg::join(point, claim, brief(time))); });
    if (error.find(text) != std::string::npos) break;
  }
  return error;
}

std::string frame(const sg::Bytes& bytes) {
  std::string text;
  for (int i = 0; i < 4; ++i) text += static_cast<char>(bytes.size() >> (8 * i));
  return text + sg::to_text(bytes);
}

}  // namespace

TEST_CASE("all processes share the values of the store", "[backends][process]") {
  const Meeting meeting(3);
  sg::RemoteStore one = meeting.store(1), two = meeting.store(2);
  one.set("a", sg::to_bytes("x"), patient());
  CHECK(sg::to_text(two.get("a", patient())) == "x");
  CHECK(sg::to_text(meeting.server->get("a", patient())) == "x");
  meeting.server->set("a", sg::to_bytes("y"), patient());
  CHECK(sg::to_text(one.get("a", patient())) == "y");
  CHECK(one.add("n", 2, patient()) == 2);
  CHECK(two.add("n", 40, patient()) == 42);
  CHECK(meeting.server->add("n", -43, patient()) == -1);
  const sg::Bytes large(5 << 20, std::byte{7});
  one.set("large", large, patient());
  CHECK(two.get("large", patient()) == large);
}

TEST_CASE("get waits until the key is set", "[backends][process]") {
  const Meeting meeting(3);
  std::string from_one, from_two, from_zero;
  std::thread first([&] { from_zero = sg::to_text(meeting.server->get("key of 1", patient())); });
  std::thread second([&] {
    sg::RemoteStore two = meeting.store(2);
    from_one            = sg::to_text(two.get("key of 1", patient()));
    from_two            = sg::to_text(two.get("key of 0", patient()));
  });
  sg::RemoteStore one = meeting.store(1);
  one.set("key of 1", sg::to_bytes("1"), patient());
  meeting.server->set("key of 0", sg::to_bytes("0"), patient());
  first.join();
  second.join();
  CHECK(from_zero == "1");
  CHECK(from_one == "1");
  CHECK(from_two == "0");
}

TEST_CASE("a wait for a key ends at its deadline or by an interrupt, and the store works on", "[backends][process]") {
  const Meeting meeting(3);
  sg::RemoteStore one = meeting.store(1);
  for (sg::Store* store : {static_cast<sg::Store*>(&one), static_cast<sg::Store*>(meeting.server.get())}) {
    CHECK_THAT(error_of([&] { static_cast<void>(store->get("never", brief(30ms))); }), ContainsSubstring("'never'"));
    sg::Interrupt interrupt;
    std::thread other([&] { interrupt.raise("rank 2 is gone"); });
    CHECK_THAT(error_of([&] { static_cast<void>(store->get("never", patient(&interrupt))); }),
               ContainsSubstring("rank 2 is gone"));
    other.join();
  }
  meeting.server->set("never", sg::to_bytes("now"), patient());  // late answers to the waits above are skipped
  meeting.server->set("next", sg::to_bytes("right"), patient());
  CHECK(sg::to_text(one.get("next", patient())) == "right");
}

TEST_CASE("threads of a process take turns at the store", "[backends][process]") {
  const Meeting meeting(3);
  sg::RemoteStore one = meeting.store(1);
  const auto errors   = sg::testing::run_processes(4, [&](int thread) {
    for (int i = 0; i < 50; ++i) one.add(thread % 2 == 0 ? "even" : "odd", 1, patient());
  });
  CHECK(errors == std::vector<std::string>(4));
  CHECK(one.add("even", 0, patient()) == 100);
  CHECK(one.add("odd", 0, patient()) == 100);
}

TEST_CASE("garbage at the rendezvous changes nothing", "[backends][process]") {
  const Meeting meeting(3);
  sg::RemoteStore one    = meeting.store(1);
  const std::string head = frame(sg::hello_message(sg::ProofSide::client, sg::random_nonce()));
  std::mt19937 random(7);
  std::string noise(100'000, ' ');
  for (char& byte : noise) byte = static_cast<char>(random());
  const std::vector<std::string> texts = {
      "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
      std::string(10, '\0'),
      "\xff\xff\xff\xff",
      noise,
      frame(sg::hello_message(sg::ProofSide::server, sg::random_nonce())),
      frame(sg::to_bytes("")),
      head.substr(0, 20) + "x",
      head + frame(sg::to_bytes("short")),
      head + frame(sg::Bytes(60'000)),
      head + head,
  };
  std::vector<sg::Descriptor> open;
  for (const std::string& text : texts) {
    open.push_back(meeting.stranger());
    write_all(open.back(), text);
  }
  one.set("a", sg::to_bytes("x"), patient());
  CHECK(sg::to_text(meeting.server->get("a", patient())) == "x");
  meeting.check_works();
}

TEST_CASE("200 strangers that say nothing keep no process out", "[backends][process]") {
  const Meeting meeting(3);
  std::vector<sg::Descriptor> strangers;
  for (int i = 0; i < 200; ++i) {
    strangers.push_back(meeting.stranger());
    if (i % 3 == 0) write_all(strangers.back(), "\x40");  // the beginning of a frame
  }
  meeting.check_works();
  CHECK(meeting.server->num_strangers() <= 64);
  CHECK(is_closed_by_peer(strangers.front()));  // the oldest has made room
}

TEST_CASE("strangers that say nothing make room before one that has begun the handshake", "[backends][process]") {
  const Meeting meeting(3, {.time_of_strangers = 30s});
  const sg::Descriptor early = meeting.stranger();
  write_all(early, frame(sg::hello_message(sg::ProofSide::client, sg::random_nonce())));
  std::vector<char> bytes(4096);
  REQUIRE(sg::wait_for(early.get(), POLLIN, patient()) > 0);
  REQUIRE(::recv(early.get(), bytes.data(), bytes.size(), 0) > 0);  // the hello of the other side
  std::vector<sg::Descriptor> strangers;
  for (int i = 0; i < 200; ++i) strangers.push_back(meeting.stranger());
  CHECK(is_closed_by_peer(strangers.front()));
  write_all(early, frame(sg::Bytes(100)));  // a claim without a proof gets an answer
  REQUIRE(sg::wait_for(early.get(), POLLIN, patient()) > 0);
  CHECK(::recv(early.get(), bytes.data(), bytes.size(), 0) > 0);
}

TEST_CASE("a slow stranger is closed when its time is over, whatever it sends", "[backends][process]") {
  const Meeting meeting(3, {.time_of_strangers = 50ms});
  const sg::Descriptor silent = meeting.stranger();
  const sg::Descriptor slow   = meeting.stranger();
  std::atomic<bool> over      = false;
  std::thread writer([&] {
    const std::string hello = frame(sg::hello_message(sg::ProofSide::client, sg::random_nonce()));
    for (std::size_t i = 0; i < hello.size() && !over; ++i) {
      write_all(slow, hello.substr(i, 1));
      std::this_thread::sleep_for(5ms);
    }
  });
  meeting.check_works();
  CHECK(is_closed_by_peer(silent));
  CHECK(is_closed_by_peer(slow));
  over = true;
  writer.join();
  CHECK(eventually([&] { return meeting.server->num_strangers() == 0; }));
  meeting.check_works();
}

TEST_CASE("a process with another secret is not admitted", "[backends][process]") {
  const Meeting meeting(3);
  sg::MeetingPoint other = meeting.point();
  for (const sg::Digest& wrong :
       {sg::job_key("another secret", ""), sg::job_key("the secret", "another job"), sg::Digest{}}) {
    other.key              = wrong;
    const std::string text = "another secret, or another job";
    CHECK_THAT(refusal(other, meeting.claim(1), text), ContainsSubstring(text));
    // Not even one that would end the job.
    CHECK_THAT(refusal(other, {sg::Purpose::store, 1, 99, "2.0"}, text), ContainsSubstring(text));
  }
  meeting.check_works();
}

TEST_CASE("a claim that was overheard is of no use", "[backends][process]") {
  const Meeting meeting(3);
  const auto begin = [&](sg::Handshake& handshake) {
    sg::Connection connection(meeting.stranger(), "server");
    handshake.client = sg::random_nonce();
    connection.send(sg::hello_message(sg::ProofSide::client, handshake.client), patient());
    handshake.server = sg::read_hello(sg::ProofSide::server, connection.receive(patient())).value();
    return connection;
  };
  sg::Handshake first{.key = key}, second{.key = key};
  sg::Connection honest = begin(first);
  const sg::Bytes claim = first.message(meeting.claim(1));
  sg::Connection thief  = begin(second);
  thief.send(claim, patient());
  CHECK_FALSE(second.read_answer(thief.receive(patient())).has_value());
  CHECK_THAT(error_of([&] { static_cast<void>(thief.receive(patient())); }), ContainsSubstring("closed"));
  honest.send(claim, patient());
  CHECK(first.read_answer(honest.receive(patient())).value().kind == sg::Answer::Kind::admitted);
}

TEST_CASE("a second process of the same rank is refused and changes nothing", "[backends][process]") {
  const Meeting meeting(3);
  {
    sg::RemoteStore one    = meeting.store(1);
    const std::string text = "there is a rank 1 already";
    CHECK_THAT(refusal(meeting.point(), meeting.claim(1), text), ContainsSubstring(text));
    one.set("a", sg::to_bytes("x"), patient());
    CHECK(sg::to_text(one.get("a", patient())) == "x");
  }
  static_cast<void>(meeting.store(1));  // the first has left
  const std::string text = "no connections for control";
  CHECK_THAT(refusal(meeting.point(), {sg::Purpose::control, 1, 3, "1.0"}, text), ContainsSubstring(text));
}

TEST_CASE("a process with the secret and another size, version or rank ends the job for all", "[backends][process]") {
  struct Case {
    sg::Claim claim;
    std::string text;
  };
  const std::vector<Case> cases = {
      {{sg::Purpose::control, 1, 4, "1.0"}, "world size: rank 1 has 4, rank 0 has 3"},
      {{sg::Purpose::store, 1, 3, "1.1"}, "program version: rank 1 has '1.1', rank 0 has '1.0'"},
      {{sg::Purpose::store, 3, 3, "1.0"}, "rank 3 (1 to 2)"},
      {{sg::Purpose::store, 0, 3, "1.0"}, "rank 0 (1 to 2)"},
  };
  for (const Case& one : cases) {
    CAPTURE(one.text);
    std::atomic<int> num_misfits = 0;
    const Meeting meeting(3, {.on_misfit = [&](int, const std::string&) { ++num_misfits; }});
    sg::RemoteStore two = meeting.store(2);
    std::string waiting_there, waiting_here;
    std::thread there([&] { waiting_there = error_of([&] { static_cast<void>(two.get("never", patient())); }); });
    std::thread here(
        [&] { waiting_here = error_of([&] { static_cast<void>(meeting.server->get("never", patient())); }); });
    bool config = false;
    try {
      static_cast<void>(sg::join(meeting.point(), one.claim, patient()));
    } catch (const sg::Error& error) {
      config = error.kind() == sg::ErrorKind::config;
      CHECK_THAT(error.what(), ContainsSubstring(one.text));
    }
    there.join();
    here.join();
    CHECK(config);
    CHECK(num_misfits == 1);
    CHECK_THAT(waiting_there, ContainsSubstring(one.text));
    CHECK_THAT(waiting_here, ContainsSubstring(one.text));
    CHECK_THAT(error_of([&] { two.set("a", {}, patient()); }), ContainsSubstring(one.text));
    CHECK_THAT(error_of([&] { static_cast<void>(meeting.store(1)); }), ContainsSubstring(one.text));  // a late one
  }
}

TEST_CASE("a process that does not fit and comes after all others is refused and changes nothing",
          "[backends][process]") {
  std::atomic<int> num_misfits = 0;
  const Meeting meeting(3, {.on_misfit = [&](int, const std::string&) { ++num_misfits; }});
  sg::RemoteStore one = meeting.store(1), two = meeting.store(2);
  for (const sg::Claim& claim : {sg::Claim{sg::Purpose::store, 1, 4, "1.0"}, sg::Claim{sg::Purpose::store, 1, 3, "1.1"},
                                 sg::Claim{sg::Purpose::store, 3, 3, "1.0"}}) {
    const std::string text = "all ranks have joined already";
    CHECK_THAT(refusal(meeting.point(), claim, text), ContainsSubstring(text));
  }
  CHECK(num_misfits == 0);
  one.set("a", sg::to_bytes("still here"), patient());
  CHECK(sg::to_text(two.get("a", patient())) == "still here");
}

TEST_CASE("connections for other purposes are handed over with their first bytes", "[backends][process]") {
  std::mutex mutex;
  std::map<int, sg::Connection> control;
  const Meeting meeting(3, {.control = [&](int rank, sg::Connection one) {
                          const std::lock_guard lock(mutex);
                          control.emplace(rank, std::move(one));
                        }});
  sg::Connection mine = sg::join(meeting.point(), {sg::Purpose::control, 2, 3, "1.0"}, patient());
  mine.send(sg::to_bytes("first"), patient());
  REQUIRE(eventually([&] {
    const std::lock_guard lock(mutex);
    return control.contains(2);
  }));
  sg::Connection& theirs = control.at(2);
  CHECK(theirs.peer() == "rank 2");
  CHECK(sg::to_text(theirs.receive(patient())) == "first");
  theirs.send(sg::to_bytes("second"), patient());
  CHECK(sg::to_text(mine.receive(patient())) == "second");
}

TEST_CASE("an address without an answer is an error that says so", "[backends][process]") {
  int port = 0;
  {
    const sg::Descriptor free = sg::listen_on({.address = "127.0.0.1"});
    port                      = sg::port_of(free.get());
  }
  const std::string error = error_of([&] {
    static_cast<void>(sg::join({"127.0.0.1", port, false, key, true}, {sg::Purpose::store, 1, 2, "1.0"}, brief(150ms)));
  });
  CHECK_THAT(error, ContainsSubstring("127.0.0.1, port " + std::to_string(port)));
  CHECK_THAT(error, ContainsSubstring("rank 1 has not reached rank 0"));
}

TEST_CASE("processes wait for a rendezvous that begins later", "[backends][process]") {
  sg::Descriptor listener = sg::listen_on({.address = "127.0.0.1"});
  const int port          = sg::port_of(listener.get());
  listener                = sg::Descriptor();
  std::string error;
  std::thread client([&] {
    error = error_of([&] {
      static_cast<void>(sg::join({"127.0.0.1", port, false, key, true}, {sg::Purpose::store, 1, 2, "1.0"}, patient()));
    });
  });
  std::this_thread::sleep_for(100ms);
  std::string mine;
  {
    std::unique_ptr<sg::Rendezvous> server;
    mine = error_of([&] {
      server = std::make_unique<sg::Rendezvous>(sg::listen_on({.address = "127.0.0.1", .port = port}),
                                                sg::RendezvousOptions{.size = 2, .version = "1.0", .key = key});
    });
    client.join();
  }
  CHECK(mine.empty());
  CHECK(error.empty());
}

TEST_CASE("the next port is tried where another program has the first one", "[backends][process]") {
  // A program that answers every connection with something else.
  sg::Descriptor other, listener;
  for (int attempt = 0; attempt < 20 && !listener.is_open(); ++attempt) {
    other          = sg::listen_on({.address = "127.0.0.1"});
    const int port = sg::port_of(other.get());
    static_cast<void>(
        error_of([&] { listener = sg::listen_on({.address = "127.0.0.1", .port = port, .next_too = true}); }));
  }
  REQUIRE(listener.is_open());
  const int port         = sg::port_of(other.get());
  std::atomic<bool> over = false;
  std::thread program([&] {
    while (!over) {
      if (sg::wait_for(other.get(), POLLIN, brief(10ms)) <= 0) continue;
      const sg::Descriptor client(::accept(other.get(), nullptr, nullptr));
      if (client.is_open()) write_all(client, std::string("\x04\0\0\0what", 8));
    }
  });
  const sg::Rendezvous server(std::move(listener), {.size = 2, .version = "1.0", .key = key});
  const std::string error = error_of([&] {
    static_cast<void>(sg::join({"127.0.0.1", port, true, key, true}, {sg::Purpose::store, 1, 2, "1.0"}, patient()));
  });
  over                    = true;
  program.join();
  CHECK(error.empty());
  CHECK(server.port() == port + 1);
}
