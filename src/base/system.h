// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>

namespace unisono {

std::string hostName();
size_t pageBytes();

}  // namespace unisono
