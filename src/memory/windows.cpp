// SPDX-License-Identifier: Apache-2.0
#include "memory/windows.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/log.h"
#include "device/kernels.h"

namespace unisono::memory {
namespace {

using namespace std::chrono_literals;

// No other message of the library has this tag; those of connections have a purpose from 1 on in
// their upper bits.
constexpr uint64_t kTag = 1;
// How often freed memory is looked for, and the users of windows that are to be unmapped.
constexpr std::chrono::milliseconds kLookInterval = 200ms, kUsersInterval = 1ms;
// Only windows that were not used for so long make room for others.
constexpr std::chrono::seconds kIdle{1};
// Mappers take milliseconds. What is not mapped by then is copied.
constexpr std::chrono::seconds kLongestWait{5};

size_t indexOf(uint64_t window) {
  return window % device::kWindowSlots;
}

std::pair<uint64_t, uint64_t> keyOf(const runtime::Allocation& allocation) {
  return {allocation.base, allocation.bytes};
}

}  // namespace

std::shared_ptr<Windows> Windows::create(runtime::Runtime& runtime, int device,
                                         std::shared_ptr<Arena> arena,
                                         bootstrap::Bootstrap& bootstrap,
                                         const WindowOptions& options, Wake wake) {
  std::shared_ptr<Windows> windows(
      new Windows(runtime, device, std::move(arena), bootstrap, options, std::move(wake)));
  bootstrap.handleMessages(
      kTag, [weak = std::weak_ptr(windows)](int peer, std::vector<std::byte> message) {
        const std::shared_ptr<Windows> receiver = weak.lock();
        if (receiver == nullptr) return;
        {
          const std::lock_guard lock(receiver->mutex_);
          receiver->inbox_.emplace_back(peer, std::move(message));
        }
        receiver->wake_(receiver);
      });
  return windows;
}

Windows::Windows(runtime::Runtime& runtime, int device, std::shared_ptr<Arena> arena,
                 bootstrap::Bootstrap& bootstrap, const WindowOptions& options, Wake wake)
    : runtime_(runtime),
      device_(device),
      arena_(std::move(arena)),
      options_(options),
      wake_(std::move(wake)),
      bootstrap_(&bootstrap),
      stream_(runtime.createStream(device)),
      users_(runtime.allocatePinned(sizeof(uint64_t))),
      nextLook_(Clock::now()) {
  const size_t entries = options_.peers.size() * device::kWindowSlots;
  table_ = reinterpret_cast<device::MappedWindow*>(
      arena_->allocate(entries * sizeof(device::MappedWindow)).address);
}

device::WindowReference Windows::find(const void* address, uint64_t bytes, int peer, bool kept) {
  const runtime::Allocation allocation = runtime_.findRun(address, bytes);
  if (allocation.serial == 0) return {};
  const uint64_t offset = reinterpret_cast<uint64_t>(address) - allocation.base;
  uint64_t id = 0;
  bool isNews = false;
  {
    const std::lock_guard lock(mutex_);
    OwnWindow* window = findOwn(allocation);
    if (window == nullptr || window->id == 0) return {};
    window->lastUse = Clock::now();
    window->kept |= kept;
    id = window->id;
    isNews = tell(*window, peer);
  }
  if (isNews) wake_(shared_from_this());
  return {id, offset};
}

uint64_t Windows::registerMemory(const void* address, uint64_t bytes) {
  const runtime::Allocation allocation = runtime_.findRun(address, bytes);
  if (allocation.serial == 0) return 0;
  uint64_t id = 0;
  {
    const std::lock_guard lock(mutex_);
    OwnWindow* window = findOwn(allocation);
    if (window == nullptr || window->id == 0) return 0;
    window->registrations++;
    id = window->id;
    tell(*window, -1);
  }
  wake_(shared_from_this());
  return id;
}

void Windows::unregisterMemory(uint64_t id) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(own_.begin(), own_.end(),
                                    [id](const auto& entry) { return entry.second.id == id; });
    if (id == 0 || found == own_.end() || --found->second.registrations > 0) return;
    retire(found->second);
    own_.erase(found);
  }
  wake_(shared_from_this());
}

template <typename Ready>
void Windows::await(std::unique_lock<std::mutex>& lock, const std::function<bool()>& ended,
                    Ready ready) {
  const Clock::time_point deadline = Clock::now() + kLongestWait;
  while (!ready() && !closed_ && !ended() && Clock::now() < deadline) {
    answeredChanged_.wait_for(lock, 20ms);
  }
}

