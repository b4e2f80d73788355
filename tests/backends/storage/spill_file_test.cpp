#include "backends/storage/spill_file.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <thread>
#include <vector>

#include "engine/base/error.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/training/checkpointed.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::testing::TempFolder;

namespace {

constexpr std::int64_t block = sg::Storage::block_bytes;

// Bytes at an address that is a multiple of a block, or one behind it.
class Bytes {
 public:
  explicit Bytes(std::int64_t size, bool aligned = true)
      : block_(
            static_cast<std::byte*>(std::aligned_alloc(block, static_cast<std::size_t>((size / block + 2) * block)))),
        span_(block_.get() + (aligned ? 0 : 1), static_cast<std::size_t>(size)) {
    std::memset(span_.data(), 0xee, span_.size());
  }
  [[nodiscard]] std::span<std::byte> span() const { return span_; }
  // Random bytes, which repeat after a prime number of them: no two blocks are equal.
  void fill(std::uint32_t seed) const {
    constexpr std::size_t period = 65'521;
    for (std::byte& each : span_.first(std::min(period, span_.size())))
      each = static_cast<std::byte>((seed = seed * 1664525 + 1013904223) >> 24);
    for (std::size_t done = period; done < span_.size(); done += period)
      std::memcpy(span_.data() + done, span_.data(), std::min(period, span_.size() - done));
  }
  friend bool operator==(const Bytes& a, const Bytes& b) {
    return a.span_.size() == b.span_.size() && std::memcmp(a.span_.data(), b.span_.data(), a.span_.size()) == 0;
  }

 private:
  struct Free {
    void operator()(std::byte* bytes) const { std::free(bytes); }
  };
  std::unique_ptr<std::byte, Free> block_;
  std::span<std::byte> span_;
};

// Small requests, so that a transfer of a test has many.
sg::SpillOptions small_requests(bool io_uring, bool direct) {
  return {.io_uring = io_uring, .direct = direct, .request_bytes = block, .depth = 3, .threads = 3};
}

// The file of a storage in this folder: an open file of this process that was removed.
std::filesystem::path open_file(const TempFolder& folder) {
  for (const auto& each : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    const std::string target = std::filesystem::read_symlink(each, ignored).string();
    if (target.starts_with(folder.path().string() + "/") && target.ends_with("(deleted)")) return each.path();
  }
  return {};
}

// Limits the size of files while it lives.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t most) {
    getrlimit(RLIMIT_FSIZE, &before_);
    old_ = std::signal(SIGXFSZ, SIG_IGN);
    const rlimit now{most, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &now);
  }
  FileSizeLimit(const FileSizeLimit&)            = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, old_);
  }

 private:
  rlimit before_    = {};
  void (*old_)(int) = nullptr;
};

}  // namespace

TEST_CASE("a spill file keeps bytes, with io_uring or threads, direct or buffered, whole blocks or not",
          "[backends][storage]") {
  const bool io_uring = GENERATE(true, false), direct = GENERATE(true, false), aligned = GENERATE(true, false);
  const bool in_memory = GENERATE(false, true);  // a file system in memory: many kernels have no direct I/O there
  CAPTURE(io_uring, direct, aligned, in_memory);
  const TempFolder folder(in_memory ? sg::testing::fast_folder() : std::filesystem::temp_directory_path());
  sg::SpillFile file(folder.path(), sg::Rank{0}, 64 * block, small_requests(io_uring, direct));
  CHECK(file.size_bytes() == 64 * block);
  if (!io_uring) CHECK_FALSE(file.uses_io_uring());
  if (!direct) CHECK_FALSE(file.is_direct());

  const Bytes zero(3 * block, aligned), all_zero(3 * block);
  std::ranges::fill(all_zero.span(), std::byte{0});
  file.read(5 * block, zero.span());
  CHECK(zero == all_zero);  // never written

  struct Range {
    std::int64_t offset, size;
  };
  for (const Range range : {Range{0, 64 * block},
                            {block, 7 * block},
                            {3, 5},
                            {block - 1, 2 * block + 2},
                            {2 * block, 3 * block + 100},
                            {63 * block, block},
                            {9, 0}}) {
    CAPTURE(range.offset, range.size);
    const Bytes out(range.size, aligned), in(range.size, aligned);
    out.fill(static_cast<std::uint32_t>(range.offset + range.size));
    file.write(range.offset, out.span());
    file.read(range.offset, in.span());
    CHECK(in == out);
    const Bytes unaligned(range.size, false);  // buffered reads see what direct writes wrote
    file.read(range.offset, unaligned.span());
    CHECK(unaligned == out);
  }
}

