// SPDX-License-Identifier: Apache-2.0
#include "diagnose/timeline.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>

#include "base/fork.h"
#include "base/log.h"
#include "base/system.h"
#include "diagnose/journal.h"

namespace unisono::diagnose {
namespace {

constexpr std::string_view kTail = "\n]}\n";
// Times of the file count from the last multiple of 90 days, so that microseconds have enough
// digits as floating point numbers. PyTorch's profiler uses the same base.
constexpr int64_t kBasePeriod = int64_t{90} * 24 * 3600 * 1'000'000'000;

// Throws nothing: returns whether all was written.
bool writeAt(int file, std::string_view text, int64_t offset) {
  while (!text.empty()) {
    const ssize_t written = ::pwrite(file, text.data(), text.size(), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    text.remove_prefix(static_cast<size_t>(written));
    offset += written;
  }
  return true;
}

// Whether the file still has a name.
bool isThere(int file) {
  struct stat status {};
  return ::fstat(file, &status) == 0 && status.st_nlink > 0;
}

}  // namespace

std::shared_ptr<Timeline> Timeline::open(const std::string& pattern, int rank) {
  // Never destroyed, because threads may add events until the process has ended.
  static auto* mutex = new std::mutex;
  static auto* opened = new std::map<std::string, std::shared_ptr<Timeline>>;
  [[maybe_unused]] static const int registered = std::atexit([] {
    const std::unique_lock lock(*mutex, std::try_to_lock);
    if (!lock) return;
    for (const auto& [path, timeline] : *opened) {
      if (timeline != nullptr) timeline->flush();
    }
  });
  const std::string path = expandFileName(pattern, rank);
  const std::lock_guard lock(*mutex);
  std::shared_ptr<Timeline>& known = (*opened)[path];
  if (known != nullptr && known->isCurrent()) return known;
  const auto refuse = [&](const char* why) {
    warnOnce(
        fmt::format("UNISONO_TRACE: {} cannot be written, so there is no timeline: {}", path, why));
    return nullptr;
  };
  UniqueDescriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
  if (file.get() < 0) return refuse(std::strerror(errno));
  if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    return refuse("another process writes it. Use %p or %r in the name");
  }
  if (::ftruncate(file.get(), 0) != 0) return refuse(std::strerror(errno));
  known.reset(new Timeline(path, std::move(file)));
  return known;
}

Timeline::Timeline(std::string path, UniqueDescriptor file)
    : path_(std::move(path)), forks_(forkCount()), file_(std::move(file)) {
  const int64_t now = std::chrono::duration_cast<std::chrono::nanoseconds>(
                          std::chrono::system_clock::now().time_since_epoch())
                          .count();
  const int64_t base = now / kBasePeriod * kBasePeriod;
  offset_ = now - base - steadyNow();
  pending_ = fmt::format(
      "{{\"schemaVersion\": 1, \"displayTimeUnit\": \"ns\", \"baseTimeNanoseconds\": {},\n"
      "\"traceEvents\": [",
      base);
}

bool Timeline::isCurrent() {
  if (forks_ != forkCount()) return false;  // a fork may have left the mutex locked
  const std::lock_guard lock(mutex_);
  return file_.get() < 0 || isThere(file_.get());
}

double Timeline::microseconds(int64_t steady) const {
  return static_cast<double>(steady + offset_) / 1000;
}

void Timeline::append(std::string_view event) {
  if (file_.get() < 0) return;
  pending_ += isEmpty_ ? "\n" : ",\n";
  pending_ += event;
  isEmpty_ = false;
}

void Timeline::nameProcess(int64_t process, std::string_view name) {
  const std::lock_guard lock(mutex_);
  append(fmt::format(R"({{"ph": "M", "name": "process_name", "pid": {}, "tid": 0, )"
                     R"("args": {{"name": {}}}}})",
                     process, quoteJson(name)));
}

void Timeline::nameThread(Track track, std::string_view name) {
  const std::lock_guard lock(mutex_);
  append(fmt::format(R"({{"ph": "M", "name": "thread_name", "pid": {}, "tid": {}, )"
                     R"("args": {{"name": {}}}}})",
                     track.process, track.thread, quoteJson(name)));
}

void Timeline::add(const Slice& slice) {
  const std::string event = fmt::format(
      R"({{"ph": "X", "cat": "{}", "name": {}, "pid": {}, "tid": {}, "ts": {:.3f}, "dur": {:.3f}, )"
      R"("args": {{{}}}}})",
      slice.category, quoteJson(slice.name), slice.track.process, slice.track.thread,
      microseconds(slice.start), static_cast<double>(slice.end - slice.start) / 1000,
      slice.arguments);
  const std::lock_guard lock(mutex_);
  append(event);
}

void Timeline::addArrow(Track from, int64_t start, Track to, int64_t end) {
  const std::lock_guard lock(mutex_);
  const uint64_t id = ++arrows_;
  const auto half = [&](const char* phase, Track track, int64_t time) {
    append(fmt::format(R"({{"ph": {}, "id": {}, "cat": "ac2g", "name": "ac2g", "pid": {}, )"
                       R"("tid": {}, "ts": {:.3f}}})",
                       phase, id, track.process, track.thread, microseconds(time)));
  };
  half(R"("s")", from, start);
  half(R"("f", "bp": "e")", to, end);
}

void Timeline::flush() noexcept {
  if (forks_ != forkCount()) return;
  try {
    const std::lock_guard lock(mutex_);
    if (file_.get() < 0 || pending_.empty()) return;
    const auto size = static_cast<int64_t>(pending_.size());
    pending_ += kTail;
    if (!writeAt(file_.get(), pending_, end_)) {
      warnOnce(fmt::format("UNISONO_TRACE: {} cannot be written any more: {}", path_,
                           std::strerror(errno)));
      file_ = UniqueDescriptor();
    }
    end_ += size;
    pending_.clear();
  } catch (const std::exception&) {
    // No memory: what is pending is written by the next flush.
  }
}

}  // namespace unisono::diagnose