bool Windows::awaitAnnounced(uint64_t id, const std::function<bool()>& ended) {
  std::unique_lock lock(mutex_);
  const auto find = [&]() -> const OwnWindow* {
    const auto found = std::find_if(own_.begin(), own_.end(),
                                    [id](const auto& entry) { return entry.second.id == id; });
    return id == 0 || found == own_.end() ? nullptr : &found->second;
  };
  await(lock, ended, [&] {
    const OwnWindow* window = find();
    return window == nullptr || window->told == window->wanted;
  });
  const OwnWindow* window = find();
  return window != nullptr && window->told == window->wanted;
}

void Windows::awaitMapped(int peer, uint64_t id, const std::function<bool()>& ended) {
  if (!options_.peers[static_cast<size_t>(peer)]) return;
  std::unique_lock lock(mutex_);
  await(lock, ended, [&] { return answered_[{peer, indexOf(id)}].window >= id; });
}

std::shared_ptr<runtime::MappedMemory> Windows::mapped(int peer, uint64_t id) const {
  const std::lock_guard lock(mutex_);
  const auto found = answered_.find({peer, indexOf(id)});
  if (found == answered_.end() || found->second.window != id) return nullptr;
  return found->second.memory.lock();
}

// With the lock held, as the functions below. Returns the window of an allocation, which may be one
// that cannot be shared, or null if there is no room. On the thread of a call, during which the
// application does not free the memory.
Windows::OwnWindow* Windows::findOwn(const runtime::Allocation& allocation) {
  if (closed_) return nullptr;
  auto found = own_.find(keyOf(allocation));
  if (found != own_.end() && found->second.allocation != allocation) {
    retire(found->second);
    own_.erase(found);
    found = own_.end();
  }
  if (found != own_.end()) return &found->second;
  if (!makeRoom(allocation.bytes)) {
    logOnce(roomLogged_, fmt::format("UNISONO_ZERO_COPY_BYTES is {}, or there are {} windows: some "
                                     "buffers are not mapped by peers",
                                     options_.maxBytes, device::kWindowSlots));
    return nullptr;
  }
  runtime_.retainRun(allocation);
  const auto index = std::find(indexUsed_.begin(), indexUsed_.end(), false);
  *index = true;
  const auto number = static_cast<uint64_t>(index - indexUsed_.begin());
  const std::vector<bool> none(options_.peers.size());
  ownBytes_ += allocation.bytes;
  const OwnWindow window{
      ++generation_ * device::kWindowSlots + number, allocation, none, none, Clock::now(), false};
  return &own_.emplace(keyOf(allocation), window).first->second;
}

// Has the mapper tell `peer` (-1: every peer) of a window. Returns whether it is news to any.
bool Windows::tell(OwnWindow& window, int peer) {
  bool isNews = false;
  const size_t first = peer < 0 ? 0 : static_cast<size_t>(peer);
  const size_t end = peer < 0 ? options_.peers.size() : first + 1;
  for (size_t p = first; p < end; p++) {
    if (!options_.peers[p] || window.wanted[p]) continue;
    window.wanted[p] = isNews = true;
  }
  return isNews;
}

// Gives up windows that have not been used lately. Returns whether there is room then.
bool Windows::makeRoom(uint64_t bytes) {
  if (bytes > options_.maxBytes) return false;
  const Clock::time_point now = Clock::now();
  for (;;) {
    const bool hasIndex =
        std::find(indexUsed_.begin(), indexUsed_.end(), false) != indexUsed_.end();
    if (hasIndex && ownBytes_ + bytes <= options_.maxBytes) return true;
    auto oldest = own_.end();
    for (auto window = own_.begin(); window != own_.end(); ++window) {
      const OwnWindow& one = window->second;
      if (one.id == 0 || one.kept || one.registrations > 0 || now - one.lastUse < kIdle) continue;
      if (oldest == own_.end() || one.lastUse < oldest->second.lastUse) oldest = window;
    }
    if (oldest == own_.end()) return false;
    retire(oldest->second);
    own_.erase(oldest);
  }
}

// The caller removes it from own_. The mapper tells the peers.
void Windows::retire(const OwnWindow& window) {
  if (window.id == 0) return;
  ownBytes_ -= window.allocation.bytes;
  indexUsed_[indexOf(window.id)] = false;
  retired_.push_back({window.id, window.told});
}

