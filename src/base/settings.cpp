// SPDX-License-Identifier: Apache-2.0
#include "base/settings.h"

#include <strings.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <limits>
#include <span>
#include <sstream>
#include <string_view>
#include <variant>

#include "base/configuration_file.h"
#include "base/error.h"
#include "base/log.h"

extern char** environ;

namespace unisono {
namespace {

// The types of a row. Each says which member a value goes to, how it is parsed and what is allowed.

// Any number but 0 is true, as in NCCL.
struct Flag {
  bool Settings::*field;
};

// As Flag, with negative numbers for automatic (-1).
struct OptionalFlag {
  int64_t Settings::*field;
};

// What becomes of a number that is out of range: NCCL accepts them all, each variable in its own
// way. Those of UNISONO_* are always errors.
enum class OutOfRange { clamp, useDefault, useLowest, useHighest };

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

struct Number {
  int64_t Settings::*field;
  int64_t lowest, highest;
  OutOfRange outOfRange = OutOfRange::useDefault;
  const char* unit = nullptr;
};

// One of the names in `values`, which `|` separates; case does not matter. The member gets the name
// as it is spelled here. `numbered` has the names for which a number is accepted too: 0 for the
// first and so on, where greater numbers stand for the last.
struct Choice {
  std::string Settings::*field;
  std::string_view values;
  std::string_view numbered = {};
};

// Taken as it is. Whoever uses it parses it: `kind` says what it has to be.
struct Text {
  std::string Settings::*field;
  const char* kind;
};

// At most `count` numbers, separated by blanks.
struct NumberList {
  std::string Settings::*field;
  size_t count;
};

// NCCL_CONF_FILE, which is read before all others.
struct ConfigurationPath {};

struct Row {
  const char* name;
  std::variant<Flag, OptionalFlag, Number, Choice, Text, NumberList, ConfigurationPath> type;
  const char* defaultText;
  const char* meaning;
};

using S = Settings;

constexpr const char* kConfigurationVariable = "NCCL_CONF_FILE";
constexpr int64_t kMaxChannels = 64;
constexpr int64_t kLongestSeconds = 100'000'000;
constexpr std::string_view kPathTypes = "LOC|NVL|NVB|C2C|PIX|PXB|P2C|PXN|PHB|SYS";
constexpr std::string_view kNumberedPathTypes = "LOC|PIX|PXB|PHB|SYS";

constexpr Row kRows[] = {
    {"UNISONO_BACKEND", Choice{&S::backend, "host|cuda"}, "cuda if there is a GPU",
     "device runtime to use"},
    {"UNISONO_HOST_TOPOLOGY", Text{&S::hostTopologyFile, "file"}, "none",
     "topology file whose GPUs the host backend simulates"},
    {"UNISONO_HOST_DEVICES", Number{&S::hostDevices, 1, 1024}, "8",
     "number of simulated GPUs when no topology file is set"},
    {"UNISONO_HOST_EXECUTOR", Choice{&S::hostExecutor, "fibers|threads|weak"}, "fibers",
     "how simulated GPUs run their kernels"},
    {"UNISONO_HOST_SEED", Number{&S::hostSeed, -1, kUnlimited}, "-1",
     "seed of the fiber schedule: 0 or more makes a run reproducible"},
    {"UNISONO_HOST_BROKEN_LINK", Text{&S::hostBrokenLink, "device-device"}, "none",
     "link of two simulated GPUs that changes data which is copied over it, for tests: 0-1"},
    {"UNISONO_HOST_SEGMENT_BYTES",
     Number{&S::hostSegmentBytes, 0, kUnlimited, OutOfRange::useDefault, "bytes"}, "0",
     "for tests: makes larger buffers of simulated GPUs of adjacent allocations of this size, like "
     "PyTorch's expandable segments, for tests"},
    {kConfigurationVariable, ConfigurationPath{}, "~/.nccl.conf",
     "configuration file to read before /etc/nccl.conf"},
    {"NCCL_DEBUG", Choice{&S::debugLevel, "VERSION|WARN|INFO|ABORT|TRACE"}, "no log",
     "what to log; each level includes the ones before it"},
    {"NCCL_DEBUG_FILE", Text{&S::debugFile, "file"}, "standard error",
     "file to append the log to; %h stands for the host, %p for the process id"},
    {"NCCL_SOCKET_IFNAME", Text{&S::socketInterface, "list"}, "automatic",
     "network interfaces for sockets, by prefix; a leading ^ excludes them, = requires the exact "
     "name"},
    {"NCCL_SOCKET_FAMILY", Choice{&S::socketFamily, "AF_INET|AF_INET6"}, "either",
     "address family of sockets"},
    {"NCCL_SOCKET_NTHREADS", Number{&S::socketThreads, -2, 16, OutOfRange::clamp}, "by cloud",
     "threads for each connection over sockets that help to move its data, besides the proxy; 2 on "
     "AWS, 4 on Google Cloud, else 0"},
    {"NCCL_NSOCKS_PERTHREAD", Number{&S::socketsPerThread, -2, 64, OutOfRange::clamp}, "by cloud",
     "sockets of each of these threads, at most 64 for a connection; 8 on AWS, else 1"},
    {"NCCL_COMM_ID", Text{&S::commId, "address:port"}, "none",
     "where rank 0 of a communicator listens for the other ranks"},
    {"NCCL_HOSTID", Text{&S::hostId, "text"}, "this host",
     "identity of the host: ranks with different values are treated as different nodes"},
    {"NCCL_NET", Text{&S::network, "name"}, "automatic",
     "network between hosts, also between simulated hosts of one machine, which share memory "
     "otherwise; Socket: TCP sockets, IB: InfiniBand or RoCE, another name: the plug-in that "
     "reports this name"},
    {"NCCL_NET_PLUGIN", Text{&S::netPlugin, "list"}, "libnccl-net.so if there is one",
     "network plug-ins, the first that can be used is taken: libraries, or words w of "
     "libnccl-net-w.so; STATIC_PLUGIN is the program itself, none allows no plug-in"},
    {"NCCL_IB_DISABLE", Flag{&S::ibDisable}, "0", "do not use InfiniBand and RoCE"},
    {"NCCL_IB_HCA", Text{&S::ibAdapters, "list"}, "all",
     "adapters and ports for InfiniBand and RoCE, such as mlx5_0:1,mlx5_1, by prefix; a leading ^ "
     "excludes them, = requires the exact name"},
    {"NCCL_IB_GID_INDEX", Number{&S::ibGidIndex, -1, 255}, "automatic",
     "which GID of a RoCE port to use; automatic is the first of the family, range and version "
     "below"},
    {"NCCL_IB_ADDR_FAMILY", Choice{&S::ibAddressFamily, "AF_INET|AF_INET6"}, "AF_INET",
     "address family of GIDs of RoCE"},
    {"NCCL_IB_ADDR_RANGE", Text{&S::ibAddressRange, "address/bits"}, "any",
     "range of addresses of GIDs of RoCE"},
    {"NCCL_IB_ROCE_VERSION_NUM", Number{&S::ibRoceVersion, 1, 2}, "2", "version of RoCE"},
    {"NCCL_IB_TIMEOUT", Number{&S::ibTimeout, 0, 31}, "20",
     "how long InfiniBand and RoCE wait for an acknowledgment: 4.096 us times 2 to this power; 0 "
     "waits without limit"},
    {"NCCL_IB_RETRY_CNT", Number{&S::ibRetries, 0, 7}, "7",
     "how often InfiniBand and RoCE send again what is not acknowledged"},
    {"NCCL_IB_PKEY", Number{&S::ibKeyIndex, 0, 65535}, "0",
     "index of the partition key of InfiniBand"},
    {"NCCL_IB_SL", Number{&S::ibServiceLevel, -1, 15}, "trafficClass of ncclConfig_t, or 0",
     "service level of InfiniBand and RoCE"},
    {"NCCL_IB_TC", Number{&S::ibTrafficClass, -1, 255}, "trafficClass of ncclConfig_t, or 0",
     "traffic class of RoCE"},
    {"NCCL_IB_QPS_PER_CONNECTION", Number{&S::ibQueuePairs, 1, 128, OutOfRange::clamp}, "1",
     "queue pairs of each connection; the receiver's value counts"},
    {"NCCL_IB_SPLIT_DATA_ON_QPS", Flag{&S::ibSplitsData}, "0",
     "split each message over all queue pairs of a connection, which otherwise take turns"},
    {"NCCL_IB_ADAPTIVE_ROUTING", OptionalFlag{&S::ibAdaptiveRouting}, "on InfiniBand",
     "send large messages so that the network may route their packets differently"},
    {"NCCL_IB_AR_THRESHOLD",
     Number{&S::ibAdaptiveRoutingThreshold, 0, kUnlimited, OutOfRange::useDefault, "bytes"}, "8192",
     "size of a message above which adaptive routing is used"},
    {"NCCL_IB_PCI_RELAXED_ORDERING", Number{&S::ibRelaxedOrdering, 0, 2}, "2",
     "relaxed ordering of PCI writes of adapters: 0 off, 1 and 2 where libibverbs has it"},
    {"UNISONO_NETWORK_TIMEOUT",
     Number{&S::networkTimeoutSeconds, 2, 3600, OutOfRange::clamp, "seconds"}, "120",
     "how long the machine of a peer may leave data or probes of a socket unanswered before the "
     "connection has failed"},
    {"UNISONO_BOOTSTRAP_TIMEOUT",
     Number{&S::bootstrapTimeoutSeconds, 1, kLongestSeconds, OutOfRange::useDefault, "seconds"},
     "none", "limit of each wait for another rank, at init and when ranks connect later"},
    {"UNISONO_FAILURE_GRACE",
     Number{&S::failureGraceMilliseconds, 0, 60000, OutOfRange::useDefault, "milliseconds"}, "500",
     "how long running calls of a communicator may go on after one of its ranks has failed"},
    {"UNISONO_HANG_SECONDS",
     Number{&S::hangSeconds, 0, kLongestSeconds, OutOfRange::useDefault, "seconds"}, "30",
     "time without progress of a call before a hang report is written; 0: no reports, and calls "
     "that differ between ranks are not found"},
    {"UNISONO_TRACE", Text{&S::traceFile, "file"}, "none",
     "file to write a timeline of the calls to, for Perfetto; %h stands for the host, %p for the "
     "process id, %r for the rank"},
    {"NCCL_RAS_ENABLE", Flag{&S::ras}, "0",
     "answer clients of NCCL's RAS protocol, such as ncclras, with the state of the communicators"},
    {"NCCL_RAS_ADDR", Text{&S::rasAddress, "address:port"}, "localhost:28028",
     "where RAS clients are answered"},
    {"UNISONO_COMM_KEY_FILE", Text{&S::commKeyFile, "file"}, "none",
     "file with a secret that protects NCCL_COMM_ID: at least 16 bytes, the same on all ranks, "
     "readable only by its owner"},
    {"NCCL_TOPO_FILE", Text{&S::topologyFile, "file"}, "the platform's",
     "topology file to read before the machine is detected"},
    {"NCCL_TOPO_DUMP_FILE", Text{&S::topologyDumpFile, "file"}, "none",
     "file to write the detected topology to"},
    {"NCCL_TOPO_DUMP_FILE_RANK",
     Number{&S::topologyDumpRank, -1, kUnlimited, OutOfRange::useLowest}, "0",
     "rank that writes NCCL_TOPO_DUMP_FILE"},
    {"NCCL_IGNORE_CPU_AFFINITY", Flag{&S::ignoreCpuAffinity}, "0",
     "let initialisation use all cores near the GPU, not only those that the process may use"},
    {"NCCL_COMM_BLOCKING", Number{&S::blocking, 0, 1}, "ncclConfig_t.blocking",
     "whether calls on a communicator return when done (1) or may return ncclInProgress (0)"},
    {"NCCL_MULTI_RANK_GPU_ENABLE", Flag{&S::multiRankDevice}, "0",
     "allow several ranks of a communicator on one GPU"},
    {"NCCL_MIN_NCHANNELS", Number{&S::minChannels, 0, kMaxChannels, OutOfRange::clamp}, "automatic",
     "minimum number of channels"},
    {"NCCL_MAX_NCHANNELS", Number{&S::maxChannels, 1, kMaxChannels, OutOfRange::clamp}, "automatic",
     "maximum number of channels; for calls without channels, of thread blocks"},
    {"NCCL_MIN_CTAS", Number{&S::minCtas, 1, kUnlimited}, "ncclConfig_t.minCTAs",
     "minimum number of channels, in place of the one in ncclConfig_t"},
    {"NCCL_MAX_CTAS", Number{&S::maxCtas, 1, kUnlimited}, "ncclConfig_t.maxCTAs",
     "maximum number of channels, in place of the one in ncclConfig_t"},
    {"NCCL_CTA_POLICY", Choice{&S::ctaPolicy, "DEFAULT|EFFICIENCY|ZERO", "DEFAULT|EFFICIENCY|ZERO"},
     "ncclConfig_t.CTAPolicy",
     "ZERO: all-gathers and all-to-alls into symmetric windows use copy engines; also 0, 1 and 2"},
    {"NCCL_CGA_CLUSTER_SIZE", Number{&S::clusterBlocks, -1, 8, OutOfRange::clamp},
     "ncclConfig_t.cgaClusterSize, or 4",
     "maximum number of thread blocks of a cluster, on GPUs of compute capability 9.0 and more; 0: "
     "no clusters"},
    {"UNISONO_EARLY_LAUNCH", Flag{&S::earlyLaunch}, "1",
     "1: kernels are launched while those before them in the stream end (programmatic dependent "
     "launch), on GPUs of compute capability 9.0 and more; 0: after them"},
    {"NCCL_MEM_SYNC_DOMAIN", Flag{&S::inRemoteDomain}, "1",
     "1: kernels run in CUDA's remote memory synchronization domain, so that memory fences of "
     "other kernels do not wait for their stores, nor the reverse; 0: in the default domain"},
    {"NCCL_MIN_P2P_NCHANNELS", Number{&S::minPeerChannels, 1, kMaxChannels, OutOfRange::clamp},
     "automatic",
     "minimum number of channels that send and receive use for all peers together; rounded up to a "
     "power of two"},
    {"NCCL_MAX_P2P_NCHANNELS", Number{&S::maxPeerChannels, 1, kMaxChannels, OutOfRange::clamp},
     "automatic",
     "maximum number of channels that send and receive use for all peers together; rounded down to "
     "a power of two; takes precedence over the minimum"},
    {"NCCL_NCHANNELS_PER_NET_PEER", Number{&S::netPeerChannels, 1, kMaxChannels, OutOfRange::clamp},
     "ncclConfig_t.nChannelsPerNetPeer, or automatic",
     "maximum number of channels of messages to each rank on another host; rounded up to a power "
     "of "
     "two, and at most as many as all peers have together"},
    {"NCCL_BUFFSIZE", Number{&S::bufferBytes, 1, kUnlimited, OutOfRange::useDefault, "bytes"},
     "automatic", "size of the FIFO of each connection"},
    {"NCCL_LL_BUFFSIZE", Number{&S::llBufferBytes, 1, kUnlimited, OutOfRange::useDefault, "bytes"},
     "automatic", "size of the FIFO of each connection with the protocol LL"},
    {"NCCL_LL128_BUFFSIZE",
     Number{&S::ll128BufferBytes, 1, kUnlimited, OutOfRange::useDefault, "bytes"}, "automatic",
     "size of the FIFO of each connection with the protocol LL128"},
    {"NCCL_ALGO", Text{&S::algorithm, "list"}, "automatic",
     "algorithms to use: Tree, Ring, CollNetDirect, CollNetChain, NVLS, NVLSTree, PAT, Direct, "
     "TwoShot, DirectTree; a leading ^ excludes them; allreduce:ring sets those of one operation, "
     "; separates "
     "operations; where they leave nothing that can run, others are used"},
    {"NCCL_PROTO", Text{&S::protocol, "list"}, "automatic",
     "protocols to use: LL, LL128, Simple, in the syntax of NCCL_ALGO"},
    {"NCCL_TUNER_PLUGIN", Text{&S::tunerPlugin, "name"}, "libnccl-tuner.so if there is one",
     "tuner plug-in: a library, a word w for libnccl-tuner-w.so, STATIC_PLUGIN for the program "
     "itself, or none"},
    {"NCCL_PROFILER_PLUGIN", Text{&S::profilerPlugin, "names"},
     "libnccl-profiler.so if there is one",
     "profiler plug-ins, separated by commas: libraries, words w for libnccl-profiler-w.so, "
     "STATIC_PLUGIN for the program itself, or none"},
    {"NCCL_NTHREADS", Number{&S::threads, 0, kUnlimited}, "automatic",
     "maximum number of threads of a channel that move data with the protocols LL and Simple: a "
     "multiple of 32, at most 512 (448 run with LL); fewer threads spread a call over more "
     "channels"},
    {"NCCL_LL128_NTHREADS", Number{&S::ll128Threads, 0, kUnlimited}, "automatic",
     "maximum number of threads of a channel that move data with the protocol LL128: a multiple of "
     "32, at most 512, of which 448 run"},
    {"NCCL_THREAD_THRESHOLDS", NumberList{&S::threadThresholds, 6}, "automatic",
     "bytes per thread below which a call gets fewer channels and threads: of trees with LL, LL128 "
     "and Simple, then of rings"},
    {"NCCL_NET_OVERHEAD",
     Number{&S::netOverhead, -2, kUnlimited, OutOfRange::useDefault, "nanoseconds"}, "by processor",
     "time that the cost model adds for each step over the network; negative is automatic"},
    {"NCCL_LL128_C2C", Flag{&S::ll128C2c}, "1",
     "allow LL128 from Hopper on where a path to a NIC passes another GPU or a C2C link"},
    {"NCCL_P2P_LL_THRESHOLD",
     Number{&S::p2pLlThreshold, 0, kUnlimited, OutOfRange::useDefault, "bytes"}, "automatic",
     "largest message, for each channel of a peer, that goes over protocol LL: straight into "
     "the receiver's memory, or in FIFOs through memory of the host and between hosts; 0: none "
     "does"},
    {"NCCL_PAT_ENABLE", Number{&S::pat, 0, 2}, "2",
     "the algorithm PAT: 0 never, 1 with any number of ranks per node, 2 with one"},
    {"UNISONO_DETERMINISTIC", Flag{&S::deterministic}, "0",
     "reduce every element in the order of the ranks, so that results depend on nothing but the "
     "inputs, the operator and the number of ranks; must be the same on all ranks"},
    {"UNISONO_TUNING_FILE", Text{&S::tuningFile, "file"}, "none",
     "file with measured times of calls that replace those of the cost model, the same on all "
     "ranks"},
    {"NCCL_CUMEM_ENABLE", OptionalFlag{&S::cuMem}, "automatic",
     "share GPU memory through CUDA VMM (1) or legacy CUDA IPC (0)"},
    {"UNISONO_ZERO_COPY", Flag{&S::zeroCopy}, "1",
     "map large buffers of the application into the processes of the peers, so that they store "
     "into "
     "them directly"},
    {"UNISONO_ZERO_COPY_BYTES",
     Number{&S::zeroCopyBytes, 0, kUnlimited, OutOfRange::useDefault, "bytes"}, "64 GiB",
     "limit of the buffers of a communicator that its peers map, and of those that it maps"},
    {"NCCL_GRAPH_FILE", Text{&S::graphFile, "file"}, "none",
     "graph file with the channels to use in place of a search"},
    {"NCCL_GRAPH_DUMP_FILE", Text{&S::graphDumpFile, "file"}, "none",
     "file to write the channel graphs of a node to"},
    {"NCCL_GRAPH_DUMP_FILE_RANK", Number{&S::graphDumpRank, -1, kUnlimited, OutOfRange::useLowest},
     "0", "rank that writes NCCL_GRAPH_DUMP_FILE"},
    {"NCCL_P2P_DISABLE", Flag{&S::p2pDisable}, "0", "disable peer-to-peer access between GPUs"},
    {"NCCL_P2P_LEVEL", Choice{&S::p2pLevel, kPathTypes, kNumberedPathTypes}, "by platform",
     "longest type of path over which GPUs access each other's memory"},
    {"NCCL_IGNORE_DISABLED_P2P",
     Number{&S::ignoreDisabledP2p, -1, kUnlimited, OutOfRange::useLowest}, "0",
     "when the driver disables peer-to-peer access: 0 report it, 1 do not report it, 2 do not ask "
     "the driver"},
    {"NCCL_P2P_READ_ENABLE", OptionalFlag{&S::p2pRead}, "by GPU",
     "whether receivers read from the sender's memory (1) or senders write to the receiver's (0)"},
    {"UNISONO_VERIFY_LINKS", Flag{&S::verifyLinks}, "1",
     "move known data over each link between two GPUs when a process first uses it, and refuse "
     "links "
     "that change it"},
    {"NCCL_NVB_DISABLE", Flag{&S::nvbDisable}, "0",
     "disable NVLink paths through an intermediate GPU"},
    {"NCCL_SHM_DISABLE", Flag{&S::shmDisable}, "0", "disable shared host memory between processes"},
    {"NCCL_SHM_LOCALITY", Number{&S::shmLocality, 1, 2}, "2",
     "whose CPU's memory holds what ranks exchange through host memory: 1 sender, 2 receiver"},
    {"NCCL_SHM_USE_CUDA_MEMCPY", Flag{&S::shmCopies}, "0",
     "let copy engines move data of protocol Simple through host memory, not kernels"},
    {"NCCL_SHM_MEMCPY_MODE", Number{&S::shmCopyMode, 1, 3}, "1",
     "with NCCL_SHM_USE_CUDA_MEMCPY, whose copy engines: 1 the sender's, 2 the receiver's, 3 both"},
    {"NCCL_NET_GDR_LEVEL", Choice{&S::gdrLevel, kPathTypes, kNumberedPathTypes}, "by platform",
     "longest type of path over which a NIC accesses GPU memory (GPUDirect RDMA)"},
    {"NCCL_NET_GDR_READ", OptionalFlag{&S::gdrRead}, "by GPU",
     "whether a NIC reads GPU memory directly when it sends"},
    {"NCCL_NET_GDR_C2C", Flag{&S::gdrC2c}, "1",
     "allow GPUDirect RDMA through a CPU attached by C2C"},
    {"NCCL_NET_FORCE_FLUSH", Flag{&S::forceFlush}, "0",
     "flush what a NIC has written to GPU memory before kernels read it, also where the GPU does "
     "not need that"},
    {"NCCL_DMABUF_ENABLE", Flag{&S::dmaBuf}, "1",
     "make GPU memory known to NICs as DMA-BUFs where that is possible"},
    {"NCCL_NET_SHARED_BUFFERS", Flag{&S::netSharedBuffers}, "1",
     "bound the memory of all connections for messages between hosts; 0: no bound"},
    {"NCCL_PXN_DISABLE", Flag{&S::pxnDisable}, "0",
     "disable sending to a distant NIC through a GPU that is closer to it (PXN)"},
    {"NCCL_PXN_C2C", Flag{&S::pxnC2c}, "1", "allow PXN through a CPU attached by C2C"},
    {"NCCL_P2P_PXN_LEVEL", Number{&S::p2pPxnLevel, 0, 2, OutOfRange::useLowest}, "2",
     "whether messages to another machine leave through the NIC with the receiver's index: 0 "
     "never, 1 when the path to it is PXN or better, 2 whenever a GPU near it can forward them"},
    {"NCCL_NVLS_ENABLE", Number{&S::nvls, 0, 2, OutOfRange::useHighest}, "2",
     "allow the algorithm NVLS (0 off, 1 or 2 where the devices have multicast addresses)"},
    {"NCCL_COLLNET_ENABLE", OptionalFlag{&S::collnet}, "as ncclConfig_t.collnetEnable, or 0",
     "allow the algorithms of networks that reduce, through the CollNet part of the net plug-in: "
     "CollNetDirect, CollNetChain, NVLS between nodes"},
    {"NCCL_COLLNET_NODE_THRESHOLD", Number{&S::collnetNodes, 1, 1 << 20}, "2",
     "minimum number of nodes of a communicator that uses these algorithms"},
    {"NCCL_IGNORE_COLLNET_MISMATCH", Flag{&S::ignoreCollnetMismatch}, "0",
     "do without these algorithms, in place of an error, where ranks have different CollNet "
     "plug-ins"},
    {"NCCL_MNNVL_ENABLE", Number{&S::multiNodeNvlink, 0, 2, OutOfRange::useHighest}, "2",
     "use multi-node NVLink (0 off, 1 on, 2 automatic)"},
    {"NCCL_CROSS_NIC", Number{&S::crossNic, 0, 2, OutOfRange::useLowest}, "2",
     "whether a ring may enter and leave a node through different NICs: 0 never, 1 always, 2 when "
     "it is faster"},
};

bool isOurs(std::string_view name) {
  return name.starts_with("UNISONO_");
}

// Calls `use` with each of the names in "A|B|C" until it returns true.
template <typename Use>
bool findName(std::string_view names, Use use) {
  while (true) {
    const size_t bar = names.find('|');
    if (use(names.substr(0, bar))) return true;
    if (bar == std::string_view::npos) return false;
    names.remove_prefix(bar + 1);
  }
}

// A number as strtoll reads it in base 0: decimal, 0x or 0 for octal. Nothing but white space may
// surround it.
std::optional<int64_t> parseNumber(const std::string& text) {
  char* end = nullptr;
  errno = 0;
  const long long value = std::strtoll(text.c_str(), &end, 0);
  if (end == text.c_str() || errno == ERANGE) return std::nullopt;
  if (std::string_view(end).find_first_not_of(" \t\r\n\v\f") != std::string_view::npos) {
    return std::nullopt;
  }
  return value;
}

std::string allowedText(const Number& type) {
  std::string range =
      type.highest == kUnlimited
          ? fmt::format("{} or more", type.lowest)
          : fmt::format("{} {} {}", type.lowest, type.highest == type.lowest + 1 ? "or" : "to",
                        type.highest);
  return type.unit == nullptr ? range : fmt::format("{}, {}", type.unit, range);
}

struct AllowedText {
  std::string operator()(const Flag&) const { return "0 or 1"; }
  std::string operator()(const OptionalFlag&) const { return "0 or 1"; }
  std::string operator()(const Number& type) const { return allowedText(type); }
  std::string operator()(const Choice& type) const {
    std::string text;
    findName(type.values, [&](std::string_view name) {
      text += text.empty() ? "" : ", ";
      text += name;
      return false;
    });
    return text;
  }
  std::string operator()(const Text& type) const { return type.kind; }
  std::string operator()(const NumberList& type) const {
    return fmt::format("{} numbers", type.count);
  }
  std::string operator()(const ConfigurationPath&) const { return "file"; }
};

std::string allowedText(const Row& row) {
  return std::visit(AllowedText{}, row.type);
}

// Stores the value of one row. Each function returns "" or, for a value that cannot be used as it
// is, what was used in place of it.
class Parser {
 public:
  Parser(Settings& settings, const std::string& text) : settings_(settings), text_(text) {}

