// SPDX-License-Identifier: Apache-2.0
#include "comm/background.h"

#include <utility>

#include "base/thread.h"

namespace unisono::comm {

std::shared_ptr<Background> Background::start(const char* name, std::function<void()> body) {
  auto work = std::make_shared<Background>();
  startThread(name, [work, body = std::move(body)]() mutable {
    body();
    body = nullptr;
    const std::lock_guard lock(work->mutex_);
    work->done_.store(true, std::memory_order_release);
    work->changed_.notify_all();
  }).detach();
  return work;
}

void Background::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return done(); });
}

}  // namespace unisono::comm
