// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "base/settings.h"
#include "runtime/runtime.h"

namespace unisono::runtime::host {

// The simulated devices: one for each <gpu> of settings.hostTopologyFile in the order of its `dev`
// attributes, else settings.hostDevices like ones. Throws Error that names the file and the cause.
std::vector<DeviceProperties> simulatedDevices(const Settings& settings);

}  // namespace unisono::runtime::host
