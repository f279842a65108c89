// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cerrno>
#include <cstddef>
#include <string_view>

#include "base/unique_descriptor.h"

namespace unisono {

// Raises the soft limit of open files (RLIMIT_NOFILE) of this process to the hard limit.
void raiseDescriptorLimit();

// The hard limit of open files: how many descriptors this process can have at most.
size_t maxDescriptors();

// Throws the Error of a call that returned no descriptor, with a remedy where descriptors ran out.
[[noreturn]] void throwNoDescriptor(int error, std::string_view call);

// Calls `open` and returns its result: a descriptor, or -1 with errno set. Many ranks in one
// process can need more descriptors than the usual soft limit of 1024 allows, so when a call fails
// for that reason the limit is raised and the call repeated. The limit is left alone until then:
// programs that use select() depend on small descriptor numbers.
template <typename Open>
int tryOpenDescriptor(Open open) {
  int descriptor = open();
  if (descriptor < 0 && errno == EMFILE) {
    raiseDescriptorLimit();
    // Also when the limit was not raised: another thread may have done it.
    descriptor = open();
  }
  return descriptor;
}

// The same, but throws Error(systemError) that names `call` when there is no descriptor.
template <typename Open>
UniqueDescriptor openDescriptor(Open open, std::string_view call) {
  const int descriptor = tryOpenDescriptor(open);
  if (descriptor < 0) throwNoDescriptor(errno, call);
  return UniqueDescriptor(descriptor);
}

}  // namespace unisono
