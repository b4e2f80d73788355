#include "engine/base/output_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <ostream>
#include <set>

#include "engine/base/error.hpp"
#include "tests/support/processes/killed_child.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
namespace fs = std::filesystem;
using Catch::Matchers::ContainsSubstring;
using sg::testing::Ended;
using sg::testing::file_bytes;
using sg::testing::TempFolder;
using Temporary = sg::OutputFile::Temporary;

namespace {

bool has_unnamed(const TempFolder& folder) { return sg::make_unnamed((folder / "a").string()).is_open(); }

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename().string());
  return names;
}

std::string temporary_of(const TempFolder& folder) {
  for (const std::string& name : names_in(folder.path()))
    if (name.find(".partial-") != name.npos) return name;
  return "";
}

}  // namespace

TEST_CASE("a file appears complete, or not at all", "[engine][output_file]") {
  const Temporary temporary = GENERATE(Temporary::unnamed, Temporary::named);
  const TempFolder folder;
  const std::string path = (folder / "a").string();
  sg::write_text(path, "one");
  CHECK(file_bytes(path) == "one");
  {
    sg::OutputFile file(path, temporary);
    file.write(std::as_bytes(std::span(std::string_view("half"))));
    CHECK(file_bytes(path) == "one");
    CHECK(names_in(folder.path()).size() == (temporary == Temporary::named || !has_unnamed(folder) ? 2 : 1));
  }
  CHECK(names_in(folder.path()) == std::set<std::string>{"a"});
  for (const char* text : {"new", "other"}) {  // without and with a file that is replaced
    const std::string next = (folder / "next").string();
    sg::OutputFile file(next, temporary);
    file.write(std::as_bytes(std::span(std::string_view(text))));
    file.keep();
    CHECK(file_bytes(next) == text);
    CHECK(names_in(folder.path()) == std::set<std::string>{"a", "next"});
  }
  fs::remove(folder / "next");
  CHECK(names_in(folder.path()) == std::set<std::string>{"a"});
  CHECK_THROWS_AS(sg::write_stream(path,
                                   [](std::ostream& out) {
                                     out << "half";
                                     throw sg::Error(sg::ErrorKind::run, "no more");
                                   }),
                  sg::Error);
  CHECK(file_bytes(path) == "one");
  CHECK(names_in(folder.path()) == std::set<std::string>{"a"});
}

TEST_CASE("the temporary file has a name that cannot be predicted", "[engine][output_file]") {
  const TempFolder folder;
  std::set<std::string> names;
  for (int i = 0; i < 20; ++i) {
    const sg::OutputFile file((folder / "a").string(), Temporary::named);
    const std::string name = temporary_of(folder);
    CHECK(name.size() == std::string("a.partial-0123456789abcdef").size());
    names.insert(name);
  }
  CHECK(names.size() == 20);
}

TEST_CASE("a replaced file keeps its mode, and a link leads to the new file", "[engine][output_file]") {
  const TempFolder folder;
  const fs::path path = folder.put("a", "one");
  chmod(path.c_str(), 0640);
  fs::create_symlink("a", folder / "link");
  sg::write_text(folder / "link", "two");
  CHECK(fs::is_symlink(folder / "link"));
  CHECK(file_bytes(path) == "two");
  struct stat status {};
  REQUIRE(stat(path.c_str(), &status) == 0);
  CHECK((status.st_mode & 07777) == 0640);
}

TEST_CASE("a writer that is killed at any system call leaves the old file or the new one", "[engine][output_file]") {
  const Temporary temporary = GENERATE(Temporary::unnamed, Temporary::named);
  const TempFolder folder;
  const fs::path path = folder / "a";
  for (int call = 0;; call += sg::testing::scale()) {
    CAPTURE(call);
    sg::write_text(path, "old");
    const Ended ended = sg::testing::run_killed_at(call, [&] {
      sg::OutputFile file(path.string(), temporary);
      file.write(std::as_bytes(std::span(std::string_view("new"))));
      file.keep();
    });
    REQUIRE(ended != Ended::failed);
    REQUIRE(((ended != Ended::done && file_bytes(path) == "old") || file_bytes(path) == "new"));
    sg::write_text(path, "next");  // removes what the killed one left
    REQUIRE(names_in(folder.path()) == std::set<std::string>{"a"});
    if (ended == Ended::done) break;
  }
}

