// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "runtime/host/host_runtime.h"

namespace unisono::runtime::host {

inline Settings hostSettings(std::string executor = "fibers", int64_t seed = -1,
                             int64_t devices = 8) {
  Settings settings;
  settings.backend = "host";
  settings.hostExecutor = std::move(executor);
  settings.hostSeed = seed;
  settings.hostDevices = devices;
  return settings;
}

// Launches `function(arguments, context)`; Arguments is trivially copyable.
template <typename Arguments>
void launch(Runtime& runtime, Stream stream, const char* name,
            void (*function)(const void*, const HostGroupContext&), const Arguments& arguments,
            int blocks = 1, int groups = 1, size_t sharedBytes = 0) {
  Kernel kernel{name, nullptr, function};
  LaunchShape shape{.blocks = blocks,
                    .groupsPerBlock = groups,
                    .argumentBytes = sizeof(Arguments),
                    .sharedBytes = sharedBytes};
  runtime.launch(kernel, shape, &arguments, stream);
}

}  // namespace unisono::runtime::host
