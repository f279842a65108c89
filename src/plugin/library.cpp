// SPDX-License-Identifier: Apache-2.0
#include "plugin/library.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <strings.h>

#include <cstdio>
#include <mutex>
#include <utility>

#include "base/log.h"

namespace unisono::plugin {

namespace {

struct StartedNet {
  std::mutex mutex;
  OpenLibrary library;

  static StartedNet& get() {
    static auto& started = *new StartedNet;
    return started;
  }
};

// Null unless the library of the net plug-in has a table of another kind.
OpenLibrary startedNetWith(const std::string& prefix) {
  constexpr int kMostVersions = 16;
  StartedNet& started = StartedNet::get();
  const std::lock_guard lock(started.mutex);
  if (prefix.empty() || started.library == nullptr) return nullptr;
  for (int version = 1; version <= kMostVersions; version++) {
    const std::string name = prefix + std::to_string(version);
    if (findSymbol(started.library, name.c_str()) != nullptr) return started.library;
  }
  return nullptr;
}

}  // namespace

void noteStartedNet(OpenLibrary library) {
  StartedNet& started = StartedNet::get();
  const std::lock_guard lock(started.mutex);
  started.library = std::move(library);
}

OpenLibrary openPlugin(const std::string& kind, const std::string& setting, const Warn& warn,
                       const std::string& prefix) {
  if (::strcasecmp(setting.c_str(), "none") == 0) return nullptr;
  std::string problem;
  const auto tryOpen = [&](const std::string& name) {
    const bool program = ::strcasecmp(name.c_str(), "STATIC_PLUGIN") == 0;
    void* handle = ::dlopen(program ? nullptr : name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      const char* text = ::dlerror();
      problem += (problem.empty() ? "" : "; ") + std::string(text == nullptr ? name : text);
    }
    return handle;
  };
  const std::string name = setting.empty() ? "libnccl-" + kind + ".so" : setting;
  void* handle = tryOpen(name);
  const bool isWord =
      name.find('/') == std::string::npos && !(name.starts_with("lib") && name.ends_with(".so"));
  if (handle == nullptr && isWord) handle = tryOpen("libnccl-" + kind + "-" + name + ".so");
  if (handle == nullptr) {
    const bool absent = problem.find("No such file or directory") != std::string::npos;
    if (!setting.empty() || !absent) {
      warn(fmt::format("The {} plug-in {} cannot be loaded and is ignored: {}", kind, name,
                       problem));
    }
    return startedNetWith(prefix);
  }
  return {handle, [](void* library) { ::dlclose(library); }};
}

const void* findSymbol(const OpenLibrary& library, const char* name) {
  return ::dlsym(library.get(), name);
}

void writePluginLog(const char* kind, int level, const char* format, va_list arguments) {
  char text[1024];
  std::vsnprintf(text, sizeof(text), format, arguments);
  if (level == kLogWarn) {
    logWarn("{} plug-in: {}", kind, text);
  } else if (level > kLogWarn) {
    logInfo("{} plug-in: {}", kind, text);
  }
}

}  // namespace unisono::plugin
