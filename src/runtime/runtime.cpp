// SPDX-License-Identifier: Apache-2.0
#include "runtime/runtime.h"

#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>

#include "base/error.h"
#include "base/log.h"
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