std::optional<std::chrono::milliseconds> Windows::work() {
  const runtime::DeviceScope scope(runtime_, device_);
  receive();
  for (auto window = mapped_.begin(); window != mapped_.end();) {
    // The next message for this index may wait for the end of the removal.
    const bool ended =
        window->second.unmapping && change(window->first, device::WindowChange::look) == 0;
    if (ended) mappedBytes_ -= window->second.bytes;
    window = ended ? mapped_.erase(window) : std::next(window);
  }
  for (size_t count = waiting_.size(); count > 0; count--) {
    const auto [peer, message] = waiting_.front();
    waiting_.pop_front();
    map(peer, message);
  }
  if (Clock::now() >= nextLook_) {
    findFreed();
    nextLook_ = Clock::now() + kLookInterval;
  }
  announce();

  const bool removes = std::any_of(mapped_.begin(), mapped_.end(),
                                   [](const auto& entry) { return entry.second.unmapping; });
  if (removes) return kUsersInterval;
  const std::lock_guard lock(mutex_);
  if (!inbox_.empty() || !retired_.empty()) return 0ms;
  if (own_.empty()) return std::nullopt;
  return kLookInterval;
}

void Windows::findFreed() {
  std::vector<runtime::Allocation> allocations;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, window] : own_) allocations.push_back(window.allocation);
  }
  bool any = false;
  for (const runtime::Allocation& allocation : allocations) {
    if (runtime_.findRun(reinterpret_cast<void*>(allocation.base), allocation.bytes) ==
        allocation) {
      continue;
    }
    any = true;
    const std::lock_guard lock(mutex_);
    const auto found = own_.find(keyOf(allocation));
    if (found == own_.end() || found->second.allocation != allocation) continue;
    retire(found->second);
    own_.erase(found);
  }
  if (any) runtime_.releaseFreedExports();
}

// Tells the peers of windows that are gone, then of those that are new to them.
void Windows::announce() {
  std::vector<RetiredWindow> retired;
  std::vector<std::pair<runtime::Allocation, uint64_t>> news;
  {
    const std::lock_guard lock(mutex_);
    retired.swap(retired_);
    for (const auto& [key, window] : own_) {
      if (window.id != 0 && window.wanted != window.told) {
        news.emplace_back(window.allocation, window.id);
      }
    }
  }
  for (const RetiredWindow& window : retired) {
    for (size_t peer = 0; peer < window.told.size(); peer++) {
      if (window.told[peer]) send(static_cast<int>(peer), {window.id, {}});
    }
  }
  for (const auto& [allocation, id] : news) {
    WindowMessage message{id, {}};
    std::string failure;
    try {
      message.handles = runtime_.exportRun(allocation);
    } catch (const Error& error) {
      failure = error.what();
    }
    std::vector<size_t> to;
    {
      const std::lock_guard lock(mutex_);
      const auto found = own_.find(keyOf(allocation));
      if (found == own_.end() || found->second.id != id) continue;
      OwnWindow& window = found->second;
      if (!failure.empty()) {
        // Not asked for again as long as it is the same memory.
        ownBytes_ -= allocation.bytes;
        indexUsed_[indexOf(id)] = false;
        window.id = 0;
      } else {
        for (size_t peer = 0; peer < window.told.size(); peer++) {
          if (window.wanted[peer] && !window.told[peer]) to.push_back(peer);
        }
        window.told = window.wanted;
      }
    }
    if (!failure.empty()) {
      logOnce(exportLogged_,
              fmt::format("peers cannot map a buffer of {} bytes and it is copied: {}",
                          allocation.bytes, failure));
    }
    for (const size_t peer : to) send(static_cast<int>(peer), message);
  }
  if (!news.empty()) answeredChanged_.notify_all();
}

void Windows::send(int peer, const WindowMessage& message) {
  const std::lock_guard lock(bootstrapMutex_);
  if (bootstrap_ == nullptr) return;
  try {
    std::vector<std::byte> bytes;
    const auto append = [&bytes](std::span<const std::byte> more) {
      bytes.insert(bytes.end(), more.begin(), more.end());
    };
    append(std::as_bytes(std::span(&message.window, 1)));
    append(std::as_bytes(std::span(message.handles)));
    bootstrap_->send(peer, kTag, bytes);
  } catch (const Error& error) {
    // It has ended, and its mappings with it.
    logInfo("rank {}: rank {} is told of no window: {}", options_.rank, peer, error.what());
  }
}

