#include "backends/storage/requests.hpp"

#ifdef STEPGRAPH_WITH_URING
#include <liburing.h>

#include <cerrno>
#include <mutex>
#endif

namespace stepgraph {

#ifdef STEPGRAPH_WITH_URING
namespace {

class Ring final : public RequestRing {
 public:
  explicit Ring(int depth) : depth_(static_cast<std::size_t>(depth)) { make(); }
  Ring(const Ring&)            = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() override {
    if (good_) io_uring_queue_exit(&ring_);
  }
  [[nodiscard]] bool good() const { return good_; }

  std::optional<Failure> run(std::vector<Request>& requests) override {
    const std::lock_guard lock(mutex_);
    if (!good_) return run_with_threads(requests, 1);
    const std::vector<Request> given = requests;
    std::vector<std::size_t> again;  // requests of which a part is left
    std::optional<Failure> failure;
    std::size_t next = 0, in_flight = 0;
    const auto fail = [&](std::size_t i, int error) {
      if (failure) return;
      failure = Failure{.error  = error,
                        .writes = given[i].writes,
                        .offset = given[i].offset,
                        .size   = given[i].size,
                        .done   = given[i].size - requests[i].size};
    };
    for (;;) {
      while (!failure && in_flight < depth_ && (!again.empty() || next < requests.size())) {
        std::size_t i = next;
        if (again.empty()) {
          ++next;
        } else {
          i = again.back();
          again.pop_back();
        }
        enqueue(requests[i], i);
        ++in_flight;
      }
      if (in_flight == 0) return failure;
      const int submitted = io_uring_submit_and_wait(&ring_, 1);
      if (submitted < 0 && submitted != -EINTR && submitted != -EAGAIN && submitted != -EBUSY) {
        in_flight -= io_uring_sq_ready(&ring_);  // the kernel has not taken these
        drain(in_flight);
        io_uring_queue_exit(&ring_);
        make();
        // The ring has failed, not the file. Requests that the ring has done are done again.
        return failure ? failure : run_with_threads(requests, 1);
      }
      io_uring_cqe* done = nullptr;
      while (in_flight > 0 && io_uring_peek_cqe(&ring_, &done) == 0) {
        const auto i   = static_cast<std::size_t>(done->user_data);
        const int size = done->res;
        io_uring_cqe_seen(&ring_, done);
        --in_flight;
        Request& request = requests[i];
        if (size == -EINTR || size == -EAGAIN) {
          again.push_back(i);
        } else if (size <= 0) {
          fail(i, -size);
        } else {
          request.bytes += size;
          request.offset += size;
          request.size -= size;
          if (request.size > 0) again.push_back(i);
        }
      }
    }
  }

 private:
  // Kernels before 5.6 have rings, but not these requests.
  void make() {
    good_ = io_uring_queue_init(static_cast<unsigned>(depth_), &ring_, 0) == 0;
    if (!good_) return;
    io_uring_probe* const known = io_uring_get_probe_ring(&ring_);
    good_                       = known != nullptr && io_uring_opcode_supported(known, IORING_OP_READ) != 0 &&
            io_uring_opcode_supported(known, IORING_OP_WRITE) != 0;
    if (known != nullptr) io_uring_free_probe(known);
    if (!good_) io_uring_queue_exit(&ring_);
  }

  // The kernel uses the memory of requests until they have ended.
  void drain(std::size_t in_flight) {
    for (io_uring_cqe* done = nullptr; in_flight > 0;) {
      const int status = io_uring_wait_cqe(&ring_, &done);
      if (status == -EINTR || status == -EAGAIN) continue;
      if (status != 0) return;  // the ring has failed, and is given up
      io_uring_cqe_seen(&ring_, done);
      --in_flight;
    }
  }

  // There is room: no more than `depth_` requests are in flight.
  void enqueue(const Request& request, std::size_t i) {
    io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
    const auto size           = static_cast<unsigned>(request.size);
    const auto offset         = static_cast<std::uint64_t>(request.offset);
    if (request.writes) {
      io_uring_prep_write(entry, request.file, request.bytes, size, offset);
    } else {
      io_uring_prep_read(entry, request.file, request.bytes, size, offset);
    }
    entry->user_data = i;
  }

  std::size_t depth_;
  std::mutex mutex_;  // guards the ring
  io_uring ring_ = {};
  bool good_     = false;
};

}  // namespace

std::unique_ptr<RequestRing> make_ring(int depth) {
  auto ring = std::make_unique<Ring>(depth);
  return ring->good() ? std::move(ring) : nullptr;
}

#else

std::unique_ptr<RequestRing> make_ring(int) { return nullptr; }

#endif

}  // namespace stepgraph