TEST_CASE("a large transfer has more requests than are in flight at one time", "[backends][storage]") {
  const bool io_uring = GENERATE(true, false);
  CAPTURE(io_uring);
  const TempFolder folder;
  sg::SpillFile file(folder.path(), sg::Rank{0}, 40 << 20, {.io_uring = io_uring});
  const Bytes out(40 << 20), in(40 << 20);
  out.fill(1);
  file.write(0, out.span());
  file.read(0, in.span());
  CHECK(in == out);
}

TEST_CASE("a spill file has no name, and its room is reserved when it is made", "[backends][storage]") {
  const TempFolder folder;
  {
    const sg::SpillFile file(folder.path(), sg::Rank{0}, 1 << 20);
    CHECK(std::filesystem::is_empty(folder.path()));
    const std::filesystem::path open = open_file(folder);
    REQUIRE_FALSE(open.empty());
    CHECK(std::filesystem::file_size(open) == 1 << 20);
  }
  CHECK(std::filesystem::is_empty(folder.path()));
  CHECK(open_file(folder).empty());
}

TEST_CASE("several threads use a spill file at one time", "[backends][storage]") {
  const bool io_uring = GENERATE(true, false);
  const TempFolder folder;
  sg::SpillFile file(folder.path(), sg::Rank{0}, 4 * 16 * block, small_requests(io_uring, true));
  std::array<bool, 4> same{};
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&file, &same, i] {
        const Bytes out(16 * block), in(16 * block);
        bool all = true;
        for (std::uint32_t round = 0; round < 20; ++round) {
          out.fill(round * 4 + static_cast<std::uint32_t>(i));
          file.write(i * 16 * block, out.span());
          file.read(i * 16 * block, in.span());
          all = all && in == out;
        }
        same[static_cast<std::size_t>(i)] = all;
      });
    }
  }
  CHECK(same == std::array{true, true, true, true});
}

