// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "transport/net/network_driver.h"

namespace unisono::transport {

// InfiniBand and RoCE through libibverbs. Null where there is no port that the settings allow;
// `problem` then says why. Unless `isNamed`, the library is loaded only where the kernel has
// adapters. `trafficClass` is that of the communicator, -1 without one.
std::shared_ptr<const NetworkDriver> openVerbs(const Settings& settings, bool isNamed,
                                               int trafficClass, std::string& problem);

}  // namespace unisono::transport
