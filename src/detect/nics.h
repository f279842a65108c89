// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "detect/sysfs.h"

namespace unisono::detect {

// A network port that traffic between hosts can use.
struct NicPort {
  std::string name;              // "mlx5_1", "eth0"
  int dev = -1;                  // its number among the ports
  std::filesystem::path device;  // of its adapter in sysfs, links followed; empty: none
  long long megabits = 0;        // per second
  int port = 0;                  // of the adapter; a socket interface has 0
  uint64_t guid = 0;             // of the adapter
  double latency = 0;            // microseconds; 0: unknown
  long long connections = 0;     // that can be open at once; 0: unknown
  bool gdr = false;              // it can read and write GPU memory
  bool collective = false;       // its network reduces (CollNet)
};

// The InfiniBand and RoCE ports that are up; where there is none, the interfaces for sockets that
// are up. The loopback, containers' bridges and members of a bridge or bond are left out.
std::vector<NicPort> findPorts(const Sysfs& sysfs);

}  // namespace unisono::detect
