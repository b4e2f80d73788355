#pragma once
#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "backends/process/control.hpp"
#include "backends/process/environment.hpp"
#include "backends/process/peers.hpp"
#include "backends/process/rendezvous.hpp"

namespace stepgraph {

struct JobOptions {
  std::string version                    = {};                        // of the program: the same in all processes
  ControlOptions control                 = {};                        // without rank and size
  std::chrono::milliseconds peer_silence = std::chrono::minutes(30);  // of SocketPeersOptions
};

// The processes of a job without their data plane: store, control and peers. The constructor is collective. It returns
// when all processes have joined. Within the time-out of `control` it throws, in every process, if one is missing or
// does not fit. A process world (MPI, Gloo) is built on it.
class Job {
 public:
  Job(const ProcessPlace& place, JobOptions options);
  ~Job();  // without close(), and without a verdict: reports a failure of this process

  [[nodiscard]] int rank() const noexcept { return place_.rank; }
  [[nodiscard]] int size() const noexcept { return place_.size; }
  [[nodiscard]] const ProcessPlace& place() const noexcept { return place_; }
  [[nodiscard]] int port() const noexcept;  // where process 0 listens; in the others 0
  // The address at which other processes of the job reach this one.
  [[nodiscard]] std::string own_address() const;
  [[nodiscard]] Store& store() noexcept;
  [[nodiscard]] SocketPeers& peers() noexcept { return *peers_; }
  [[nodiscard]] const SocketPeers& peers() const noexcept { return *peers_; }
  [[nodiscard]] Control& control() noexcept { return *control_; }

  // A random text, different for each job and equal in its processes.
  [[nodiscard]] const std::string& id() const noexcept { return id_; }

  // The normal end: collective. False: the job has failed before.
  bool close();

 private:
  void meet(const JobOptions& options);
  void listen(const JobOptions& options, const Digest& key);

  const ProcessPlace place_;
  bool closed_ = false;
  std::string id_;
  std::unique_ptr<Control> control_;
  std::unique_ptr<SocketPeers> peers_;
  std::unique_ptr<RemoteStore> remote_;     // process 0 has none
  std::unique_ptr<Rendezvous> rendezvous_;  // only process 0; ends first, for it uses the others
};

}  // namespace stepgraph
