#include "backends/process/socket.hpp"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <thread>

#include "engine/base/error.hpp"
#include "tests/backends/process/processes.hpp"

namespace sg = stepgraph;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using sg::testing::brief;
using sg::testing::connected_pair;
using sg::testing::error_of;
using sg::testing::patient;

TEST_CASE("frames arrive as they were sent, of all sizes", "[backends][process]") {
  auto [a, b] = connected_pair();
  std::vector<sg::Bytes> sent;
  for (const std::size_t size : {0, 1, 3, 4, 5, 1000, 65536, 300'000, 9'000'000})
    sent.emplace_back(size, static_cast<std::byte>(size % 251));
  std::vector<sg::Bytes> received;
  std::thread reader([&received, &sent, to = &b] {
    for (std::size_t i = 0; i < sent.size(); ++i) received.push_back(to->receive(patient()));
  });
  const std::string error = error_of([&, from = &a] {
    for (const sg::Bytes& frame : sent) from->send(frame, patient());
  });
  reader.join();
  CHECK(error.empty());
  CHECK(received == sent);
}

TEST_CASE("frames that arrive together are taken one by one, and after the peer has closed", "[backends][process]") {
  auto [a, b] = connected_pair();
  a.queue(sg::to_bytes("one"));
  a.queue(sg::to_bytes("two"));
  CHECK(a.flush());
  a.close();
  CHECK(sg::to_text(b.receive(patient())) == "one");
  CHECK(sg::to_text(b.receive(patient())) == "two");
  CHECK_THAT(error_of([&, to = &b] { static_cast<void>(to->receive(patient())); }), ContainsSubstring("closed"));
}

TEST_CASE("a frame above the limit is refused before its bytes are there", "[backends][process]") {
  auto [a, b] = connected_pair();
  sg::Connection stranger(sg::Descriptor(::dup(b.descriptor())), "stranger");
  a.queue(sg::Bytes(sg::Connection::limit_of_strangers));
  CHECK(a.flush());
  CHECK(stranger.receive(patient()).size() == sg::Connection::limit_of_strangers);
  const std::byte header[] = {std::byte{1}, std::byte{0}, std::byte{1}, std::byte{0}};  // 64 KiB + 1
  REQUIRE(::write(a.descriptor(), header, sizeof header) == sizeof header);
  CHECK_THAT(error_of([&] { static_cast<void>(stranger.receive(patient())); }),
             ContainsSubstring("a frame of 65537 bytes (at most 65536)"));
}

TEST_CASE("waits end at their deadline and by an interrupt", "[backends][process]") {
  auto [a, b] = connected_pair();
  CHECK_THAT(error_of([&, to = &b] { static_cast<void>(to->receive(brief(20ms))); }), ContainsSubstring("in time"));
  const sg::Bytes large(30 << 20);  // more than the system buffers
  CHECK_THAT(error_of([&, from = &a] { from->send(large, brief(20ms)); }), ContainsSubstring("in time"));

  auto [c, d] = connected_pair();
  sg::Interrupt interrupt;
  std::thread other([&] { interrupt.raise("rank 2 is gone"); });
  CHECK_THAT(error_of([&, to = &d] { static_cast<void>(to->receive(patient(&interrupt))); }),
             ContainsSubstring("rank 2 is gone"));
  other.join();
  interrupt.raise("another reason");
  CHECK(interrupt.why() == "rank 2 is gone");
  CHECK_FALSE(sg::sleep_until(sg::Clock::now() + 30s, &interrupt));
  CHECK(sg::sleep_until(sg::Clock::now() + 1ms, nullptr));
}

TEST_CASE("a sender that cannot go on notices that its peer sends as well", "[backends][process]") {
  auto [a, b] = connected_pair();
  b.queue(sg::to_bytes("no"));
  CHECK(b.flush());
  CHECK(a.send_unless_input(sg::to_bytes("small"), patient()));  // fits into the buffer
  CHECK_FALSE(a.send_unless_input(sg::Bytes(30 << 20), patient()));
  CHECK(sg::to_text(a.receive(patient())) == "no");
}

TEST_CASE("a send to a closed peer is an error and not a signal", "[backends][process]") {
  auto [a, b] = connected_pair();
  b.close();
  CHECK_THAT(error_of([&, from = &a] { from->send(sg::to_bytes("x"), patient()); }), ContainsSubstring("closed"));
}

TEST_CASE("sockets do not block and are closed on exec", "[backends][process]") {
  const sg::Descriptor listener = sg::listen_on({.address = "127.0.0.1", .loopback_only = true});
  std::string problem;
  const sg::Descriptor client = sg::connect_to("127.0.0.1", sg::port_of(listener.get()), true, patient(), problem);
  REQUIRE(client.is_open());
  CHECK(sg::is_loopback_peer(client.get()));
  for (const int socket : {listener.get(), client.get()}) {
    CHECK((::fcntl(socket, F_GETFD) & FD_CLOEXEC) != 0);
    CHECK((::fcntl(socket, F_GETFL) & O_NONBLOCK) != 0);
  }
}

TEST_CASE("a taken port is an error, or the next one is used", "[backends][process]") {
  const sg::Descriptor first = sg::listen_on({.address = "127.0.0.1"});
  const int port             = sg::port_of(first.get());
  CHECK_THAT(error_of([&] { static_cast<void>(sg::listen_on({.address = "127.0.0.1", .port = port})); }),
             ContainsSubstring("port " + std::to_string(port)) && ContainsSubstring("STEPGRAPH_PORT"));
  try {
    const sg::Descriptor second = sg::listen_on({.address = "127.0.0.1", .port = port, .next_too = true});
    CHECK(sg::port_of(second.get()) == port + 1);
  } catch (const sg::Error& error) {  // another program has it
    CHECK_THAT(error.what(), ContainsSubstring("and the next"));
  }
}

TEST_CASE("without a secret only loopback addresses are allowed", "[backends][process]") {
  const std::string address = "192.0.2.1";  // for documentation only: nobody has it
  CHECK_THAT(error_of([&] { static_cast<void>(sg::listen_on({.address = address, .loopback_only = true})); }),
             ContainsSubstring("192.0.2.1") && ContainsSubstring("STEPGRAPH_SECRET"));
  std::string problem;
  CHECK_THAT(error_of([&] { static_cast<void>(sg::connect_to(address, 1, true, patient(), problem)); }),
             ContainsSubstring("192.0.2.1") && ContainsSubstring("STEPGRAPH_SECRET"));
}

TEST_CASE("an inherited listening socket is used, and another file is refused", "[backends][process]") {
  sg::Descriptor listener      = sg::listen_on({.address = "127.0.0.1"});
  const int port               = sg::port_of(listener.get());
  const sg::Descriptor adopted = sg::adopt_listener(listener.release());
  CHECK(sg::port_of(adopted.get()) == port);
  const auto [a, b] = connected_pair();
  CHECK_THAT(error_of([number = a.descriptor()] { static_cast<void>(sg::adopt_listener(number)); }),
             ContainsSubstring("STEPGRAPH_LISTEN_FD"));
}
