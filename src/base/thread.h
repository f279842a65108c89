// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <thread>

namespace unisono {

// Starts a thread of the library with the given name (at most 15 characters, shown by ps and
// debuggers). Signals that are sent to the process stay with the application's threads: the new
// thread blocks all but those that report its own faults (SIGSEGV and the like), so that crash
// handlers still run. The caller's signal mask is the same afterwards in every case. Throws
// Error(systemError) if the system refuses the thread.
std::thread startThread(const char* name, std::function<void()> body);

}  // namespace unisono
