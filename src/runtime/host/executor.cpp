#include "runtime/host/executor.h"

#include "base/error.h"

namespace unisono::runtime::host {

std::unique_ptr<Executor> createExecutor(const Settings& settings) {
  if (settings.hostExecutor.empty() || settings.hostExecutor == "fibers") {
    return createFiberExecutor(settings.hostSeed);
  }
  if (settings.hostExecutor == "threads") {
    if (settings.hostSeed >= 0) {
      throw invalidUsage("UNISONO_HOST_SEED={} needs fibers, but UNISONO_HOST_EXECUTOR=threads",
                         settings.hostSeed)
          .remedy("Unset one of the two");
    }
    return createThreadExecutor();
  }
  throw invalidArgument("UNISONO_HOST_EXECUTOR={} is not an executor", settings.hostExecutor)
      .remedy("Set it to fibers or threads, or unset it");
}

void Latch::arrive() {
  std::vector<Task*> ready;
  {
    std::lock_guard lock(mutex_);
    if (--count_ == 0) ready.swap(waiting_);
  }
  for (Task* task : ready) task->wake();
}

void Latch::wait() {
  Task* self = Task::current();
  {
    std::lock_guard lock(mutex_);
    if (count_ == 0) return;
    waiting_.push_back(self);
  }
  self->suspend();
  // Orders every arrival before what follows.
  std::lock_guard lock(mutex_);
}

}  // namespace unisono::runtime::host
