// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "device/direct_work.h"
#include "device/work.h"
#include "topology/join.h"
#include "tuning/choice.h"

// From the calls of a group to launches. Pure: the same calls on all ranks give launches that fit
// together, whatever the rank.
namespace unisono::plan {

enum class Call : uint8_t {
  allReduce,
  allGather,
  reduceScatter,
  broadcast,
  reduce,
  // Messages:
  send,
  receive,
  allToAll,
  gather,
  scatter,
};
inline constexpr int kCallKinds = 10;
constexpr bool consistsOfMessages(Call call) {
  return call >= Call::send;
}
// The operation of a call that does not consist of messages.
constexpr device::Operation operationOf(Call call) {
  switch (call) {
    case Call::allReduce:
      return device::Operation::allReduce;
    case Call::allGather:
      return device::Operation::allGather;
    case Call::reduceScatter:
      return device::Operation::reduceScatter;
    case Call::broadcast:
      return device::Operation::broadcast;
    default:
      return device::Operation::reduce;
  }
}

// Windows that all ranks have registered together. A call uses the same place in each.
struct SymmetricWindow {
  std::vector<std::byte*> bases;  // by rank: where this rank sees that one's; null: nowhere
  uint64_t bytes;                 // of the smallest one
};

// One checked call of the API. `count` has the meaning that it has in the API for this call.
struct Task {
  Call call;
  const void* input;
  void* output;
  uint64_t count;
  device::ReductionSpec reduction;   // `type` for every call
  int peer;                          // of send and receive; root of rooted calls
  bool outputIsOpen = false;         // other ranks of this process can store into `output`
  device::WindowReference window{};  // the place of `output`, if ranks of other processes may store
  bool inputIsOpen = false;          // the same for `input`, of which they load
  device::WindowReference inputWindow{};
  const SymmetricWindow* symmetric = nullptr;  // has `output`, if ranks may use copy engines
  std::optional<tuning::Choice> choice{};      // once it is made
};

constexpr size_t indexOf(device::Protocol protocol) {
  return static_cast<size_t>(protocol);
}

// Of algorithms with heads.
struct HeadShape {
  int channels = 0;  // 0: the ranks cannot use them
  uint32_t slotBytes = 0;
  int heads = 0;  // of each node
};

// Of FIFOs for messages.
struct MessageSlots {
  uint32_t bytes = 0;
  uint32_t lineBytes = 0;  // over LL; 0: there are none

  bool operator==(const MessageSlots&) const = default;
};

// The ranks of each node, among which the direct family counts.
struct NodeRanks {
  explicit NodeRanks(std::vector<int> nodeOfRanks);

