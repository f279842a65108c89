// SPDX-License-Identifier: Apache-2.0
#include "base/fork.h"

#include <pthread.h>

#include <atomic>

#include "base/error.h"

namespace unisono {

int forkCount() {
  static std::atomic<int> forks{0};
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] { forks++; });
  if (registered != 0) throw systemError(registered, "pthread_atfork");
  return forks;
}

void checkNotForked(int forks, const char* what) {
  if (forks == forkCount()) return;
  throw invalidUsage("{} belongs to the parent of this process, which was forked later", what)
      .remedy("Fork first, or start processes by exec (Python: the start method spawn)");
}

}  // namespace unisono
