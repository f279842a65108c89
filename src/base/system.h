// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace unisono {

std::string hostName();
// Names this process to people: "process 17 on host n1".
std::string processName();
size_t pageBytes();

// Tells the PID namespaces of this machine apart; 0: unknown.
uint64_t pidNamespace();
// Whether a process of this PID namespace has ended with all its threads, so that its files are
// closed. Another process that has its number since then counts as itself.
bool hasEnded(pid_t process);

// `pattern` with the host's name for %h, the process id for %p and `rank` for %r. Without a rank %r
// stays as it is.
std::string expandFileName(std::string_view pattern, int rank = -1);

// `text` as a string of JSON, with its quotes.
std::string quoteJson(std::string_view text);

}  // namespace unisono
