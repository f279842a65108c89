// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "machine_options.h"

namespace CLI {
class App;
}

namespace unisono::topo {

struct TopoOptions : MachineOptions {
  bool noJoined = false;  // leave out the channels of the whole communicator
  std::string svgFile;    // empty: no picture
  std::string svgPattern = "ring";
  std::string jsonFile;          // "-": standard output; empty: none
  std::vector<std::string> why;  // two names, or none
  std::string dumpFile;          // topology file to write
  std::string graphFile;         // graph file to write
};

// Adds `topo` to the program's commands. Parsing fills `options`.
CLI::App* addTopoCommand(CLI::App& app, TopoOptions& options);

// Runs the command and returns the exit status: 0, or 2 for wrong options and for bad or unreadable
// files, with the cause on standard error.
int runTopo(const TopoOptions& options);

}  // namespace unisono::topo