  std::vector<int> nodeOf;              // by rank
  std::vector<int> place;               // by rank: among those of its node
  std::vector<std::vector<int>> ranks;  // by node, in order
};

// Null if there is one node.
std::shared_ptr<const NodeRanks> nodeRanksOf(const topology::Joined& joined);

// Everything that plans depend on. All fields except `rank` are the same on every rank.
struct CommConfig {
  int rank = 0;
  int ranks = 1;
  int channels = 1;  // of collectives
  // What chooses algorithm, protocol and shape of a call.
  std::shared_ptr<const tuning::CostModel> model;
  std::shared_ptr<const tuning::Advisor> advisor;        // of a tuner plug-in; null without
  std::shared_ptr<tuning::ChoiceCache> choices;          // of `model`; null: nothing is kept
  std::array<uint32_t, device::kProtocols> slotBytes{};  // of collectives, by protocol
  MessageSlots peerSlots;
  MessageSlots remoteSlots;                            // between ranks of different hosts
  std::shared_ptr<const std::vector<uint64_t>> hosts;  // by rank; null: all are on one
  uint64_t peerLineBytes = 0;  // parts of messages of up to so many bytes go over LL
  uint32_t slicesPerChunk = 1;
  int peerChannels = 1;                // channels of point-to-point messages, all peers together
  int channelsPerPeer = 1;             // of a connection to one peer; divides peerChannels
  int remoteChannelsPerPeer = 1;       // the same between ranks of different hosts
  uint64_t minBytesPerPart = 1;        // of a message on one of its channels
  uint64_t minRemoteBytesPerPart = 1;  // the same between ranks of different hosts
  uint64_t directBytes = 0;            // messages of at least this size need an offer
  // So do results of which each rank reduces or sends at least this much, over rings (half of it in
  // all, over trees).
  uint64_t resultBytes = 0;
  HeadShape multicast;                     // NVLS and NVLSTree
  HeadShape collnetDirect;                 // CollNet direct
  std::shared_ptr<const NodeRanks> nodes;  // null: there is one
  // The direct family: lines of a stream between two ranks, as a power of two; 0: some ranks of a
  // node cannot map each other's memory.
  int directLineBits = 0;
  int directBlocks = device::kDirectMaxBlocks;  // most of a launch over LL
  tuning::WideGeometry wide;                    // over LL128
  // UNISONO_DETERMINISTIC: rings are in the order of the ranks, and every element is reduced from
  // the same rank on.
  bool fixedOrder = false;
};

inline bool areOnOneHost(const CommConfig& config, int a, int b) {
  if (config.hosts == nullptr) return true;
  const std::vector<uint64_t>& hosts = *config.hosts;
  return hosts[static_cast<size_t>(a)] == hosts[static_cast<size_t>(b)];
}
// The channels of messages between two ranks.
inline int channelsBetween(const CommConfig& config, int from, int to) {
  return areOnOneHost(config, from, to) ? config.channelsPerPeer : config.remoteChannelsPerPeer;
}
// The slots of FIFOs for messages between two ranks.
inline MessageSlots messageSlots(const CommConfig& config, int from, int to) {
  return areOnOneHost(config, from, to) ? config.peerSlots : config.remoteSlots;
}

inline bool areOnOneNode(const CommConfig& config, int a, int b) {
  if (config.nodes == nullptr) return true;
  const std::vector<int>& nodeOf = config.nodes->nodeOf;
  return nodeOf[static_cast<size_t>(a)] == nodeOf[static_cast<size_t>(b)];
}
// The number of this rank among those of its node, how many these are, and its peers there.
inline int localRank(const CommConfig& config) {
  if (config.nodes == nullptr) return config.rank;
  return config.nodes->place[static_cast<size_t>(config.rank)];
}
inline const std::vector<int>& ranksOfOwnNode(const CommConfig& config) {
  const NodeRanks& nodes = *config.nodes;
  return nodes.ranks[static_cast<size_t>(nodes.nodeOf[static_cast<size_t>(config.rank)])];
}
inline int localRanks(const CommConfig& config) {
  return config.nodes == nullptr ? config.ranks : static_cast<int>(ranksOfOwnNode(config).size());
}
inline int localPeerOf(const CommConfig& config, int rank) {
  const int place = config.nodes == nullptr ? rank : config.nodes->place[static_cast<size_t>(rank)];
  return device::peerOfRank(place, localRank(config));
}
inline int rankOfLocalPeer(const CommConfig& config, int peer) {
  const int place = device::rankOfPeer(peer, localRank(config));
  return config.nodes == nullptr ? place : ranksOfOwnNode(config)[static_cast<size_t>(place)];
}

// The payload of a chunk, by protocol. The data of the protocols with lines arrive piece by piece,
// so that their chunks are one slot.
std::array<uint64_t, device::kProtocols> chunkBytesOf(const CommConfig& config);

// The launches of kernels. `arguments` lack what only the communicator knows: addresses of its
// tables and flags (transport/launcher.h).
// They are not cleared, as they would be with defaulted constructors: works beyond arguments.works
// are never read.
struct CollectiveLaunch {
  CollectiveLaunch() {}  // NOLINT(modernize-use-equals-default)
  int blocks = 0;
  int threads = 0;  // of a block
  device::CollectiveArguments arguments;
};
struct SendReceiveLaunch {
  int blocks;
  device::SendReceiveArguments arguments;
};
struct DirectLaunch {
  DirectLaunch() {}  // NOLINT(modernize-use-equals-default)
  int blocks = 0;
  int threads = 0;
  device::DirectArguments arguments;