  std::string operator()(const Flag& type) const {
    const auto value = parseNumber(text_);
    if (!value) return "the default";
    settings_.*type.field = *value != 0;
    return "";
  }

  std::string operator()(const OptionalFlag& type) const {
    const auto value = parseNumber(text_);
    if (!value) return "the default";
    settings_.*type.field = std::clamp<int64_t>(*value, -1, 1);
    return "";
  }

  std::string operator()(const Number& type) const {
    const auto value = parseNumber(text_);
    if (!value) return "the default";
    int64_t used = *value;
    if (used < type.lowest || used > type.highest) {
      switch (type.outOfRange) {
        case OutOfRange::clamp:
          used = std::clamp(used, type.lowest, type.highest);
          break;
        case OutOfRange::useDefault:
          return "the default";
        case OutOfRange::useLowest:
          used = type.lowest;
          break;
        case OutOfRange::useHighest:
          used = type.highest;
          break;
      }
    }
    settings_.*type.field = used;
    return used == *value ? "" : fmt::format("{}", used);
  }

  std::string operator()(const Choice& type) const {
    std::string_view chosen;
    findName(type.values, [&](std::string_view name) {
      const bool same =
          name.size() == text_.size() && ::strncasecmp(name.data(), text_.data(), name.size()) == 0;
      if (same) chosen = name;
      return same;
    });
    const auto number = type.numbered.empty() ? std::nullopt : parseNumber(text_);
    if (number && *number >= 0) {
      int64_t index = 0;
      findName(type.numbered, [&](std::string_view name) {
        chosen = name;
        return index++ == *number;
      });
    }
    if (chosen.empty()) return "the default";
    settings_.*type.field = chosen;
    return "";
  }

