#include "engine/base/output_folder.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <set>

#include "engine/base/error.hpp"
#include "engine/base/output_file.hpp"
#include "tests/support/processes/killed_child.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
namespace fs = std::filesystem;
using Catch::Matchers::ContainsSubstring;
using sg::testing::Ended;
using sg::testing::file_bytes;
using sg::testing::TempFolder;

namespace {

// A disk takes milliseconds to sync, and these tests sync thousands of times.
fs::path fast_folder() { return access("/dev/shm", W_OK) == 0 ? "/dev/shm" : fs::temp_directory_path(); }

// Two files that belong together.
void save(const std::string& folder, const std::string& text) {
  sg::OutputFolder out(folder);
  sg::write_text(out.temporary() + "/weights", text);
  sg::write_text(out.temporary() + "/config", text);
  out.keep();
}

// What both files of a folder say, or what is wrong.
std::string saved(const fs::path& folder) {
  if (!fs::exists(folder)) return "no folder";
  const std::string config = file_bytes(folder / "config"), weights = file_bytes(folder / "weights");
  return config == weights ? config : "config " + config + " with weights " + weights;
}

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename().string());
  return names;
}

void make_old(const fs::path& folder) {
  fs::create_directories(folder / "more");
  for (const char* name : {"config", "weights"}) sg::write_text(folder / name, "old");
  sg::write_text(folder / "tokenizer.json", "a tokenizer");
  sg::write_text(folder / "more/notes", "notes");
}

bool has_others(const fs::path& folder) {
  return file_bytes(folder / "tokenizer.json") == "a tokenizer" && file_bytes(folder / "more/notes") == "notes";
}

}  // namespace

TEST_CASE("a folder is replaced as a whole, and its other files stay", "[engine][output_folder]") {
  const TempFolder temp;
  const fs::path folder = temp / "model";
  save(folder, "first");
  CHECK(saved(folder) == "first");
  make_old(folder);
  fs::create_symlink("tokenizer.json", folder / "link");
  chmod(folder.c_str(), 0750);
  save(folder.string() + "/", "second");
  CHECK(saved(folder) == "second");
  CHECK(has_others(folder));
  CHECK(fs::read_symlink(folder / "link") == "tokenizer.json");
  CHECK(names_in(temp.path()) == std::set<std::string>{"model"});
  struct stat status {};
  REQUIRE(stat(folder.c_str(), &status) == 0);
  CHECK((status.st_mode & 07777) == 0750);
  // Through a link, and without keep().
  fs::create_directory_symlink("model", temp / "latest");
  save(temp / "latest", "third");
  CHECK(fs::is_symlink(temp / "latest"));
  CHECK(saved(folder) == "third");
  { const sg::OutputFolder unused((temp / "model").string()); }
  CHECK(saved(folder) == "third");
  CHECK(names_in(temp.path()) == std::set<std::string>{"latest", "model"});
}

TEST_CASE("a process that is killed at any system call leaves the old folder or the new one",
          "[engine][output_folder]") {
  const TempFolder temp(fast_folder());
  const fs::path folder = temp / "model";
  for (int call = 0;; call += sg::testing::scale()) {
    CAPTURE(call);
    fs::remove_all(folder);
    make_old(folder);
    const Ended ended = sg::testing::run_killed_at(call, [&] { save(folder, "new"); });
    REQUIRE(ended != Ended::failed);
    REQUIRE(has_others(folder));
    REQUIRE(((ended != Ended::done && saved(folder) == "old") || saved(folder) == "new"));
    // The next one removes what the killed one left.
    save(folder, "next");
    REQUIRE(saved(folder) == "next");
    REQUIRE(has_others(folder));
    REQUIRE(names_in(temp.path()) == std::set<std::string>{"model"});
    if (ended == Ended::done) {
      CHECK(call > 20);
      break;
    }
  }
}