  // Of the arguments, what a launch passes.
  size_t argumentBytes() const {
    return sizeof(device::DirectCallArguments) +
           static_cast<size_t>(arguments.works - 1) * sizeof(device::DirectWork);
  }
};
struct MessagesLaunch {
  std::shared_ptr<device::MessagesArguments> arguments;  // too large for most plans

  int blocks() const { return arguments->firstWideBlock() + arguments->wide.launchBlocks(); }
};
struct WideMessagesLaunch {
  device::WideMessagesArguments arguments;
};
struct WideLaunch {
  int blocks = 0;
  int threads = 0;
  device::WideArguments arguments;
};
struct Copy {
  void* to;
  const void* from;
  uint64_t bytes;
};
// Of all ranks.
struct BarrierLaunch {
  device::BarrierArguments arguments;
};
// Copies by copy engines, at the same time.
struct CopyLaunch {
  std::vector<Copy> copies;
};
using Launch = std::variant<CollectiveLaunch, SendReceiveLaunch, DirectLaunch, MessagesLaunch,
                            WideLaunch, WideMessagesLaunch, BarrierLaunch, CopyLaunch>;

// The blocks of the kernel of a launch; 0: it has none.
int blocksOf(const Launch& launch);

// A connection for messages that the launches use: this rank's end of the one to or from `peer`.
struct PeerUse {
  int peer;
  bool sends;
};

// What must be connected before a plan can run.
struct Needs {
  bool rings = false, trees = false, rails = false, multicast = false, chains = false;
  bool collnetDirect = false;
  device::DirectPeers direct = 0;  // whose windows are mapped
  device::DirectPeers wide = 0;    // whose windows for LL128 are mapped
  std::vector<PeerUse> peers;      // one for each message
};

struct Plan {
  std::vector<Launch> launches;  // in the order in which they run
  Needs needs;
};

// Which buffers of this rank a collective offers to other ranks, whole.
struct OfferedBuffers {
  uint64_t inputBytes = 0, outputBytes = 0;
};
OfferedBuffers buffersOffered(const CommConfig& config, const Task& task);

// Whether copy engines carry a call: the same on all ranks if each passes the same place in its
// window.
bool usesCopyEngines(const CommConfig& config, const Task& task);

// Calls with a count of 0 are left out. Throws Error(invalidUsage) for a send to oneself without a
// matching receive in the group, and for a receive without a send.
//
// The list of launches takes the memory of `storage`: with that of an earlier plan, the plan of one
// collective allocates nothing.
Plan makePlan(const CommConfig& config, const std::vector<Task>& tasks,
              std::vector<Launch> storage = {});

// What each launch runs, for people: operation, algorithm, protocol and size. One launch may have
// several lines.
std::vector<std::string> describe(const Launch& launch);
std::vector<std::string> describe(const Plan& plan);

// How the communicator carries a collective: the choice of the task, or a new one.
tuning::Choice choiceOf(const CommConfig& config, const Task& task);
// Makes the choice of a call, if it needs one, so that a tuner plug-in is asked once for each call.
void choose(const CommConfig& config, Task& task);

// Returns the first channel of messages from one rank to another, the same at both ends.
int firstMessageChannel(const CommConfig& config, int from, int to);

// Appends launches for the messages of `tasks` that no copy engines carry, and skips other calls.
void planMessages(const CommConfig& config, const std::vector<Task>& tasks, Plan& plan);

// One copy inside a device, as a launch for up to `channels` channels.
CollectiveLaunch planCopy(int channels, void* to, const void* from, uint64_t bytes);

}  // namespace unisono::plan
