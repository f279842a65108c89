// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench_options.h"

namespace unisono::bench {

// Exit statuses of `unisono bench`.
inline constexpr int kExitSuccess = 0;
inline constexpr int kExitWrongResult = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitLibraryError = 3;

// Runs the benchmark and prints its table. Errors of the library go to stderr. Returns the exit
// status. Throws UsageError if the options do not fit the machine. The process must not have
// threads, because this may fork.
int runBench(const BenchOptions& options);

}  // namespace unisono::bench
