// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "transport/net/network_driver.h"

namespace unisono::transport {

// Opens InfiniBand and RoCE through libibverbs. Returns null if the settings leave no usable port,
// and says why in `problem`. Unless `isNamed`, the library is loaded only where the kernel has
// adapters. `trafficClass` is that of the communicator, -1 without one.
std::shared_ptr<const NetworkDriver> openVerbs(const Settings& settings, bool isNamed,
                                               int trafficClass, std::string& problem);

}  // namespace unisono::transport