TEST_CASE("without an exchange of folders, a killed process loses neither the old folder nor the new one",
          "[engine][output_folder]") {
  const TempFolder temp(fast_folder());
  const fs::path folder = temp / "model";
  int in_between        = 0;
  for (int call = 0;; call += sg::testing::scale()) {
    CAPTURE(call);
    for (const std::string& name : names_in(temp.path())) fs::remove_all(temp / name);
    make_old(folder);
    const Ended ended = sg::testing::run_killed_at(call, [&] {
      sg::testing::forbid_exchange();
      save(folder, "new");
    });
    REQUIRE(ended != Ended::failed);
    const auto left = sg::interrupted_folders(folder);
    if (fs::exists(folder)) {
      REQUIRE(((ended != Ended::done && saved(folder) == "old") || saved(folder) == "new"));
      REQUIRE(has_others(folder));
    } else {
      ++in_between;
      REQUIRE(left.size() == 2);
      CHECK_THAT(left[0], ContainsSubstring("model.new-"));
      CHECK_THAT(left[1], ContainsSubstring("model.old-"));
      REQUIRE(saved(left[0]) == "new");
      REQUIRE(saved(left[1]) == "old");
    }
    // The next save leaves them alone: the user decides which one is needed.
    save(folder, "next");
    REQUIRE(saved(folder) == "next");
    REQUIRE(sg::interrupted_folders(folder) == left);
    if (ended == Ended::done) {
      CHECK(left.empty());
      break;
    }
  }
  if (sg::testing::scale() == 1) CHECK(in_between > 0);
}

TEST_CASE("if the old folder cannot be renamed, a killed process loses neither the old files nor the new ones",
          "[engine][output_folder]") {
  const TempFolder temp(fast_folder());
  const fs::path folder = temp / "model";
  // write_text would need a rename.
  const auto save_new = [&] {
    sg::testing::forbid_renames();
    sg::OutputFolder out(folder.string());
    for (const char* name : {"/weights", "/config"}) sg::testing::write_file(out.temporary() + name, "new");
    out.keep();
  };
  int in_between = 0;
  for (int call = 0;; call += sg::testing::scale()) {
    CAPTURE(call);
    for (const std::string& name : names_in(temp.path())) fs::remove_all(temp / name);
    make_old(folder);
    chmod(folder.c_str(), 0750);
    const Ended ended = sg::testing::run_killed_at(call, save_new);
    REQUIRE(ended != Ended::failed);
    const auto left  = sg::interrupted_folders(folder);
    const bool whole = fs::exists(folder) && has_others(folder) && (saved(folder) == "old" || saved(folder) == "new");
    if (!whole) {
      ++in_between;
      REQUIRE(left.size() == 2);
    }
    // Those are complete, but for the old one once the new one is in place.
    for (const std::string& other : left) {
      const bool is_new = other.find(".new-") != other.npos;
      if (!is_new && fs::exists(folder) && saved(folder) == "new") continue;
      REQUIRE(saved(other) == (is_new ? "new" : "old"));
      REQUIRE(has_others(other));
    }
    if (ended == Ended::done) {
      CHECK(saved(folder) == "new");
      CHECK(names_in(temp.path()) == std::set<std::string>{"model"});
      struct stat status {};
      REQUIRE(stat(folder.c_str(), &status) == 0);
      CHECK((status.st_mode & 07777) == 0750);
      break;
    }
  }
  if (sg::testing::scale() == 1) CHECK(in_between > 0);
}

TEST_CASE("the files of a private folder are private while they are written", "[engine][output_folder]") {
  const TempFolder temp;
  const fs::path folder = temp / "model";
  make_old(folder);
  const auto mode_of = [](const fs::path& path) {
    struct stat status {};
    REQUIRE(stat(path.c_str(), &status) == 0);
    return status.st_mode & 07777;
  };
  chmod(folder.c_str(), 0500);
  {
    sg::OutputFolder out(folder.string());
    CHECK(mode_of(out.temporary()) == 0700);  // it must be written
    sg::write_text(out.temporary() + "/config", "new");
    out.keep();
  }
  CHECK(mode_of(folder) == 0500);
  chmod(folder.c_str(), 0700);
  CHECK(file_bytes(folder / "config") == "new");
}

TEST_CASE("temporary files that an earlier version left are not carried over", "[engine][output_folder]") {
  const TempFolder temp;
  const fs::path folder = temp / "model";
  make_old(folder);
  sg::write_text(folder / "weights.123-4.partial", "left");
  for (const char* name : {"other.123-4.partial", "weights.partial", "weights.12.partial", "weights.x1-4.partial",
                           "more/notes.1-2.partial"})
    sg::write_text(folder / name, "mine");
  save(folder, "new");
  CHECK(names_in(folder) == std::set<std::string>{"config", "more", "other.123-4.partial", "tokenizer.json", "weights",
                                                  "weights.12.partial", "weights.partial", "weights.x1-4.partial"});
  CHECK(names_in(folder / "more") == std::set<std::string>{"notes", "notes.1-2.partial"});
}

