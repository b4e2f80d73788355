#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace stepgraph {

// A folder that changes as a whole: before keep() its name has the old files, afterwards the new ones, and at no moment
// some of each, even if the process is killed or another one writes the same folder. Files are written to temporary(),
// a folder beside it. keep() exchanges the two and removes the old one.
//
// - Other files and folders in it, such as a tokenizer, are carried over, as hard links or copies. Owner and mode of
// the
//   folder are kept; temporary() has them from the start. If `path` is a link, the folder that it leads to is replaced.
// - The next OutputFolder of the same name removes the temporary folder of a killed process, PATH.partial-RANDOM.
// - A file system that cannot exchange two folders (NFS, for example) renames twice: the old one to PATH.old-RANDOM,
//   then the new one from PATH.new-RANDOM. A process that is killed in between leaves both: interrupted_folders().
// - A folder that cannot be renamed at all (EXDEV: it is in the lower layer of an overlay, as the image of a container)
//   is copied to PATH.old-RANDOM and removed instead. A process that is killed in between leaves both as well, and
//   perhaps some of the old files under PATH.
// - If keep() fails, the new folder is kept as PATH.new-RANDOM, which the message names.
//
// Throws Error(config) where `path` is no folder, is or holds a mount point, or is or holds the current folder: those
// cannot be exchanged. Throws Error(backend) with the system's reason.
class OutputFolder {
 public:
  explicit OutputFolder(const std::string& path);
  OutputFolder(const OutputFolder&)            = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;
  ~OutputFolder();  // removes the temporary folder unless keep() was called

  [[nodiscard]] const std::string& temporary() const noexcept { return temporary_; }
  void keep();

 private:
  [[noreturn]] void fail(std::string_view doing) const;
  void put_in_place();
  [[nodiscard]] std::string exchange();
  void remove_replaced(const std::string& replaced) const;

  std::string name_;       // as given, for messages
  std::string path_;       // absolute, without links
  std::string temporary_;  // empty: kept
  int descriptor_ = -1;    // of the temporary folder, locked
};

// The folders of a keep() that was killed or failed: PATH.old-RANDOM, the folder before, and PATH.new-RANDOM, the
// folder that should have replaced it. They are never removed automatically.
[[nodiscard]] std::vector<std::string> interrupted_folders(const std::string& path);

}  // namespace stepgraph
