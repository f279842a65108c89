// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace unisono {

std::string hostName();
// Names this process to people: "process 17 on host n1".
std::string processName();
size_t pageBytes();

// `pattern` with the host's name for %h, the process id for %p and `rank` for %r. Without a rank %r
// stays as it is.
std::string expandFileName(std::string_view pattern, int rank = -1);

// `text` as a string of JSON, with its quotes.
std::string quoteJson(std::string_view text);

}  // namespace unisono
