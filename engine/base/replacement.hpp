#pragma once
#include <functional>
#include <iosfwd>
#include <string>
#include <string_view>

// Files that are complete or not there.
namespace stepgraph {

// A file that takes the place of `path` when it is whole, and else leaves nothing behind. A link stays a link: what it
// leads to is replaced. `subject` begins the messages of its errors, all Error(backend).
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

// Has `write` fill `file`; errors speak of `named`.
void write_file(std::string_view subject, const std::string& file, const std::string& named,
                const std::function<void(std::ostream&)>& write);

// Has `write` fill a file that then takes the place of `path`; a pipe or device is written as it is.
void write_whole(std::string_view subject, const std::string& path, const std::function<void(std::ostream&)>& write);

}  // namespace stepgraph