TEST_CASE("the temporary file of a living writer is not removed", "[engine][output_file]") {
  const Temporary temporary = GENERATE(Temporary::unnamed, Temporary::named);
  const TempFolder folder;
  const std::string path = (folder / "a").string();
  sg::OutputFile living(path, temporary);
  living.write(std::as_bytes(std::span(std::string_view("living"))));
  sg::write_text(path, "other");
  CHECK(file_bytes(path) == "other");
  living.keep();
  CHECK(file_bytes(path) == "living");
  // Links are no temporary files, and what they lead to stays.
  folder.put("precious", "precious");
  fs::create_symlink("precious", folder / "a.partial-0123456789abcdef");
  sg::write_text(path, "last");
  CHECK(file_bytes(folder / "precious") == "precious");
}

TEST_CASE("a file without a name is not removed when it gets a temporary one", "[engine][output_file]") {
  const TempFolder folder;
  const std::string path = (folder / "a").string(), partial = path + ".partial-" + sg::random_suffix();
  {
    const sg::Descriptor unnamed = sg::make_unnamed(path);
    if (!unnamed.is_open()) SKIP("the system has no files without a name");
    REQUIRE(sg::name_file(unnamed, partial));
    CHECK_FALSE(sg::remove_leftovers(path));
    CHECK(fs::exists(partial));
  }
  CHECK(sg::remove_leftovers(path));
  CHECK_FALSE(fs::exists(partial));
}

TEST_CASE("pipes and devices are written in place", "[engine][output_file]") {
  const TempFolder folder;
  const std::string pipe = (folder / "pipe").string();
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  const int reader = open(pipe.c_str(), O_RDONLY | O_NONBLOCK);
  sg::write_text(pipe, "through the pipe");
  char text[64] = {};
  CHECK(read(reader, text, sizeof text) == 16);
  close(reader);
  CHECK(std::string(text) == "through the pipe");
  CHECK(fs::is_fifo(pipe));
  sg::write_text("/dev/null", "nothing");
  CHECK(names_in(folder.path()) == std::set<std::string>{"pipe"});

  // An open file continues where it is.
  const int open_file = open((folder / "log").c_str(), O_WRONLY | O_CREAT, 0600);
  REQUIRE(write(open_file, "before ", 7) == 7);
  sg::write_text("/dev/fd/" + std::to_string(open_file), "text");
  REQUIRE(write(open_file, " after", 6) == 6);
  close(open_file);
  CHECK(file_bytes(folder / "log") == "before text after");
  for (const char* name : {"/dev/stdout", "/dev/null", "/dev/fd/7"}) CHECK(sg::is_written_in_place(name));
  CHECK_FALSE(sg::is_written_in_place((folder / "new").string()));
}

TEST_CASE("a file that cannot be written is an error with the system's reason", "[engine][output_file][refuses]") {
  const TempFolder folder;
  CHECK_THROWS_WITH(sg::write_text("/dev/full", "x"), "/dev/full: cannot be written: No space left on device");
  CHECK_THROWS_WITH(sg::write_stream("/dev/full", [](std::ostream& out) { out << std::string(100'000, 'x'); }),
                    ContainsSubstring("/dev/full: cannot be written: No space left on device"));
  CHECK_THROWS_WITH(sg::write_text(folder / "no/file", "x"),
                    ContainsSubstring("no/file: cannot be created: No such file or directory"));
  CHECK_THROWS_WITH(sg::write_text(folder.path(), "x"), ContainsSubstring(": is a folder (a file, or a new name)"));
}

TEST_CASE("a new file of a writer that is killed before the end leaves nothing", "[engine][output_file]") {
  const TempFolder folder;
  if (!has_unnamed(folder)) SKIP("this file system has no files without a name");
  for (int call = 0;; call += sg::testing::scale()) {
    CAPTURE(call);
    const Ended ended = sg::testing::run_killed_at(call, [&] { sg::write_text(folder / "a", "new"); });
    REQUIRE(ended != Ended::failed);
    const std::set<std::string> names = names_in(folder.path());
    REQUIRE((names.empty() || (names == std::set<std::string>{"a"} && file_bytes(folder / "a") == "new")));
    fs::remove(folder / "a");
    if (ended == Ended::done) break;
  }
}