void Windows::receive() {
  std::deque<std::pair<int, std::vector<std::byte>>> messages;
  {
    const std::lock_guard lock(mutex_);
    messages.swap(inbox_);
  }
  for (const auto& [peer, bytes] : messages) {
    WindowMessage message{};
    constexpr size_t kHead = sizeof(message.window), kEach = sizeof(runtime::MemoryHandle);
    if (bytes.size() < kHead || (bytes.size() - kHead) % kEach != 0 ||
        !options_.peers[static_cast<size_t>(peer)]) {
      continue;
    }
    std::memcpy(&message.window, bytes.data(), kHead);
    for (size_t offset = kHead; offset < bytes.size(); offset += kEach) {
      std::memcpy(&message.handles.emplace_back(), bytes.data() + offset, kEach);
    }
    if (!message.handles.empty()) {
      map(peer, message);
      const WindowEntry place(peer, indexOf(message.window));
      const auto found = mapped_.find(place);
      const bool isMapped = found != mapped_.end() && found->second.id == message.window;
      const std::lock_guard lock(mutex_);
      answered_[place] = {message.window, {}};
      if (isMapped) answered_[place].memory = found->second.memory;
      answeredChanged_.notify_all();
      continue;
    }
    std::erase_if(waiting_, [&, from = peer](const auto& entry) {
      return entry.first == from && entry.second.window == message.window;
    });
    const auto found = mapped_.find({peer, indexOf(message.window)});
    if (found == mapped_.end() || found->second.id != message.window) continue;
    unmap(found->first, found->second);
  }
}

void Windows::map(int peer, const WindowMessage& message) {
  const WindowEntry place(peer, indexOf(message.window));
  if (mapped_.contains(place)) {
    waiting_.emplace_back(peer, message);
    return;
  }
  uint64_t bytes = 0;
  for (const runtime::MemoryHandle& handle : message.handles) bytes += handle.bytes;
  if (mappedBytes_ + bytes > options_.maxBytes) {
    uint64_t leaving = 0;
    for (const auto& [entry, window] : mapped_) leaving += window.unmapping ? window.bytes : 0;
    if (mappedBytes_ - leaving + bytes <= options_.maxBytes) {
      // The window that made room for this one is still in use.
      waiting_.emplace_back(peer, message);
      return;
    }
    logOnce(roomLogged_, fmt::format("UNISONO_ZERO_COPY_BYTES is {}: not all buffers of peers are "
                                     "mapped",
                                     options_.maxBytes));
    return;
  }
  std::shared_ptr<runtime::MappedMemory> memory;
  try {
    memory = runtime_.importRun(message.handles, device_);
  } catch (const Error& error) {
    logOnce(mapLogged_, fmt::format("a buffer of rank {} cannot be mapped, so data for it is "
                                    "copied (this is normal if it was just freed): {}",
                                    peer, error.what()));
    return;
  }
  change(place, device::WindowChange::map, message.window, memory->address());
  mapped_.emplace(place, PeerWindow{message.window, std::move(memory), bytes, false});
  mappedBytes_ += bytes;
  logInfo("rank {}: mapped {} bytes of rank {}, window {}", options_.rank, bytes, peer,
          message.window);
}

void Windows::unmap(const WindowEntry& place, PeerWindow& window) {
  if (window.unmapping) return;
  change(place, device::WindowChange::unmap);
  window.unmapping = true;
}

// Returns the number of users.
uint64_t Windows::change(const WindowEntry& place, device::WindowChange change, uint64_t window,
                         void* base) {
  device::ChangeWindowArguments arguments{};
  arguments.entry = table_ + static_cast<size_t>(place.first) * device::kWindowSlots + place.second;
  arguments.change = change;
  arguments.window = window;
  arguments.base = static_cast<std::byte*>(base);
  arguments.users = static_cast<uint64_t*>(users_->deviceAddress());
  runtime::LaunchShape shape;
  shape.argumentBytes = sizeof(arguments);
  runtime_.launch(device::changeWindowKernel(), shape, &arguments, stream_.get());
  runtime_.synchronize(stream_.get());
  return *static_cast<const uint64_t*>(users_->hostAddress());
}

void Windows::close(bool aborted) {
  std::vector<RetiredWindow> retired;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    for (const auto& [key, window] : own_) retire(window);
    own_.clear();
    retired.swap(retired_);
    inbox_.clear();
    answeredChanged_.notify_all();
  }
  for (const RetiredWindow& window : retired) {
    for (size_t peer = 0; !aborted && peer < window.told.size(); peer++) {
      if (window.told[peer]) send(static_cast<int>(peer), {window.id, {}});
    }
  }
  const std::lock_guard lock(bootstrapMutex_);
  bootstrap_ = nullptr;
}

Windows::WindowStatistics Windows::statistics() const {
  const std::lock_guard lock(mutex_);
  return {ownBytes_, mappedBytes_};
}

void Windows::logOnce(std::atomic<bool>& logged, const std::string& text) const {
  if (!logged.exchange(true)) logInfo("rank {}: {}", options_.rank, text);
}

}  // namespace unisono::memory
