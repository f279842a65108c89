// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace unisono {

// Everything that a user can set through the environment or a configuration file, as plain values.
// Read when a communicator is created (by the runtime: once per process) and passed down as data,
// so that the pure layers never read the environment. The table in settings.cpp is the only list of
// names: no other file reads a variable.
struct Settings {
  // Device runtime.
  std::string backend;           // UNISONO_BACKEND: host, cuda, or empty (cuda if present)
  std::string hostTopologyFile;  // UNISONO_HOST_TOPOLOGY
  int64_t hostDevices = 8;       // UNISONO_HOST_DEVICES
  std::string hostExecutor;      // UNISONO_HOST_EXECUTOR: fibers (also if empty), threads, weak
  std::string hostBrokenLink;    // UNISONO_HOST_BROKEN_LINK: two devices, "0-1"
  int64_t hostSegmentBytes = 0;  // UNISONO_HOST_SEGMENT_BYTES; 0: every buffer is one allocation
  int64_t hostSeed = -1;         // UNISONO_HOST_SEED: 0 or more makes a run reproducible

  // Log.
  std::string debugLevel;  // NCCL_DEBUG: VERSION, WARN, INFO, ABORT, TRACE or empty
  std::string debugFile;   // NCCL_DEBUG_FILE

  // Bootstrap.
  std::string socketInterface;  // NCCL_SOCKET_IFNAME
  std::string socketFamily;     // NCCL_SOCKET_FAMILY: AF_INET, AF_INET6 or empty
  static constexpr int64_t kByCloud = -2;
  int64_t socketThreads = kByCloud;     // NCCL_SOCKET_NTHREADS
  int64_t socketsPerThread = kByCloud;  // NCCL_NSOCKS_PERTHREAD
  std::string commId;                   // NCCL_COMM_ID: address:port of the root
  std::string hostId;                   // NCCL_HOSTID
  std::string network;                  // NCCL_NET: Socket or what a plug-in calls itself
  std::string netPlugin;                // NCCL_NET_PLUGIN: a list
  bool ibDisable = false;               // NCCL_IB_DISABLE
  std::string ibAdapters;               // NCCL_IB_HCA: a list
  int64_t ibGidIndex = -1;              // NCCL_IB_GID_INDEX; -1: by the next three
  std::string ibAddressFamily;          // NCCL_IB_ADDR_FAMILY: AF_INET (also if empty), AF_INET6
  std::string ibAddressRange;           // NCCL_IB_ADDR_RANGE: address/bits
  int64_t ibRoceVersion = 2;            // NCCL_IB_ROCE_VERSION_NUM
  int64_t ibTimeout = 20;               // NCCL_IB_TIMEOUT: 4.096 us * 2^n
  int64_t ibRetries = 7;                // NCCL_IB_RETRY_CNT
  int64_t ibKeyIndex = 0;               // NCCL_IB_PKEY
  int64_t ibServiceLevel = -1;          // NCCL_IB_SL; -1: as the ncclConfig_t says
  int64_t ibTrafficClass = -1;          // NCCL_IB_TC; -1: as the ncclConfig_t says
  int64_t ibQueuePairs = 1;             // NCCL_IB_QPS_PER_CONNECTION
  bool ibSplitsData = false;            // NCCL_IB_SPLIT_DATA_ON_QPS
  int64_t ibAdaptiveRouting = -1;       // NCCL_IB_ADAPTIVE_ROUTING; -1: on InfiniBand
  int64_t ibAdaptiveRoutingThreshold = 8192;  // NCCL_IB_AR_THRESHOLD
  int64_t ibRelaxedOrdering = 2;              // NCCL_IB_PCI_RELAXED_ORDERING: 0 off, 1 on, 2 auto
  int64_t networkTimeoutSeconds = 120;        // UNISONO_NETWORK_TIMEOUT
  static constexpr int64_t kNoBootstrapTimeout = -1;
  int64_t bootstrapTimeoutSeconds = kNoBootstrapTimeout;  // UNISONO_BOOTSTRAP_TIMEOUT
  std::string commKeyFile;                                // UNISONO_COMM_KEY_FILE
  int64_t failureGraceMilliseconds = 500;                 // UNISONO_FAILURE_GRACE
  int64_t hangSeconds = 30;                               // UNISONO_HANG_SECONDS; 0: no watchdog
  std::string traceFile;                                  // UNISONO_TRACE
  bool ras = false;                                       // NCCL_RAS_ENABLE
  std::string rasAddress;                                 // NCCL_RAS_ADDR: host:port, or empty

