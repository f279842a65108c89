// SPDX-License-Identifier: Apache-2.0
#include "base/configuration_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>

namespace unisono {
namespace {

constexpr size_t kMaxBytes = 1 << 20;

// Reads at most one byte more than `kMaxBytes`. Returns an errno value, 0 for success.
int readWhole(int file, std::string& text) {
  text.resize(kMaxBytes + 1);
  size_t size = 0;
  while (size < text.size()) {
    const ssize_t got = ::read(file, text.data() + size, text.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    if (got == 0) break;
    size += static_cast<size_t>(got);
  }
  text.resize(size);
  return 0;
}

// Reads a file without ever blocking. Returns why it cannot be used, "" if it can.
std::string readRegularFile(const std::string& path, bool required, std::string& text) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (file < 0) {
    if (errno == ENOENT && !required) return "";
    return std::strerror(errno);
  }
  struct stat status {};
  int error = ::fstat(file, &status) == 0 ? 0 : errno;
  const bool regular = S_ISREG(status.st_mode);
  if (error == 0 && regular) error = readWhole(file, text);
  ::close(file);
  if (error != 0) return std::strerror(error);
  if (!regular) return "it is not a regular file";
  if (text.size() > kMaxBytes) return fmt::format("it is larger than {} bytes", kMaxBytes);
  return "";
}

std::string homeDirectory() {
  passwd entry{};
  passwd* found = nullptr;
  std::string buffer(1024, '\0');
  int error = ERANGE;
  while (error == ERANGE && buffer.size() <= kMaxBytes) {
    buffer.resize(2 * buffer.size());
    error = ::getpwuid_r(::getuid(), &entry, buffer.data(), buffer.size(), &found);
  }
  return error == 0 && found != nullptr && found->pw_dir != nullptr ? found->pw_dir : "";
}

}  // namespace

void addConfigurationFile(Configuration& configuration, const std::string& path, bool required) {
  std::string text;
  const std::string problem = readRegularFile(path, required, text);
  if (!problem.empty()) {
    configuration.problems.push_back(
        fmt::format("The configuration file {} was not read: {}", path, problem));
    return;
  }
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), line.size() + 1));
    const size_t equals = line.find('=');
    if (line.starts_with('#') || equals == std::string_view::npos) continue;
    configuration.values.emplace(line.substr(0, equals), line.substr(equals + 1));
  }
}

Configuration readConfigurationFiles(const std::string& userFile) {
  Configuration configuration;
  if (!userFile.empty()) {
    addConfigurationFile(configuration, userFile, true);
  } else if (const std::string home = homeDirectory(); !home.empty()) {
    addConfigurationFile(configuration, home + "/.nccl.conf", false);
  }
  addConfigurationFile(configuration, "/etc/nccl.conf", false);
  return configuration;
}

}  // namespace unisono
