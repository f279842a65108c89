// SPDX-License-Identifier: Apache-2.0
#include "runtime/runtime.h"

#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>

#include "base/error.h"
#include "base/log.h"
#include "base/math.h"
#include "runtime/fallback.h"

namespace unisono::runtime {
namespace {

// Set when the runtime is created. Never destroyed, as the runtime.
std::string& fallbackText() {
  static auto* text = new std::string;
  return *text;
}

std::unique_ptr<Runtime> createRuntime(const Settings& settings) {
  if (settings.backend == "host") return createHostRuntime(settings);
#ifdef UNISONO_CUDA
  if (settings.backend == "cuda") return createCudaRuntime(settings);
  if (settings.backend.empty()) {
    try {
      return createCudaRuntime(settings);
    } catch (const Error& error) {
      fallbackText() = error.what();
      logInfo("No usable GPU ({}); using simulated devices", error.what());
      return createHostRuntime(settings);
    }
  }
#else
  if (settings.backend.empty()) {
    fallbackText() = "this library was built without CUDA";
    return createHostRuntime(settings);
  }
  if (settings.backend == "cuda") {
    throw invalidUsage("UNISONO_BACKEND=cuda, but this library was built without CUDA")
        .remedy("Build the preset `cuda`, or set UNISONO_BACKEND=host");
  }
#endif
  throw invalidArgument("UNISONO_BACKEND={} is not a backend", settings.backend)
      .remedy("Set it to host or cuda, or unset it");
}

}  // namespace

Runtime& Runtime::get() {
  // Never destroyed: streams and memory of static objects may outlive every destructor of ours.
  static std::mutex mutex;
  static Runtime* instance = nullptr;
  std::lock_guard lock(mutex);
  if (instance == nullptr) instance = createRuntime(settingsFromEnvironment()).release();
  return *instance;
}

Allocation Runtime::findRun(const void* address, size_t bytes) {
  Allocation run = findAllocation(address);
  const uint64_t offset = reinterpret_cast<uint64_t>(address) - run.base;
  for (int allocations = 1; run.serial != 0 && run.bytes - offset < bytes; allocations++) {
    if (allocations == kLongestRun) return {};
    const uint64_t end = run.base + run.bytes;
    const Allocation next = findAllocation(reinterpret_cast<const void*>(end));
    if (next.serial == 0 || next.base != end) return {};
    run.bytes += next.bytes;
    run.serial = mix64(run.serial) + next.serial;
  }
  return run;
}

template <typename Visit>
void Runtime::visitRun(const Allocation& run, Visit visit) {
  const uint64_t end = run.base + run.bytes;
  for (uint64_t base = run.base; base < end;) {
    const auto* address = reinterpret_cast<const void*>(base);
    const Allocation allocation = findAllocation(address);
    if (allocation.serial == 0 || allocation.base != base || allocation.bytes > end - base) {
      throw invalidArgument("The memory at {} was freed", address);
    }
    visit(address, allocation.bytes);
    base += allocation.bytes;
  }
}

void Runtime::retainRun(const Allocation& run) {
  visitRun(run, [&](const void* address, size_t) { retain(address); });
}

std::vector<MemoryHandle> Runtime::exportRun(const Allocation& run) {
  std::vector<MemoryHandle> handles;
  visitRun(run, [&](const void* address, size_t bytes) {
    handles.push_back(exportRetained(address, bytes));
  });
  return handles;
}

void checkRun(std::span<const MemoryHandle> handles) {
  if (handles.empty()) throw invalidArgument("No memory handle was given");
  for (const MemoryHandle& handle : handles) {
    const uint64_t offset = handle.address - handle.base;
    if (handle.address < handle.base || offset > handle.baseBytes ||
        handle.bytes > handle.baseBytes - offset) {
      throw invalidArgument(
          "A memory handle names {} bytes at {:#x}, outside of its allocation of {} bytes at {:#x}",
          handle.bytes, handle.address, handle.baseBytes, handle.base);
    }
  }
  for (size_t i = 1; i < handles.size(); i++) {
    const MemoryHandle &before = handles[i - 1], &here = handles[i];
    const uint64_t end = before.base + before.baseBytes;
    if (before.address + before.bytes != end || here.address != here.base || here.base != end ||
        before.device != here.device || before.process != here.process ||
        before.kind != here.kind) {
      throw invalidArgument(
          "The memory handle of {} bytes at {:#x} does not continue the one of {} bytes at {:#x}",
          here.bytes, here.address, before.bytes, before.address)
          .remedy("Buffers that span several allocations must be on one device");
    }
  }
}

void ParallelCopies::enqueue(std::span<const Range> copies, Stream stream) {
  for (const Range& copy : copies) runtime_.copyAsync(copy.to, copy.from, copy.bytes, stream);
}

std::unique_ptr<ParallelCopies> Runtime::createParallelCopies(int /*device*/) {
  return std::make_unique<ParallelCopies>(*this);
}

const std::string& whyNoGpu() {
  return fallbackText();
}

uint64_t processToken() {
  // A child of fork() is a process of its own.
  static std::mutex mutex;
  static pid_t process = 0;
  static uint64_t token = 0;
  std::lock_guard lock(mutex);
  if (process != ::getpid()) {
    if (::getrandom(&token, sizeof(token), 0) != sizeof(token)) {
      throw systemError(errno, "getrandom");
    }
    process = ::getpid();
  }
  return token;
}

}  // namespace unisono::runtime
