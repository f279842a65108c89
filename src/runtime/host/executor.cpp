// SPDX-License-Identifier: Apache-2.0
#include "runtime/host/executor.h"

#include <algorithm>

#include "base/error.h"

namespace unisono::runtime::host {

std::unique_ptr<Executor> createExecutor(const Settings& settings) {
  if (settings.hostExecutor.empty() || settings.hostExecutor == "fibers") {
    return createFiberExecutor({.seed = settings.hostSeed});
  }
  if (settings.hostExecutor == "weak") {
    return createFiberExecutor({.seed = std::max<int64_t>(settings.hostSeed, 0),
                                .memory = Schedule::Memory::weak,
                                .splitsGroups = true});
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
      .remedy("Set it to fibers, threads or weak, or unset it");
}

void Latch::arrive() {
  std::vector<HostTask*> ready;
  {
    std::lock_guard lock(mutex_);
    if (HostTask* self = HostTask::current()) self->publish(arrived_);
    if (--count_ == 0) ready.swap(waiting_);
  }
  for (HostTask* task : ready) task->wake();
}

void Latch::wait() {
  HostTask* self = HostTask::current();
  {
    std::lock_guard lock(mutex_);
    if (count_ == 0) return self->observe(arrived_);
    waiting_.push_back(self);
  }
  self->suspend();
  // Orders every arrival before what follows.
  std::lock_guard lock(mutex_);
  self->observe(arrived_);
}

}  // namespace unisono::runtime::host
