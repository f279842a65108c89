// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>

#include "base/error.h"

namespace unisono::bench {

// An empty file in the temporary directory that is removed at the end.
class TemporaryFile {
 public:
  explicit TemporaryFile(const char* ending) {
    path_ = (std::filesystem::temp_directory_path() / "unisono-XXXXXX").string() + ending;
    const int descriptor = ::mkstemps(path_.data(), static_cast<int>(std::strlen(ending)));
    if (descriptor < 0) throw systemError(errno, "creating a file in the temporary directory");
    ::close(descriptor);
  }
  ~TemporaryFile() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace unisono::bench
