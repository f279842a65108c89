// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "plugin/library.h"
#include "plugin/profiler_interface.h"

namespace unisono::plugin {

// See profiler.h.
class ProfilerLibrary {
 public:
  // Null if the library cannot be used, which is reported the first time.
  static ProfilerLibrary* open(const std::string& setting, const Warn& warn);

  profiler_interface::AnyFunctions functions;
  std::mutex initMutex;
  int wanted = 0;

 private:
  static std::unique_ptr<ProfilerLibrary> load(const std::string& setting, const Warn& warn);

  OpenLibrary library_;
};

}  // namespace unisono::plugin
