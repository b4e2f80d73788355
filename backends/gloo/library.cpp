#include <gloo/allreduce.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>

#include "backends/gloo/network.hpp"
#include "backends/gloo/world.hpp"
#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

// The job's store as one of Gloo.
class JobStore final : public gloo::rendezvous::Store {
 public:
  JobStore(Job& job, std::chrono::milliseconds timeout) : job_(job), timeout_(timeout) {}

  void set(const std::string& key, const std::vector<char>& data) override {
    const auto bytes = std::as_bytes(std::span(data));
    job_.store().set("gloo library " + key, Bytes(bytes.begin(), bytes.end()), patience());
  }
  std::vector<char> get(const std::string& key) override {
    std::vector<char> data;
    for (const std::byte byte : job_.store().get("gloo library " + key, patience()))
      data.push_back(static_cast<char>(byte));
    return data;
  }
  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) static_cast<void>(get(key));
  }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds&) override { wait(keys); }

 private:
  [[nodiscard]] Patience patience() const { return {Clock::now() + timeout_, &job_.control().interrupt()}; }

  Job& job_;
  std::chrono::milliseconds timeout_;
};

class GlooAllReduce final : public LibraryAllReduce {
 public:
  GlooAllReduce(Job& job, std::chrono::milliseconds timeout)
      : device_(make_gloo_device(job)), context_(std::make_shared<gloo::rendezvous::Context>(job.rank(), job.size())) {
    JobStore store(job, timeout);
    context_->setTimeout(timeout);
    try {
      context_->connectFullMesh(store, device_);
    } catch (const std::exception& error) {
      throw Error(ErrorKind::backend, str("gloo: ", error.what()));
    }
  }

  void run(std::span<float> values) override {
    gloo::AllreduceOptions options(context_);
    options.setOutput(values.data(), values.size());
    void (*const add)(void*, const void*, const void*, std::size_t) = &gloo::sum<float>;
    options.setReduceFunction(add);
    try {
      gloo::allreduce(options);
    } catch (const std::exception& error) {
      throw Error(ErrorKind::backend, str("gloo: ", error.what()));
    }
  }

 private:
  std::shared_ptr<gloo::transport::Device> device_;
  std::shared_ptr<gloo::rendezvous::Context> context_;
};

}  // namespace

std::unique_ptr<LibraryAllReduce> GlooWorld::library_all_reduce() {
  return std::make_unique<GlooAllReduce>(job(), timeout());
}

}  // namespace stepgraph
