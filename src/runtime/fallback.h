// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace unisono::runtime {

// Why Runtime::get() chose the host backend although the user did not ask for it; "" otherwise. A
// sentence or a clause, for errors of programs that expected a GPU.
const std::string& whyNoGpu();

}  // namespace unisono::runtime
