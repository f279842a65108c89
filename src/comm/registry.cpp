#include "comm/registry.h"

#include <deque>
#include <shared_mutex>
#include <unordered_map>

#include "base/thread.h"

namespace unisono::comm {

Handle::~Handle() {
  if (thread_.joinable()) {
    // Only the making is given up: what was launched since then still has to come to its end.
    if (building_.load(std::memory_order_acquire)) abort_->raise();
    thread_.join();
  }
}

void Handle::build(const Maker& make) {
  try {
    auto made = make(abort_);
    std::lock_guard lock(mutex_);
    communicator_ = std::move(made);
  } catch (const Error& error) {
    std::lock_guard lock(mutex_);
    error_ = error;
  } catch (const std::exception& error) {
    std::lock_guard lock(mutex_);
    error_ = internalError("{}", error.what());
  }
  building_.store(false, std::memory_order_release);
}

void Handle::buildInBackground(Maker make) {
  try {
    thread_ = startThread("unisono-init", [this, make = std::move(make)] { build(make); });
  } catch (const Error& error) {
    build([&](const auto&) -> std::shared_ptr<Communicator> { throw error; });
  }
}

ErrorCode Handle::state() const {
  if (building_.load(std::memory_order_acquire)) return ErrorCode::inProgress;
  std::lock_guard lock(mutex_);
  return error_ ? error_->code() : ErrorCode::success;
}

std::shared_ptr<Communicator> Handle::communicator() const {
  if (building_.load(std::memory_order_acquire)) {
    throw invalidArgument("The communicator is still being made")
        .remedy(
            "Wait until ncclCommGetAsyncError no longer says ncclInProgress (or, inside a "
            "group, until ncclGroupEnd)");
  }
  std::lock_guard lock(mutex_);
  if (error_) throw *error_;
  return communicator_;
}

std::shared_ptr<Communicator> Handle::usable() const {
  auto made = communicator();
  if (finalized_) {
    throw invalidUsage("The communicator was finalized")
        .remedy("Make all calls before ncclCommFinalize; afterwards only ncclCommDestroy is left");
  }
  return made;
}

void Handle::finalize() {
  auto made = communicator();
  if (finalized_.exchange(true)) {
    throw invalidArgument("The communicator was finalized before")
        .remedy("Call ncclCommFinalize once, then ncclCommDestroy");
  }
  made->finish();
}

void Handle::fail(const Error& error) {
  std::lock_guard lock(mutex_);
  if (!error_) error_ = error;
}

std::string Handle::lastError() const {
  std::lock_guard lock(mutex_);
  return error_ ? error_->what() : "";
}

void Handle::abort() {
  abort_->raise();
  fail(invalidUsage("The communicator was aborted").remedy("Destroy it and make another"));
}

void Handle::keep(std::shared_ptr<Handle> other) {
  std::lock_guard lock(mutex_);
  std::erase_if(kept_, [](const auto& kept) { return kept->state() != ErrorCode::inProgress; });
  kept_.push_back(std::move(other));
}

namespace {

struct Registry {
  std::shared_mutex mutex;
  std::unordered_map<HandleId, std::shared_ptr<Handle>> live;
  std::deque<char> addresses;  // one byte a handle ever made: its address is the id
};

Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

Error unknownHandle(HandleId id) {
  if (id == nullptr) {
    return invalidArgument("The communicator is null").remedy("Pass one that was initialized");
  }
  return invalidArgument("{} is not a communicator, or it was destroyed", id)
      .remedy("Do not use a communicator after ncclCommDestroy or ncclCommAbort");
}

}  // namespace

HandleId registerHandle(std::shared_ptr<Handle> handle) {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  HandleId id = &all.addresses.emplace_back();
  all.live.emplace(id, std::move(handle));
  return id;
}

std::shared_ptr<Handle> findHandle(HandleId id) {
  Registry& all = registry();
  std::shared_lock lock(all.mutex);
  auto entry = all.live.find(id);
  if (entry == all.live.end()) throw unknownHandle(id);
  return entry->second;
}

std::shared_ptr<Handle> releaseHandle(HandleId id) {
  std::shared_ptr<Handle> handle = releaseIfLive(id);
  if (handle == nullptr) throw unknownHandle(id);
  return handle;
}

std::shared_ptr<Handle> releaseIfLive(HandleId id) {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  auto entry = all.live.find(id);
  if (entry == all.live.end()) return nullptr;
  std::shared_ptr<Handle> handle = std::move(entry->second);
  all.live.erase(entry);
  return handle;
}

}  // namespace unisono::comm
