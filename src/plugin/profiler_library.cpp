// SPDX-License-Identifier: Apache-2.0
#include "plugin/profiler_library.h"

#include <fmt/format.h>

#include <map>

#include "base/log.h"

namespace unisono::plugin {

using namespace profiler_interface;

ProfilerLibrary* ProfilerLibrary::open(const std::string& setting, const Warn& warn) {
  static auto* mutex = new std::mutex;
  static auto* opened = new std::map<std::string, std::unique_ptr<ProfilerLibrary>>;
  const std::lock_guard lock(*mutex);
  const auto [entry, isNew] = opened->try_emplace(setting);
  if (isNew) entry->second = load(setting, warn);
  return entry->second.get();
}

std::unique_ptr<ProfilerLibrary> ProfilerLibrary::load(const std::string& setting,
                                                       const Warn& warn) {
  auto library = std::make_unique<ProfilerLibrary>();
  library->library_ = openPlugin("profiler", setting, warn, "ncclProfiler_v");
  if (library->library_ == nullptr) return nullptr;
  const std::string name = setting.empty() ? "libnccl-profiler.so" : setting;
  int version = 0;
  const auto find = [&]<typename Version>(const Version*, int number) {
    const void* found =
        findSymbol(library->library_, fmt::format("ncclProfiler_v{}", number).c_str());
    if (found == nullptr) return false;
    library->functions = static_cast<const Version*>(found);
    version = number;
    return true;
  };
  constexpr const FunctionsV6* kV6 = nullptr;
  const bool found = find(kV6, 6) || find(kV6, 5) ||
                     find(static_cast<const FunctionsV4*>(nullptr), 4) ||
                     find(static_cast<const FunctionsV3*>(nullptr), 3) ||
                     find(static_cast<const FunctionsV2*>(nullptr), 2) ||
                     find(static_cast<const FunctionsV1*>(nullptr), 1);
  const bool complete = found && std::visit(
                                     [](const auto* each) {
                                       return each->init && each->startEvent && each->stopEvent &&
                                              each->recordEventState && each->finalize;
                                     },
                                     library->functions);
  if (!complete) {
    warn(fmt::format("The profiler plug-in {} is ignored: it {}", name,
                     found ? "lacks a function of its interface"
                           : "has none of ncclProfiler_v1 to ncclProfiler_v6"));
    return nullptr;
  }
  const char* own = std::visit([](const auto* each) { return each->name; }, library->functions);
  logInfo("The profiler plug-in {} is used: {} (v{})", name, own == nullptr ? "no name" : own,
          version);
  return library;
}

}  // namespace unisono::plugin
