#include "engine/base/direct_file.hpp"

#include <sys/resource.h>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <csignal>
#include <fstream>
#include <sstream>
#include <vector>

#include "engine/base/error.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::testing::file_bytes;
using sg::testing::TempFolder;

TEST_CASE("a direct file has all bytes that were appended", "[engine][base][direct_file]") {
  const TempFolder folder;
  const std::size_t size = GENERATE(std::size_t{0}, std::size_t{1}, std::size_t{4096}, std::size_t{100'001},
                                    sg::DirectFile::buffer_bytes + 4097, 6 * sg::DirectFile::buffer_bytes + 1);
  const bool reserves    = GENERATE(true, false);
  static int seen        = 0;
  if (sg::testing::left_out(seen, 5)) return;
  CAPTURE(size, reserves);
  std::string block(251 * 256, '\0');
  for (std::size_t i = 0; i < block.size(); ++i) block[i] = static_cast<char>(i * 7 + i / 251);
  std::string bytes;
  while (bytes.size() < size) bytes.append(block, 0, size - bytes.size());
  const std::string path = folder / "file";
  sg::DirectFile file(path, reserves ? static_cast<std::int64_t>(size) : 0);
  std::span<const std::byte> rest = std::as_bytes(std::span(bytes));
  for (std::size_t piece = 1; !rest.empty(); piece = piece * 3 + 1) {
    const std::size_t now = std::min(piece, rest.size());
    file.append(rest.first(now));
    rest = rest.subspan(now);
  }
  CHECK(file.num_bytes() == static_cast<std::int64_t>(size));
  file.finish();
  std::ostringstream found;
  found << std::ifstream(path, std::ios::binary).rdbuf();
  CHECK((found.str() == bytes));
}

TEST_CASE("a direct file takes no name that exists, and no folder that does not",
          "[engine][base][direct_file][refuses]") {
  const TempFolder folder;
  const std::string path = folder.put("file", "old");
  CHECK_THROWS_MATCHES(sg::DirectFile(path), sg::Error,
                       MessageMatches(ContainsSubstring("cannot be created: File exists")));
  CHECK(file_bytes(path) == "old");
  CHECK_THROWS_MATCHES(sg::DirectFile(folder / "none/file"), sg::Error,
                       MessageMatches(ContainsSubstring("No such file")));
  CHECK_NOTHROW(sg::DirectFile(folder / "unfinished"));
}

TEST_CASE("a direct file whose writes cannot be direct says what is wrong with ordinary ones",
          "[engine][base][direct_file][refuses]") {
  const TempFolder folder;
  sg::DirectFile file(folder / "file");
  rlimit limit{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &limit) == 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  // The system cuts the first write off at the limit, where direct writes cannot end.
  const rlimit tight{.rlim_cur = 10'001, .rlim_max = limit.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &tight);
  std::string said;
  try {
    file.append(std::vector<std::byte>(2 * sg::DirectFile::buffer_bytes));
    file.finish();
  } catch (const sg::Error& error) {
    said = error.what();
  }
  ::setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, handler);
  CHECK_THAT(said, ContainsSubstring("cannot be written: File too large"));
}