  // Topology.
  std::string topologyFile;        // NCCL_TOPO_FILE
  std::string topologyDumpFile;    // NCCL_TOPO_DUMP_FILE
  int64_t topologyDumpRank = 0;    // NCCL_TOPO_DUMP_FILE_RANK
  bool ignoreCpuAffinity = false;  // NCCL_IGNORE_CPU_AFFINITY

  // Communicators.
  int64_t blocking = -1;         // NCCL_COMM_BLOCKING; -1: as the ncclConfig_t says
  bool multiRankDevice = false;  // NCCL_MULTI_RANK_GPU_ENABLE
  int64_t minChannels = 0;       // NCCL_MIN_NCHANNELS; 0: not set
  int64_t maxChannels = 0;       // NCCL_MAX_NCHANNELS; 0: not set
  int64_t minCtas = 0;           // NCCL_MIN_CTAS; 0: as the ncclConfig_t says
  int64_t maxCtas = 0;           // NCCL_MAX_CTAS; 0: as the ncclConfig_t says
  int64_t clusterBlocks = -1;    // NCCL_CGA_CLUSTER_SIZE; -1: as the ncclConfig_t says
  bool earlyLaunch = true;       // UNISONO_EARLY_LAUNCH
  bool inRemoteDomain = true;    // NCCL_MEM_SYNC_DOMAIN
  int64_t minPeerChannels = 0;   // NCCL_MIN_P2P_NCHANNELS; 0: automatic
  int64_t maxPeerChannels = 0;   // NCCL_MAX_P2P_NCHANNELS; 0: automatic
  int64_t netPeerChannels = 0;   // NCCL_NCHANNELS_PER_NET_PEER; 0: as the ncclConfig_t says
  int64_t bufferBytes = 0;       // NCCL_BUFFSIZE; 0: automatic
  int64_t llBufferBytes = 0;     // NCCL_LL_BUFFSIZE; 0: automatic
  int64_t ll128BufferBytes = 0;  // NCCL_LL128_BUFFSIZE; 0: automatic
  std::string algorithm;         // NCCL_ALGO
  std::string protocol;          // NCCL_PROTO
  std::string tunerPlugin;       // NCCL_TUNER_PLUGIN
  std::string profilerPlugin;    // NCCL_PROFILER_PLUGIN
  int64_t threads = 0;           // NCCL_NTHREADS; 0: automatic
  int64_t ll128Threads = 0;      // NCCL_LL128_NTHREADS; 0: automatic
  std::string threadThresholds;  // NCCL_THREAD_THRESHOLDS: up to six numbers, or empty
  int64_t netOverhead = -1;      // NCCL_NET_OVERHEAD: nanoseconds; negative: automatic
  bool ll128C2c = true;          // NCCL_LL128_C2C
  int64_t p2pLlThreshold = -1;   // NCCL_P2P_LL_THRESHOLD; -1: automatic
  bool deterministic = false;    // UNISONO_DETERMINISTIC
  int64_t pat = 2;               // NCCL_PAT_ENABLE: 0 never, 1 always, 2 with one rank per node
  std::string tuningFile;        // UNISONO_TUNING_FILE
  int64_t cuMem = -1;            // NCCL_CUMEM_ENABLE: -1 automatic, 0 legacy IPC, 1 VMM
  bool zeroCopy = true;          // UNISONO_ZERO_COPY
  int64_t zeroCopyBytes = int64_t{64} << 30;  // UNISONO_ZERO_COPY_BYTES

