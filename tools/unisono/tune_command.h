// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "machine_options.h"

namespace unisono::tune {

// The arguments as parsed, before they are checked.
struct TuneArguments {
  std::string output;
  std::string ranks;  // numbers of ranks, separated by commas; empty: every GPU
  std::string minSize = "1K";
  std::string maxSize;  // empty: by backend
  topo::MachineOptions machine;
};

// Adds `tune` to the program's commands. Parsing fills `arguments`.
CLI::App* addTuneCommand(CLI::App& app, TuneArguments& arguments);

// Measures every algorithm with every protocol and writes the table. Returns the exit status: 0; 1
// if a result was wrong; 2 for wrong options and unusable files; 3 if a run failed. The cause is on
// standard error, and the output file is not written.
int runTune(const TuneArguments& arguments);

}  // namespace unisono::tune
