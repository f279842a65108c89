// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/reactor.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "base/open_descriptor.h"
#include "base/thread.h"

namespace unisono::bootstrap {

Reactor::Reactor()
    : process_(::getpid()),
      wakeUp_(openDescriptor([] { return ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); }, "eventfd")) {
  poller_.add(wakeUp_.get());
  startThread("unisono-boot", [this] { run(); }).detach();
}

// Never destroyed: the thread runs until the process ends.
Reactor& Reactor::ofThisProcess() {
  static std::mutex mutex;
  static Reactor* current = nullptr;
  std::lock_guard lock(mutex);
  if (current == nullptr || !current->isOurs()) current = new Reactor();
  return *current;
}

bool Reactor::isOurs() const {
  return process_ == ::getpid();
}

uint32_t Reactor::add(Handler& handler) {
  std::lock_guard lock(mutex_);
  do {
    lastNumber_++;
  } while (handlers_.count(lastNumber_) != 0);
  handlers_.emplace(lastNumber_, &handler);
  return lastNumber_;
}

void Reactor::remove(uint32_t number) {
  if (!isOurs()) return;
  std::lock_guard lock(mutex_);
  handlers_.erase(number);
}

void Reactor::watch(uint32_t number, int descriptor, Poller::Interest interest) {
  poller_.add(descriptor, interest, number);
}

void Reactor::setInterest(uint32_t number, int descriptor, Poller::Interest interest) {
  poller_.setInterest(descriptor, interest, number);
}

void Reactor::forget(int descriptor) {
  if (isOurs()) poller_.remove(descriptor);
}

void Reactor::requestTick() {
  if (!isOurs() || tickRequested_.exchange(true)) return;
  static_cast<void>(::eventfd_write(wakeUp_.get(), 1));
}

void Reactor::run() {
  Clock::time_point lastTick = Clock::now();
  for (;;) {
    const bool ticks = Stranger::count() > 0 || tickRequested_;
    try {
      for (const Poller::Ready& ready :
           poller_.wait(ticks ? kTick : std::chrono::milliseconds(-1))) {
        if (ready.descriptor == wakeUp_.get()) {
          eventfd_t count = 0;
          static_cast<void>(::eventfd_read(wakeUp_.get(), &count));
          continue;
        }
        std::lock_guard lock(mutex_);
        const auto handler = handlers_.find(ready.owner);
        if (handler != handlers_.end()) handler->second->serve(ready.descriptor);
      }
      if (!ticks || Clock::now() - lastTick < kTick) continue;
      lastTick = Clock::now();
      tickRequested_ = false;
      std::lock_guard lock(mutex_);
      for (const auto& [number, handler] : handlers_) handler->tick();
    } catch (const std::exception& error) {
      // Nothing else may end the thread: every communicator of this process depends on it.
      logWarn("The thread that connects ranks: {}", error.what());
    }
  }
}

size_t Stranger::max() {
  return std::clamp<size_t>(maxDescriptors() / 4, 1, kMaxStrangers);
}

}  // namespace unisono::bootstrap
