#pragma once

#include "bench_options.h"

namespace unisono::bench {

// Exit statuses of `unisono bench`.
inline constexpr int kExitRight = 0;
inline constexpr int kExitWrongResult = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitLibraryError = 3;

// Runs the whole benchmark and prints its table; errors of the library go to stderr. Returns the
// exit status. Throws UsageError when the options do not fit the machine. The process must be
// without threads, for it may fork.
int runBench(const BenchOptions& options);

}  // namespace unisono::bench
