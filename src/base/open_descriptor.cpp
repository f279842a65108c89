// SPDX-License-Identifier: Apache-2.0
#include "base/open_descriptor.h"

#include <sys/resource.h>

#include "base/error.h"

namespace unisono {

void raiseDescriptorLimit() {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

size_t maxDescriptors() {
  rlimit limit = {};
  // The smallest limit that POSIX allows, if the system does not tell.
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 20;
  return static_cast<size_t>(limit.rlim_max);
}

void throwNoDescriptor(int error, std::string_view call) {
  Error result = systemError(error, call);
  if (error == EMFILE) {
    result.remedy(fmt::format(
        "This process may have {} open files and has reached this limit: raise it (ulimit -Hn)",
        maxDescriptors()));
  } else if (error == ENFILE) {
    result.remedy("The system's limit of open files is reached: raise fs.file-max");
  }
  throw result;
}

}  // namespace unisono
