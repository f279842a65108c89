// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <dlfcn.h>

#include <string>

// The network plug-in of system/fake_net.c, one library for each version of the interface.
namespace unisono::testing {

inline std::string fakeNetPath(int version) {
  return std::string(UNISONO_FAKE_NETS) + "/libnccl-net-fake" + std::to_string(version) + ".so";
}

// A number that the plug-in counts in this process.
inline int fakeNetCounter(int version, const char* name) {
  void* library = ::dlopen(fakeNetPath(version).c_str(), RTLD_NOW | RTLD_LOCAL);
  const int value = __atomic_load_n(static_cast<int*>(::dlsym(library, name)), __ATOMIC_SEQ_CST);
  ::dlclose(library);
  return value;
}

}  // namespace unisono::testing