  std::string operator()(const Text& type) const {
    settings_.*type.field = text_;
    return "";
  }

  std::string operator()(const NumberList& type) const {
    std::istringstream words(text_);
    size_t count = 0;
    for (std::string word; words >> word; count++) {
      if (!parseNumber(word)) return "the default";
    }
    if (count == 0 || count > type.count) return "the default";
    settings_.*type.field = text_;
    return "";
  }

  std::string operator()(const ConfigurationPath&) const { return ""; }

 private:
  Settings& settings_;
  const std::string& text_;
};

// The value of a row as text.
class Printer {
 public:
  explicit Printer(const Settings& settings) : settings_(settings) {}

  std::string operator()(const Flag& type) const { return settings_.*type.field ? "1" : "0"; }
  std::string operator()(const ConfigurationPath&) const { return ""; }
  template <typename Type>
  std::string operator()(const Type& type) const {
    return fmt::format("{}", settings_.*type.field);
  }

 private:
  const Settings& settings_;
};

std::string environmentText(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

// Read once per process, as in NCCL. Never destroyed: threads may create communicators until the
// process has ended.
const Configuration& configuration() {
  static const auto* files =
      new Configuration(readConfigurationFiles(environmentText(kConfigurationVariable)));
  return *files;
}

// The text that is set for `name`, "" if none is. A variable that is set but empty hides the one in
// a configuration file, as in NCCL.
std::string textOf(const char* name) {
  if (std::getenv(name) != nullptr) return environmentText(name);
  const auto& values = configuration().values;
  const auto found = values.find(name);
  return found == values.end() ? "" : found->second;
}

bool isKnown(std::string_view name) {
  return std::any_of(std::begin(kRows), std::end(kRows),
                     [&](const Row& row) { return name == row.name; });
}

void warnAboutUnknownNames() {
  const auto check = [](std::string_view name) {
    if (isOurs(name) && !isKnown(name)) {
      warnOnce(fmt::format("{} is not a setting of Unisono and has no effect", name));
    }
  };
  for (char** entry = environ; entry != nullptr && *entry != nullptr; entry++) {
    const std::string_view text = *entry;
    check(text.substr(0, text.find('=')));
  }
  for (const auto& [name, value] : configuration().values) check(name);
}

void parse(const Row& row, const std::string& text, Settings& settings) {
  const std::string used = std::visit(Parser(settings, text), row.type);
  if (used.empty()) return;
  if (isOurs(row.name)) {
    throw invalidArgument("{}={} is not allowed", row.name, text)
        .remedy(fmt::format("Set {} to {}, or unset it", row.name, allowedText(row)));
  }
  warnOnce(fmt::format(
      "{}={} is not one of the allowed values ({}); using {}", row.name, text, allowedText(row),
      used == "the default" ? fmt::format("the default, {}", row.defaultText) : used));
}

}  // namespace

Settings settingsFromEnvironment() {
  for (const std::string& problem : configuration().problems) warnOnce(problem);
  warnAboutUnknownNames();
  Settings settings;
  for (const Row& row : kRows) {
    const std::string text = textOf(row.name);
    if (!text.empty()) parse(row, text, settings);
  }
  return settings;
}

Settings debugSettings() {
  Settings settings;
  for (const Row& row : kRows) {
    if (std::string_view(row.name).starts_with("NCCL_DEBUG")) {
      const std::string text = textOf(row.name);
      if (!text.empty()) std::visit(Parser(settings, text), row.type);
    }
  }
  return settings;
}

std::vector<std::pair<std::string, std::string>> changedSettings(const Settings& settings) {
  const auto texts = [](const Settings& of) {
    std::vector<std::string> all;
    for (const Row& row : kRows) all.push_back(std::visit(Printer(of), row.type));
    return all;
  };
  static const auto* defaults = new std::vector<std::string>(texts(Settings{}));
  std::vector<std::string> values = texts(settings);
  std::vector<std::pair<std::string, std::string>> changed;
  for (size_t i = 0; i < values.size(); i++) {
    if (values[i] != (*defaults)[i]) changed.emplace_back(kRows[i].name, std::move(values[i]));
  }
  return changed;
}

ChannelBounds channelBounds(const Settings& settings, ChannelBounds config) {
  // NCCL_MIN_CTAS and NCCL_MAX_CTAS replace the values of the communicator, NCCL_MIN_NCHANNELS and
  // NCCL_MAX_NCHANNELS limit further.
  if (settings.minCtas > 0) config.min = settings.minCtas;
  if (settings.maxCtas > 0) config.max = settings.maxCtas;
  if (config.max > 0) config.min = std::min(config.min, config.max);
  ChannelBounds bounds;
  bounds.min = std::max(config.min, settings.minChannels);
  bounds.max = config.max == 0 || settings.maxChannels == 0
                   ? std::max(config.max, settings.maxChannels)
                   : std::min(config.max, settings.maxChannels);
  return bounds;
}

std::vector<SettingInfo> settingsTable() {
  std::vector<SettingInfo> table;
  for (const Row& row : kRows) {
    table.push_back({row.name, allowedText(row), row.defaultText, row.meaning});
  }
  return table;
}

}  // namespace unisono
