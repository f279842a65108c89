// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "machine_options.h"

namespace unisono::explain {

// The arguments as parsed, before they are checked.
struct ExplainArguments {
  std::string operation = "all_reduce";
  std::string size = "1M", minSize = "8", maxSize = "1G";
  std::string type = "float", reduction = "sum";
  int ranks = 0;  // in all; 0: every GPU
  topo::MachineOptions machine;
  bool asNccl = false, multicast = false, collnet = false;
  bool run = false;
  bool rangeGiven = false;  // --min or --max
  std::string jsonFile;     // "-": standard output; empty: none
  std::string svgFile;      // empty: no plot
};

// Adds `explain` to the program's commands. Parsing fills `arguments`.
CLI::App* addExplainCommand(CLI::App& app, ExplainArguments& arguments);

// Runs the command and returns the exit status: 0; 1 if a run had wrong results; 2 for wrong
// options and unusable files, with the cause on standard error; 3 if a run failed. With --run the
// process must not have threads.
int runExplain(const ExplainArguments& arguments);

}  // namespace unisono::explain
