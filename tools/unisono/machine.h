// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bench_options.h"
#include "device_api.h"
#include "library_table.h"
#include "rank_set.h"

// The machine that a run uses, and which worker drives which of its GPUs.
namespace unisono::bench {

// A library and the access to its devices. A run has ours and perhaps another.
struct Side {
  std::unique_ptr<Library> library;
  std::unique_ptr<DeviceApi> device;  // destroyed before the library
};

// Sets the environment variables that the libraries read when they are loaded: the machine file
// and, with several nodes, the node of this process. Call before the first library is loaded.
void setEnvironment(const BenchOptions& options, int node);

// Loads the libraries and chooses the backend. Throws unisono::Error.
std::vector<Side> loadSides(const BenchOptions& options, std::string* backend);

struct BenchMachine {
  std::string backend;
  std::vector<std::string> deviceNames;
  std::string libraryPath;
  std::string libraryVersion;
  std::string otherPath;
  std::string otherVersion;
};
BenchMachine describe(const std::vector<Side>& sides, const std::string& backend);
std::string toText(const BenchMachine& machine);
BenchMachine machineFromText(const std::string& text);

// Ranks are numbered node by node, process by process, thread by thread, GPU by GPU.
struct Placement {
  int nodes = 1;
  int processesPerNode = 1;
  int threads = 1;  // of a process
  int gpus = 1;     // of a thread
  int devices = 1;  // of a node, or of all if they share a machine
  bool processPerGpu = false;
  bool oneMachine = false;  // is divided among the nodes

  int processes() const { return nodes * processesPerNode; }
  int workers() const { return processes() * threads; }
  int ranks() const { return workers() * gpus; }
  int nodeOf(int process) const { return process / processesPerNode; }
  // The ranks of one worker; workers are numbered process by process.
  std::vector<LocalRank> ranksOf(int worker) const;
};

// Divides the GPUs of a CUDA machine among the nodes; on the host backend every node has all.
// `shareDevices`: allows more ranks than GPUs and assigns the GPUs round-robin. Throws UsageError
// if the options do not fit the machine.
Placement place(const BenchOptions& options, const BenchMachine& machine, bool shareDevices);

}  // namespace unisono::bench
