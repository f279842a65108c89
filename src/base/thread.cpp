// SPDX-License-Identifier: Apache-2.0
#include "base/thread.h"

#include <pthread.h>
#include <signal.h>

#include <system_error>

#include "base/error.h"

namespace unisono {
namespace {

// Blocks signals in the calling thread for its lifetime; a thread inherits the mask of its creator,
// so no signal can reach it between its start and its first statement.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t blocked;
    ::sigfillset(&blocked);
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) {
      ::sigdelset(&blocked, fault);
    }
    ::pthread_sigmask(SIG_SETMASK, &blocked, &before_);
  }
  ~BlockedSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

std::thread startThread(const char* name, std::function<void()> body) {
  BlockedSignals blocked;
  try {
    return std::thread([name, body = std::move(body)] {
      ::pthread_setname_np(::pthread_self(), name);
      body();
    });
  } catch (const std::system_error& error) {
    throw systemError(error.code().value(), fmt::format("Starting the thread {}", name))
        .remedy("Raise the limit of processes and threads (ulimit -u), or use fewer ranks");
  }
}

}  // namespace unisono
