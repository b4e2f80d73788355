#include "engine/base/replacement.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

namespace fs = std::filesystem;

std::string resolved(const std::string& path) {
  std::error_code error;
  const fs::path target = fs::weakly_canonical(path, error);
  return error ? path : target.string();
}

}  // namespace

Replacement::Replacement(std::string_view subject, const std::string& path)
    : subject_(subject), path_(resolved(path)), part_(str(path_, ".part", ::getpid())) {}

Replacement::~Replacement() {
  std::error_code ignored;
  fs::remove(part_, ignored);
}

void Replacement::commit() const {
  std::error_code error;
  fs::rename(part_, path_, error);
  if (error) throw Error(ErrorKind::backend, str(subject_, ": cannot write '", path_, "': ", error.message()));
}

void write_file(std::string_view subject, const std::string& file, const std::string& named,
                const std::function<void(std::ostream&)>& write) {
  std::ofstream out(file, std::ios::binary);
  if (out) write(out);
  out.close();
  if (!out) throw Error(ErrorKind::backend, str(subject, ": cannot write '", named, "': ", std::strerror(errno)));
}

void write_whole(std::string_view subject, const std::string& path, const std::function<void(std::ostream&)>& write) {
  std::error_code ignored;
  if (fs::exists(path, ignored) && !fs::is_regular_file(path, ignored)) {  // a pipe or /dev/stdout
    write_file(subject, path, path, write);
    return;
  }
  const Replacement whole(subject, path);
  write_file(subject, whole.part(), path, write);
  whole.commit();
}

}  // namespace stepgraph
