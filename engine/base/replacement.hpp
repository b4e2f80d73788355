#pragma once
#include <functional>
#include <iosfwd>
#include <string>
#include <string_view>

// Files that are complete or not there.
namespace stepgraph {

// A temporary file that replaces `path` on commit(), and is removed otherwise. If `path` is a link, its target is
// replaced. Error messages begin with `subject`; all are Error(backend).
class Replacement {
 public:
  Replacement(std::string_view subject, const std::string& path);
  Replacement(const Replacement&)            = delete;
  Replacement& operator=(const Replacement&) = delete;
  ~Replacement();
  [[nodiscard]] const std::string& part() const noexcept { return part_; }
  void commit() const;

 private:
  std::string subject_, path_, part_;
};

// Calls `write` to fill `file`; error messages name `named`.
void write_file(std::string_view subject, const std::string& file, const std::string& named,
                const std::function<void(std::ostream&)>& write);

// Calls `write` to fill a temporary file that then replaces `path`. A pipe or device is written directly.
void write_whole(std::string_view subject, const std::string& path, const std::function<void(std::ostream&)>& write);

}  // namespace stepgraph