  // Paths and channels.
  std::string graphFile;               // NCCL_GRAPH_FILE
  std::string graphDumpFile;           // NCCL_GRAPH_DUMP_FILE
  int64_t graphDumpRank = 0;           // NCCL_GRAPH_DUMP_FILE_RANK
  bool p2pDisable = false;             // NCCL_P2P_DISABLE
  std::string p2pLevel;                // NCCL_P2P_LEVEL: a path type
  int64_t ignoreDisabledP2p = 0;       // NCCL_IGNORE_DISABLED_P2P: 0 report, 1 do not, 2 do not ask
  int64_t p2pRead = -1;                // NCCL_P2P_READ_ENABLE: -1 automatic, 0 write, 1 read
  bool verifyLinks = true;             // UNISONO_VERIFY_LINKS
  bool nvbDisable = false;             // NCCL_NVB_DISABLE
  bool shmDisable = false;             // NCCL_SHM_DISABLE
  int64_t shmLocality = 2;             // NCCL_SHM_LOCALITY: 1 sender, 2 receiver
  bool shmCopies = false;              // NCCL_SHM_USE_CUDA_MEMCPY
  int64_t shmCopyMode = 1;             // NCCL_SHM_MEMCPY_MODE: 1 sender, 2 receiver, 3 both
  std::string gdrLevel;                // NCCL_NET_GDR_LEVEL: a path type
  int64_t gdrRead = -1;                // NCCL_NET_GDR_READ: -1 automatic
  bool gdrC2c = true;                  // NCCL_NET_GDR_C2C
  bool forceFlush = false;             // NCCL_NET_FORCE_FLUSH
  bool dmaBuf = true;                  // NCCL_DMABUF_ENABLE
  bool netSharedBuffers = true;        // NCCL_NET_SHARED_BUFFERS
  bool pxnDisable = false;             // NCCL_PXN_DISABLE
  bool pxnC2c = true;                  // NCCL_PXN_C2C
  int64_t p2pPxnLevel = 2;             // NCCL_P2P_PXN_LEVEL
  int64_t nvls = 2;                    // NCCL_NVLS_ENABLE: 0 off
  std::string ctaPolicy;               // NCCL_CTA_POLICY; empty: as ncclConfig_t says
  int64_t collnet = -1;                // NCCL_COLLNET_ENABLE: -1 as ncclConfig_t says, 0 off, 1 on
  int64_t collnetNodes = 2;            // NCCL_COLLNET_NODE_THRESHOLD
  bool ignoreCollnetMismatch = false;  // NCCL_IGNORE_COLLNET_MISMATCH
  int64_t multiNodeNvlink = 2;         // NCCL_MNNVL_ENABLE: 0 off, 1 on, 2 automatic
  int64_t crossNic = 2;                // NCCL_CROSS_NIC: 0 never, 1 always, 2 when it is faster

  bool operator==(const Settings&) const = default;
};

// Reads the environment and the configuration files. An empty value counts as unset.
// - NCCL_*: a value that cannot be used is logged once and the default is taken.
// - UNISONO_*: such a value throws Error(invalidArgument) that names the variable, the value and
//   what is allowed. Unknown names are logged once.
Settings settingsFromEnvironment();

// Only debugLevel and debugFile. Neither throws nor logs.
Settings debugSettings();

// The settings that differ from the defaults, by the names of their variables, as texts of the
// values that are in force.
std::vector<std::pair<std::string, std::string>> changedSettings(const Settings& settings);

// The bounds on the number of channels: those of the environment combined with those of a
// communicator's ncclConfig_t, in NCCL's order of precedence. 0 stands for no bound.
struct ChannelBounds {
  int64_t min = 0, max = 0;
};
ChannelBounds channelBounds(const Settings& settings, ChannelBounds config = {});

// One row of the table of settings, for documentation.
struct SettingInfo {
  std::string name, values, defaultText, meaning;
};
std::vector<SettingInfo> settingsTable();

}  // namespace unisono
