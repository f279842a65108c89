// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "base/settings.h"
#include "topo_view.h"

namespace CLI {
class App;
}

// Which machine a command looks at: a topology file, a preset or this machine.
namespace unisono::topo {

struct MachineOptions {
  std::string file;        // topology file; empty: see preset
  std::string preset;      // of topology/presets.h; empty and no file: this machine
  int nodes = 1;           // machines in the communicator
  int ranksPerNode = 0;    // GPUs of each machine that the communicator uses; 0: all
  std::string root = "/";  // folder with the sys and proc of this machine
};

// Adds --file, --preset, --nodes and --root. `fileNames` are all names of the first.
void addMachineOptions(CLI::App& command, MachineOptions& options,
                       const std::string& fileNames = "--file");

// Throws Error for a file or a machine that cannot be used. What the driver says of peer-to-peer
// access goes to `rules`.
topology::XmlTopology readMachine(const MachineOptions& options, const Settings& settings,
                                  topology::PathSettings& rules);

// The settings that a communicator with this environment would use.
ViewSettings viewSettings(const Settings& settings, const MachineOptions& options);

// Text for a terminal: errors quote names and values from files.
std::string printableLines(std::string_view text);

// Writes to standard output. Throws Error(systemError) if that fails.
void print(const std::string& text);

}  // namespace unisono::topo
