#pragma once
#include <sys/stat.h>

#include <string>
#include <string_view>
#include <utility>

// Temporary files and folders, beside the name that they will have: for OutputFile and OutputFolder.
namespace stepgraph {

// An open file or folder. The destructor closes it.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor();

  [[nodiscard]] int get() const noexcept { return number_; }
  [[nodiscard]] bool is_open() const noexcept { return number_ >= 0; }
  [[nodiscard]] int release() noexcept { return std::exchange(number_, -1); }

 private:
  int number_ = -1;
};

// PATH.partial-SUFFIX, open and locked: a file for writing, or a folder. The lock (flock) tells other processes that
// this one is still at work.
struct Partial {
  std::string name      = {};
  Descriptor descriptor = {};  // not open: failed, and errno says why
};
[[nodiscard]] Partial make_partial(const std::string& path, bool folder);

// A file for writing in the folder of `path`, without a name, locked too: if the process ends, nothing is left. Not
// open where the system does not have them.
[[nodiscard]] Descriptor make_unnamed(const std::string& path);
// Gives it the name `path`, which a file may have. False: errno says why.
[[nodiscard]] bool name_file(const Descriptor& unnamed, const std::string& path);

// Removes the partial files and folders of `path` that no process has locked: their processes have ended. Returns
// whether none is left.
bool remove_leftovers(const std::string& path);

// Removes all partial files and folders that this process has made and not renamed: for a process that ends at once,
// without destructors. Any thread. A thread that still writes a partial folder gets an error at its next use of the
// name, so a folder with missing files is never put in place.
void remove_own_partials() noexcept;

// While it lives, remove_own_partials() does not begin. For the moment at which a partial folder is put in place.
class PartialsStay {
 public:
  PartialsStay();
  ~PartialsStay();
  PartialsStay(const PartialsStay&)            = delete;
  PartialsStay& operator=(const PartialsStay&) = delete;
};

[[nodiscard]] std::string random_suffix();                     // 16 hexadecimal digits
[[nodiscard]] bool is_random_suffix(std::string_view text);    // text of that form
[[nodiscard]] std::string folder_of(const std::string& path);  // the folder in which `path` is
[[nodiscard]] std::string system_reason(int number);           // the system's text for an errno

// Writes the entries of a folder to the disk. A few file systems cannot do it, which is no error. Both throw
// Error(backend).
void sync_folder(const std::string& path);
// Makes a folder, and those that it is in, unless they exist. The names of new ones are on the disk when it returns.
void create_folder(const std::string& path);

// Whether `name` is still the file or folder that is open.
[[nodiscard]] bool is_named(const std::string& name, const Descriptor& descriptor);

// Gives an open file or folder the owner and mode of another, as far as the system allows.
void copy_owner_and_mode(const struct stat& from, int to);

}  // namespace stepgraph