TEST_CASE("processes that replace the same folder take turns, and a reader sees one of them",
          "[engine][output_folder]") {
  const TempFolder temp(fast_folder());
  const fs::path folder = temp / "model";
  const bool exchange   = GENERATE(true, false);
  CAPTURE(exchange);
  make_old(folder);
  const int rounds = 60 / sg::testing::scale();
  std::vector<int> children;
  for (const char* text : {"one", "two"}) {
    children.push_back(sg::testing::start_child([&, text] {
      if (!exchange) sg::testing::forbid_exchange();
      for (int i = 0; i < rounds; ++i) save(folder, text);
    }));
  }
  std::set<std::string> seen;
  for (int i = 0; exchange && i < 2000; ++i) {
    // Both files from one open folder. It may be removed while it is read: then one of them is missing.
    const int open_folder = open(folder.c_str(), O_RDONLY | O_DIRECTORY);
    REQUIRE(open_folder >= 0);
    const auto read = [&](const char* name) {
      char text[8]   = {};
      const int file = openat(open_folder, name, O_RDONLY);
      if (file < 0 || ::read(file, text, sizeof text) < 0) text[0] = '\0';
      close(file);
      return std::string(text);
    };
    const std::string config = read("config"), weights = read("weights");
    close(open_folder);
    if (config.empty() || weights.empty()) continue;
    REQUIRE(config == weights);
    seen.insert(config);
  }
  for (const int child : children) {
    // Without an exchange, one may find the other's folder in its way. Its own is kept under another name.
    const Ended ended = sg::testing::wait_for(child);
    if (exchange) CHECK(ended == Ended::done);
  }
  CHECK((saved(folder) == "one" || saved(folder) == "two"));
  if (!exchange) return;
  CHECK(has_others(folder));
  CHECK(names_in(temp.path()) == std::set<std::string>{"model"});
  CHECK(seen.size() >= 1);
}

TEST_CASE("the temporary folder of a living process is not removed", "[engine][output_folder]") {
  const TempFolder temp;
  const std::string folder = (temp / "model").string();
  sg::OutputFolder living(folder);
  sg::write_text(living.temporary() + "/weights", "living");
  save(folder, "other");
  CHECK(file_bytes(living.temporary() + "/weights") == "living");
  sg::write_text(living.temporary() + "/config", "living");
  living.keep();
  CHECK(saved(folder) == "living");
  // Similar names are not those of temporary folders.
  fs::create_directory(temp / "model.partial-backup");
  fs::create_directory(temp / "model.partial-0123456789abcdef");
  fs::create_directory(temp / "other.partial-0123456789abcdef");
  save(folder, "last");
  CHECK(names_in(temp.path()) ==
        std::set<std::string>{"model", "model.partial-backup", "other.partial-0123456789abcdef"});
}

TEST_CASE("folders that cannot be replaced are refused at once, with the reason", "[engine][output_folder][refuses]") {
  const TempFolder temp;
  const auto refused = [](const fs::path& path, const std::string& why) {
    CAPTURE(path, why);
    CHECK_THROWS_WITH(sg::OutputFolder(path.string()), ContainsSubstring(why));
  };
  refused("", "the name is empty");
  refused(temp.put("file", "x"), "is not a folder (a folder, or a new name)");
  fs::create_symlink("nowhere", temp / "link");
  refused(temp / "link", "is a link that leads nowhere");
  refused("/proc", "is a mount point, which cannot be replaced at once (a folder inside it, such as model)");
  refused("/proc/model", "cannot be created");
  refused(".", ".: is the current folder or holds it, so it cannot be replaced");
  refused(fs::current_path().parent_path(), "is the current folder or holds it");
  CHECK(names_in(temp.path()) == std::set<std::string>{"file", "link"});
}

TEST_CASE("files that cannot be put in place are kept beside it, and the message says where",
          "[engine][output_folder]") {
  const TempFolder temp;
  const fs::path folder = temp / "model";
  make_old(folder);
  sg::OutputFolder out(folder.string());
  sg::write_text(out.temporary() + "/config", "new");
  // A file where the folder was.
  fs::rename(folder, temp / "moved");
  temp.put("model", "in the way");
  CHECK_THROWS_WITH(out.keep(), ContainsSubstring("Not a directory") && ContainsSubstring("the new files are in ") &&
                                    ContainsSubstring("model.new-"));
  const auto left = sg::interrupted_folders(folder.string());
  REQUIRE(left.size() == 1);
  CHECK(file_bytes(left[0] + "/config") == "new");
  CHECK(file_bytes(folder) == "in the way");
}
