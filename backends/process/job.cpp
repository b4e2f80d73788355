#include "backends/process/job.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include "backends/process/secret.hpp"
#include "engine/base/error.hpp"

namespace stepgraph {

Job::Job(const ProcessPlace& place, JobOptions options) : place_(place) {
  options.control.rank = place_.rank;
  options.control.size = place_.size;
  control_             = std::make_unique<Control>(options.control);
  peers_               = std::make_unique<SocketPeers>(SocketPeersOptions{
                    .process       = place_.rank,
                    .num_processes = place_.size,
                    .silence       = options.peer_silence,
                    .interrupt     = &control_->interrupt(),
                    .explain = [this](int process, const std::string& problem) { return control_->suspect(process, problem); }});
  try {
    meet(options);
    peers_->barrier("all processes have joined");
    const std::string mine = place_.rank == 0 ? random_secret().substr(0, 16) : "";
    const Bytes id         = peers_->broadcast("the id of the job", to_bytes(mine));
    id_                    = to_text(id);
  } catch (const Error&) {
    // If another process is the cause, or is told about this one, the verdict has the better text.
    const std::optional<Verdict> verdict = control_->verdict();
    if (!verdict) throw;
    if (rendezvous_ && verdict->kind == VerdictKind::misfit)  // a process that starts a little later is told, too
      rendezvous_->wait_until_told(
          Clock::now() + std::min<std::chrono::milliseconds>(options.control.timeout, std::chrono::seconds(5)));
    throw Error(verdict->kind == VerdictKind::misfit ? ErrorKind::config : ErrorKind::backend, control_->line());
  }
}

Job::~Job() {
  if (!closed_) control_->fail("has left the job before its end");
}

void Job::meet(const JobOptions& options) {
  const Digest key = job_key(place_.secret, place_.job);
  if (place_.rank == 0) return listen(options, key);
  const MeetingPoint point{place_.address, place_.port, place_.next_port_too, key, place_.secret.empty()};
  Claim claim{Purpose::store, place_.rank, place_.size, options.version};
  const Patience patience{Clock::now() + options.control.timeout, &control_->interrupt()};
  remote_       = std::make_unique<RemoteStore>(join(point, claim, patience),
                                          [this](const std::string& problem) { return control_->suspect(0, problem); });
  claim.purpose = Purpose::control;
  control_->connect(0, join(point, claim, patience));
  claim.purpose = Purpose::peers;
  peers_->connect(0, join(point, claim, patience));
}

void Job::listen(const JobOptions& options, const Digest& key) {
  Descriptor listener;
  if (place_.size == 1 && place_.listen_fd >= 0) {  // not needed: closed
    const Descriptor inherited = adopt_listener(place_.listen_fd);
  }
  if (place_.size > 1) {
    listener = place_.listen_fd >= 0
                   ? adopt_listener(place_.listen_fd)
                   : listen_on({place_.address, place_.port, place_.next_port_too, place_.secret.empty()});
  }
  rendezvous_ = std::make_unique<Rendezvous>(
      std::move(listener),
      RendezvousOptions{.size          = place_.size,
                        .version       = options.version,
                        .key           = key,
                        .loopback_only = place_.secret.empty(),
                        .control       = [this](int rank, Connection one) { control_->connect(rank, std::move(one)); },
                        .peers         = [this](int rank, Connection one) { peers_->connect(rank, std::move(one)); },
                        .on_misfit     = [this](int rank, const std::string& why) { control_->misfit(rank, why); }});
}

int Job::port() const noexcept { return rendezvous_ ? rendezvous_->port() : 0; }

std::string Job::own_address() const {
  if (place_.size == 1 || place_.address.empty() || is_loopback_name(place_.address)) return "127.0.0.1";
  return rendezvous_ ? rendezvous_->own_address() : remote_->own_address();
}

Store& Job::store() noexcept {
  if (rendezvous_) return *rendezvous_;
  return *remote_;
}

bool Job::close() {
  peers_->barrier("all processes end");
  control_->bye();
  closed_ = true;
  return !control_->verdict();
}

}  // namespace stepgraph
