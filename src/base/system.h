// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>

namespace unisono {

std::string hostName();
// Names this process to people: "process 17 on host n1".
std::string processName();
size_t pageBytes();

}  // namespace unisono
