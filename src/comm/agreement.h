// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/settings.h"
#include "diagnose/journal.h"
#include "plan/plan.h"
#include "runtime/runtime.h"
#include "topology/join.h"
#include "transport/connector.h"
#include "tuning/model.h"

// What all ranks of a communicator must agree on, decided by pure functions from what all ranks
// told each other.
namespace unisono::comm {

// How a rank reaches the others. Plain data.
struct Reach {
  int16_t peers;  // 1: its device reaches all others directly, as far as its process sees them
  int16_t sees;   // 1: its process sees the devices of all ranks of its host
  uint32_t transports;  // bit k: TransportKind k joins it to some rank of its node
};

// What a rank can do of CollNet. Plain data.
struct CollNetFacts {
  int32_t nodes;  // the fewest for which it is used; 0: not at all
  int32_t ignoresMismatch;
  std::array<char, 64> plugin;  // and its version; empty: none
  // Second look, when the heads are connected:
  uint64_t reductions;               // as tuning::CommFacts::collnetReductions
  int32_t allGather, reduceScatter;  // 1: the plug-in has them
};

// The NVLinks of a rank's device, by where they lead, as its driver says. Plain data.
struct LinkFacts {
  static constexpr size_t kMostTargets = 18;  // as many as a GPU of today has links
  struct Target {
    int64_t busId;   // topology::BusId
    int32_t remote;  // detect::NvmlSource::NvLink::Remote
    int32_t links;   // 0: none, nor in later elements
  };
  int16_t isKnown;    // 0: the others ask their own driver
  int16_t index;      // of the GPU in the driver's management library
  int32_t chipLinks;  // to the CPU in one package
  int64_t chipMegabytes;
  std::array<Target, kMostTargets> targets;
};

// What a rank says of itself in the first all-gather. Plain data; text is NUL-terminated.
struct RankFacts {
  uint32_t layout;  // of this structure: differs between versions of the library
  int32_t backend;
  int32_t device;  // ordinal in its process
  int32_t computeCapability;
  uint64_t process;
  uint64_t machine;  // a hash: equal on one operating system
  uint64_t host;     // a hash: equal on one (maybe simulated) node
  uint64_t network;  // 1: the user wants the network between hosts of one machine too
  // Processes hand each other memory over sockets that are known in one network namespace and serve
  // one user.
  uint64_t networkNamespace;
  uint64_t user;
  uint64_t pidNamespace;  // 0: unknown
  int64_t pid;
  std::array<std::byte, 16> deviceUuid;
  std::array<char, 64> hostName;
  std::array<char, 32> busId;
  int32_t multiRankDevice;
  int32_t sharesNetBuffers;  // NCCL_NET_SHARED_BUFFERS
  // The settings that shape the communicator, 0 where automatic.
  int64_t minPeerChannels, maxPeerChannels, netPeerChannels;
  int64_t minChannels, maxChannels, bufferBytes, llBufferBytes, ll128BufferBytes;
  tuning::Allowed allowed;
  int32_t multiprocessors;  // of the device; 0: unknown
  tuning::TuningSettings tuning;
  uint64_t tuner;         // hash of the name of the tuner plug-in, 0 without
  uint64_t nonce;         // differs between the communicators of a process
  uint64_t measurements;  // hash of the table of UNISONO_TUNING_FILE, 0 without
  uint64_t sharedMemory;  // device of /dev/shm: equal where processes can share host memory
  uint64_t fabric;        // NVLink fabric across hosts: equal where GPUs are in the same; 0: none
  diagnose::TablePlace calls;  // where the others see what this rank does
  int32_t multicast;           // 1: the device has multicast addresses, and the user wants them
  std::array<char, 64> networkName;  // what joins hosts: "Socket", or a plug-in and its version
  LinkFacts links;
  CollNetFacts collnet;
  Reach reach;  // second look
};

inline constexpr uint32_t kRankFactsLayout = 16 << 16 | sizeof(RankFacts);

// The ranks of each host, by its hash, and how many devices all ranks use.
struct Hosts {
  std::map<uint64_t, std::vector<int>> ranks;
  int devices = 0;
};
Hosts hostsOf(const std::vector<RankFacts>& ranks);

// Whether ranks of different hosts exchange data over a network: always between machines. Hosts
// that the user simulates on one machine share its memory, unless the GPUs are real.
bool usesNetwork(const std::vector<RankFacts>& ranks);

// Throws Error(invalidUsage) when the ranks cannot form a communicator: different versions or
// backends, two ranks on one device (unless allowed), processes of one host that cannot hand each
// other memory, different settings of the choice of algorithms, different networks between hosts.
void checkFacts(const std::vector<RankFacts>& ranks);

// The decision: everything that shapes plans and connections. The same on every rank, with no
// config.rank.
struct Decision {
  plan::CommConfig config;
  uint32_t slots;  // of a connection's FIFO
  int32_t nodes;
  topology::Joined joined;
  transport::ChannelGraphs graphs;
  std::vector<std::string> warnings;  // for the user, about NCCL_ALGO and NCCL_PROTO
};
// What changes the predicted times of calls.
struct TuningChanges {
  tuning::Measurements measurements;
  tuning::CostConstants constants = tuning::defaultConstants();
};
// From what all ranks said of themselves and of their place in their node's channels.
Decision decide(const std::vector<RankFacts>& ranks, const std::vector<topology::RankPlace>& places,
                const TuningChanges& changes = {});

// A summary for the check that all ranks decided alike, field by field.
struct DecisionSummary {
  int64_t channels, slotBytes, peerSlotBytes, remoteSlotBytes, slots, slicesPerChunk, peerChannels,
      channelsPerPeer, remoteChannelsPerPeer, directLineBits, nodes, advised, costModel;
  topology::JoinedHash joined;
};
// Differs where any field does.
uint64_t hashOf(const DecisionSummary& summary);
// `advised` is for the caller to set.
DecisionSummary summarize(const Decision& decision);
// Throws Error(internalError) that names the field and the two ranks that differ.
void checkSummaries(const std::vector<DecisionSummary>& summaries);

}  // namespace unisono::comm
