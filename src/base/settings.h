#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace unisono {

// Everything that a user can set through the environment, as plain values. Read once a
// communicator (a process for the runtime) and handed down as data, so that the pure layers never
// read the environment. The table in settings.cpp is the only list of names.
struct Settings {
  // Device runtime.
  std::string backend;           // UNISONO_BACKEND: host, cuda, or empty (cuda if present)
  std::string hostTopologyFile;  // UNISONO_HOST_TOPOLOGY: devices of the host backend
  int64_t hostDevices = 8;       // UNISONO_HOST_DEVICES: how many without a topology file
  std::string hostExecutor;      // UNISONO_HOST_EXECUTOR: fibers (default) or threads
  int64_t hostSeed = -1;         // UNISONO_HOST_SEED: >= 0 makes schedules replayable

  // Bootstrap.
  std::string socketInterface;            // NCCL_SOCKET_IFNAME
  std::string socketFamily;               // NCCL_SOCKET_FAMILY: AF_INET, AF_INET6 or empty
  std::string commId;                     // NCCL_COMM_ID: address:port of the root
  std::string hostId;                     // NCCL_HOSTID: makes one host look like several
  int64_t bootstrapTimeoutSeconds = 120;  // UNISONO_BOOTSTRAP_TIMEOUT

  // Topology.
  std::string topologyFile;      // NCCL_TOPO_FILE: read in place of the platform's file
  std::string topologyDumpFile;  // NCCL_TOPO_DUMP_FILE: where the detected machine is written

  // Communicators.
  bool multiRankDevice = false;  // NCCL_MULTI_RANK_GPU_ENABLE: several ranks on one device
  int64_t minChannels = 0;       // NCCL_MIN_NCHANNELS, NCCL_MIN_CTAS; 0: not set
  int64_t maxChannels = 0;       // NCCL_MAX_NCHANNELS, NCCL_MAX_CTAS; 0: not set
  int64_t bufferBytes = 0;       // NCCL_BUFFSIZE: bytes of one connection's FIFO; 0: default
  int64_t threads = 0;           // NCCL_NTHREADS; 0: default
  std::string algorithm;         // NCCL_ALGO
  int64_t cuMem = -1;            // NCCL_CUMEM_ENABLE: -1 automatic, 0 legacy IPC, 1 VMM

  // Paths and channels.
  std::string graphFile;      // NCCL_GRAPH_FILE
  std::string graphDumpFile;  // NCCL_GRAPH_DUMP_FILE
  bool p2pDisable = false;    // NCCL_P2P_DISABLE
  std::string p2pLevel;       // NCCL_P2P_LEVEL: a path type
  int64_t p2pRead = -1;     // NCCL_P2P_READ_ENABLE: -1 automatic, 0 senders push, 1 receivers pull
  bool nvbDisable = false;  // NCCL_NVB_DISABLE
  bool shmDisable = false;  // NCCL_SHM_DISABLE
  std::string gdrLevel;     // NCCL_NET_GDR_LEVEL: a path type
  int64_t gdrRead = -1;     // NCCL_NET_GDR_READ: -1 automatic
  bool gdrC2c = true;       // NCCL_NET_GDR_C2C
  bool pxnDisable = false;  // NCCL_PXN_DISABLE
  bool pxnC2c = true;       // NCCL_PXN_C2C
  bool multiNodeNvlink = true;  // NCCL_MNNVL_ENABLE
  int64_t crossNic = 2;         // NCCL_CROSS_NIC: 0 never, 1 always, 2 where it gives more
};

// Reads the environment. A value that does not parse throws Error(invalidArgument) that names the
// variable, the value and what is allowed. An unknown variable UNISONO_* is warned of, once.
Settings settingsFromEnvironment();

// One line of the table of settings, for documentation and `unisono doctor`.
struct SettingInfo {
  const char* name;
  const char* type;
  const char* defaultText;
  const char* meaning;
};
std::vector<SettingInfo> settingsTable();

}  // namespace unisono