TEST_CASE("a spill file in a folder that does not work is refused by name", "[backends][storage][refuses]") {
  const TempFolder folder;
  const sg::MakeStorage missing = sg::spill_files(folder / "none");
  CHECK_THROWS_MATCHES(missing(sg::Rank{3}, block), sg::Error,
                       MessageMatches(ContainsSubstring("spill file of rank 3 in '" + (folder / "none").string()) &&
                                      ContainsSubstring("No such file or directory")));
  folder.put("plain", "text");
  CHECK_THROWS_MATCHES(sg::spill_files(folder / "plain")(sg::Rank{0}, block), sg::Error,
                       MessageMatches(ContainsSubstring("(a folder that exists and can be written)")));
  if (geteuid() != 0) {  // root may write everywhere
    std::filesystem::permissions(folder.path(),
                                 std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
    CHECK_THROWS_MATCHES(sg::spill_files(folder.path())(sg::Rank{0}, block), sg::Error,
                         MessageMatches(ContainsSubstring("Permission denied")));
    std::filesystem::permissions(folder.path(), std::filesystem::perms::owner_all);
  }
  CHECK_THROWS_MATCHES(sg::spill_files(folder.path(), {.request_bytes = 100}), sg::Error,
                       MessageMatches(ContainsSubstring("request_bytes is 100 (a multiple of 4096)")));
  CHECK_THROWS_MATCHES(sg::spill_files(folder.path(), {.depth = 0}), sg::Error,
                       MessageMatches(ContainsSubstring("depth is 0 (1 to 1024)")));
  CHECK_THROWS_MATCHES(sg::spill_files(folder.path(), {.threads = 0}), sg::Error,
                       MessageMatches(ContainsSubstring("threads is 0 (1 to 64)")));
}

TEST_CASE("a full disk is an error when the file is made, with the bytes needed and free", "[backends][storage]") {
  const TempFolder folder;
  {
    const FileSizeLimit limit(1 << 20);
    CHECK_THROWS_MATCHES(
        sg::SpillFile(folder.path(), sg::Rank{0}, 2 << 20), sg::Error,
        MessageMatches(ContainsSubstring("needs 2.0 MiB: File too large (a larger limit of file sizes, "
                                         "ulimit -f, or a folder on another file system)")));
    CHECK_NOTHROW(sg::SpillFile(folder.path(), sg::Rank{0}, 1 << 19));
  }
  struct statvfs info {};
  REQUIRE(statvfs(folder.path().c_str(), &info) == 0);
  const auto all = static_cast<std::int64_t>(info.f_blocks) * static_cast<std::int64_t>(info.f_frsize);
  if (all > 0) {  // some file systems have no size of their own
    CHECK_THROWS_MATCHES(
        sg::SpillFile(folder.path(), sg::Rank{0}, 2 * all), sg::Error,
        MessageMatches(ContainsSubstring(" are free: ") && ContainsSubstring("(free space, or name another folder)")));
  }
}

TEST_CASE("a spill file that was cut short fails to read, and works again behind the error", "[backends][storage]") {
  const bool io_uring = GENERATE(true, false), direct = GENERATE(true, false);
  CAPTURE(io_uring, direct);
  const TempFolder folder;
  sg::SpillFile file(folder.path(), sg::Rank{1}, 16 * block, small_requests(io_uring, direct));
  const Bytes bytes(16 * block);
  bytes.fill(3);
  file.write(0, bytes.span());
  REQUIRE(truncate(open_file(folder).c_str(), 8 * block) == 0);
  const Bytes in(16 * block);
  CHECK_THROWS_MATCHES(file.read(0, in.span()), sg::Error,
                       MessageMatches(ContainsSubstring("spill file of rank 1 in '" + folder.path().string()) &&
                                      ContainsSubstring("reading 4096 bytes at ") &&
                                      ContainsSubstring("only 0 are there (the file must keep its 65536 bytes)")));
  const Bytes first(8 * block);
  file.read(0, first.span());
  CHECK(std::ranges::equal(first.span(), bytes.span().first(8 * block)));
  CHECK_THROWS_MATCHES(file.read(15 * block, bytes.span()), sg::Error,
                       MessageMatches(ContainsSubstring("bytes 61440 to 126976, but it has 65536 bytes")));
}

TEST_CASE("an I/O error names what was written and why it failed", "[backends][storage]") {
  const bool io_uring = GENERATE(true, false);
  CAPTURE(io_uring);
  const TempFolder folder;
  sg::SpillFile file(folder.path(), sg::Rank{0}, 16 * block, small_requests(io_uring, false));
  REQUIRE(truncate(open_file(folder).c_str(), 0) == 0);
  const Bytes bytes(16 * block);
  bytes.fill(4);
  {
    const FileSizeLimit limit(4 * block);
    CHECK_THROWS_MATCHES(file.write(0, bytes.span()), sg::Error,
                         MessageMatches(ContainsSubstring("writing 4096 bytes at ") &&
                                        ContainsSubstring("File too large (a larger limit of")));
  }
  file.write(0, bytes.span());
  const Bytes in(16 * block);
  file.read(0, in.span());
  CHECK(in == bytes);
}
