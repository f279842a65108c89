// SPDX-License-Identifier: Apache-2.0
#include "plugin/library.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <strings.h>

#include <cstdio>

#include "base/log.h"

namespace unisono::plugin {

OpenLibrary openPlugin(const std::string& kind, const std::string& setting, const Warn& warn) {
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
    return nullptr;
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
