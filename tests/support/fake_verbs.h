// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <dlfcn.h>

#include <stdexcept>

// The libibverbs of net/fake_verbs.cpp.
namespace unisono::testing {

// Loads it, so that the library finds it in place of the one of the system.
inline void* loadFakeVerbs() {
  void* const library = ::dlopen(UNISONO_FAKE_VERBS, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(::dlerror());
  return library;
}

// A number that it counts in this process.
inline int fakeVerbsCounter(const char* name) {
  void* const library = loadFakeVerbs();
  const int value = __atomic_load_n(static_cast<int*>(::dlsym(library, name)), __ATOMIC_SEQ_CST);
  ::dlclose(library);
  return value;
}

}  // namespace unisono::testing
