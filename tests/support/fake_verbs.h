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

// A number that it counts in this process. Sets it to 0 where `reset` says so.
inline int fakeVerbsCounter(const char* name, bool reset = false) {
  void* const library = loadFakeVerbs();
  int* const counter = static_cast<int*>(::dlsym(library, name));
  const int value = __atomic_load_n(counter, __ATOMIC_SEQ_CST);
  if (reset) __atomic_store_n(counter, 0, __ATOMIC_SEQ_CST);
  ::dlclose(library);
  return value;
}

}  // namespace unisono::testing
