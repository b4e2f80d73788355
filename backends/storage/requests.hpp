#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

// Transfers between memory and files, many at a time: internal to backends/storage.
namespace stepgraph {

// One read or write. The functions below advance it as its bytes arrive.
struct Request {
  int file            = -1;
  bool writes         = false;
  std::int64_t offset = 0;
  std::byte* bytes    = nullptr;  // a write reads them
  std::int64_t size   = 0;
};

// The rest of a request that could not be done.
struct Failure {
  int error           = 0;  // errno; 0: the file has ended
  bool writes         = false;
  std::int64_t offset = 0;  // of the request as it was given
  std::int64_t size   = 0;
  std::int64_t done   = 0;  // bytes of it
};

// A ring of io_uring. Any thread may call run(); one call at a time goes on.
class RequestRing {
 public:
  virtual ~RequestRing() = default;
  // Returns when no request is in flight any more: all are done, or with the first failure.
  [[nodiscard]] virtual std::optional<Failure> run(std::vector<Request>& requests) = 0;
};

// Null: this build has no liburing, or the kernel refuses (containers often forbid io_uring).
[[nodiscard]] std::unique_ptr<RequestRing> make_ring(int depth);

// The same with pread and pwrite, on up to so many threads.
[[nodiscard]] std::optional<Failure> run_with_threads(std::vector<Request>& requests, int threads);

}  // namespace stepgraph
