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

}  // namespace unisono
