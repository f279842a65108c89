// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/math.h"
#include "bootstrap/bootstrap.h"
#include "memory/arena.h"
#include "memory/mapping_cache.h"
#include "passing_network.h"
#include "plan/plan.h"
#include "reducing_network.h"
#include "runtime/host/host_runtime.h"
#include "transport/connector.h"
#include "transport/device_tables.h"
#include "transport/launcher.h"

// Ranks of one process, made of the layers below the communicator, so that tests choose what a
// communicator decides: the sizes of FIFOs and the limits between algorithms. FIFOs of a few
// hundred bytes make small calls go round them many times.
namespace unisono::protocol {

// A generator that is cheap to make: a run of a small instance takes some 30 us.
class Random {
 public:
  using result_type = uint64_t;
  explicit Random(uint64_t seed) : state_(seed) {}
  static constexpr uint64_t min() { return 0; }
  static constexpr uint64_t max() { return ~uint64_t{0}; }
  uint64_t operator()() { return splitMix64(state_); }

 private:
  uint64_t state_;
};

// Between 0 and `end` - 1. Throws std::invalid_argument if that is nothing.
inline uint64_t below(Random& random, uint64_t end) {
  if (end == 0) throw std::invalid_argument("below: the end is 0");
  return random() % end;
}

inline constexpr int kMostRanks = 10;

struct Geometry {
  const char* name;
  int channels = 1;
  // A power of two, and more than slicesPerChunk: the ranks of a ring all send a chunk before any
  // takes one.
  uint32_t slots = 2;
  uint32_t slotBytes = 512;  // a multiple of 512
  uint32_t slicesPerChunk = 1;
  int peerChannels = 1;
  int channelsPerPeer = 1;
  int remoteChannelsPerPeer = 0;  // over a network; 0: as many
  uint64_t minBytesPerChannel = 1 << 20;
  uint64_t minBytesPerPart = 1 << 20;
  uint64_t directBytes = 1 << 30;
  int directLineBits = 0;
  tuning::WideGeometry wide{};  // with directLineBits only
  uint64_t wideOfferBytes = ~uint64_t{0};
  bool multicast = false;         // NVLS on as many channels, with the same slots
  bool collnet = false;           // a network that reduces
  bool network = false;           // nodes exchange data over a network
  uint64_t peerLineBytes = 0;     // parts of messages of up to so many bytes go over LL
  int ranksPerNode = kMostRanks;  // consecutive ranks, fewer on the last node
  // NCCL_ALGO and NCCL_PROTO, and the limit of LL where they leave a choice.
  const char* algorithms = "";
  const char* protocols = "";
  uint64_t lowLatencyMaxBytes = 0;
  bool oneProcess = true;  // else the ranks believe that each has its own: nothing is direct
  bool links = false;      // some pairs read, some meet in the memory of a third rank
  bool windows = false;    // receive buffers are in windows, which are mapped and unmapped at times
};

// `fibers` or `threads` as UNISONO_TEST_EXECUTOR says. One for the whole program; a deadlock is an
// error.
runtime::host::HostRuntime& testRuntime();
bool runsFibers();
// Starts a schedule that runs on this thread; nothing where tasks are threads.
void startSchedule(runtime::host::Schedule schedule);

// How many steps FIFOs have made: any number, or nearly so many that the flags of LL repeat.
enum class Past { any, beforeTheWrap };

class World {
 public:
  World(const Geometry& geometry, int ranks);

  int ranks() const { return static_cast<int>(members_.size()); }
  const Geometry& geometry() const { return geometry_; }
  runtime::Stream stream(int rank) const { return members_[index(rank)].stream.get(); }
  const plan::CommConfig& shape(int rank) const { return members_[index(rank)].config; }
  const device::DeviceCommunicator& tables(int rank) const {
    return *members_[index(rank)].tables->address();
  }
  transport::PeerLink link(int a, int b) const;

  // Puts all counters, FIFOs and scratch into a state that only `random` decides: as after some
  // random past of the ranks, with junk where nothing may be read. Nothing may run.
  void reset(Random& random, Past past = Past::any);

  // Enqueues one group of calls of one rank.
  void enqueue(int rank, const std::vector<plan::Task>& tasks);
  // Enqueues work that takes about `steps` steps of the schedule and waits for nobody.
  void enqueueDelay(int rank, uint64_t steps);
  // Sets a rank's abort flag about `steps` steps after the stream `other` gets there.
  void enqueueAbort(int rank, uint64_t steps, runtime::Stream other);
  void raiseAbort(int rank);
  // Enqueues a write of a range, as far as data races are concerned: for a user that frees it.
  void enqueueTouch(void* address, size_t bytes, runtime::Stream on);

  // The entry of a window of `peer` in the table of `rank`.
  device::MappedWindow* windowEntry(int rank, int peer, uint64_t window) const;
  // Enqueues, in order with other changes, a change of that entry after about `steps` steps.
  void enqueueWindow(int rank, int peer, device::WindowChange change, uint64_t window,
                     std::byte* base, uint64_t steps);

  // Names the windows and outputs that kernels still claim to use. Nothing may run.
  std::string usersLeft() const;
  // Blocks of the launches since reset(), all of which are done, that have not marked their begin
  // and their end.
  std::string unmarkedBlocks() const;

  // Waits for every rank; what each one's stream threw, or an empty text.
  std::vector<std::string> synchronize();

 private:
  struct Member {
    plan::CommConfig config;
    std::shared_ptr<runtime::PinnedMemory> abortFlag;
    std::unique_ptr<memory::Arena> arena;
    std::unique_ptr<memory::MappingCache> mappings;
    std::unique_ptr<transport::DeviceTables> tables;
    std::vector<transport::PeerPlace> places;
    transport::PeerLinks links;
    transport::ChannelGraphs graphs;
    std::unique_ptr<transport::Connector> connector;
    std::shared_ptr<void> stream;
    std::shared_ptr<void> mapper;  // the stream of its changes of windows
    std::shared_ptr<runtime::PinnedMemory> users;
    // device::LaunchMark, the times for each launch.
    std::vector<uint64_t> marks = std::vector<uint64_t>(device::kMarkWords);
    std::deque<std::vector<device::BlockTime>> times;
  };

  static size_t index(int rank) { return static_cast<size_t>(rank); }
  uint32_t* abortFlag(int rank) const;
  void makeMember(int rank, int ranks);
  transport::ChannelGraphs makeGraphs(int ranks) const;
  std::vector<topology::TreePlace> makeRails(int ranks, int tree) const;
  transport::ChainGraph makeChainGraph(int ranks) const;
  transport::HeadGraph makeHeadGraph(int ranks) const;
  int nodesOf(int ranks) const { return ceilDivide(ranks, geometry_.ranksPerNode); }
  int nodeOf(int rank) const { return rank / geometry_.ranksPerNode; }
  // The number of a rank among those of its node.
  template <typename Rank>
  size_t localRank(Rank rank) const {
    return static_cast<size_t>(rank) % static_cast<size_t>(geometry_.ranksPerNode);
  }
  // The two ends of every FIFO.
  struct FifoPair {
    device::Fifo &send, &receive;
    size_t slotBytes;
    bool hasLines;     // protocol LL
    bool isContinued;  // on the other side of the network, by the next one
    std::string name;
  };
  template <typename Visit>
  void visitFifos(Visit visit) const;
  template <typename Visit>
  void visitNetworkFifos(Visit visit) const;
  uint64_t randomStep(Past past, Random& random) const;
  void resetFifo(const FifoPair& fifo, uint64_t step, Random& random);
  void resetDirect(Random& random);
  void resetWide(Random& random);
  void resetHeads(device::Multicast* device::DeviceCommunicator::*member, Random& random);
  void nameMemory() const;
  void nameHeads(int rank, const device::Multicast* heads, const std::string& algorithm) const;
  void nameWide(int rank) const;

  Geometry geometry_;
  // Before its users. Streams of the network are those of rank 0.
  std::unique_ptr<SimulatedNetwork> reducer_;
  std::shared_ptr<void> reducerStream_;
  std::unique_ptr<PassingNetwork> network_;
  std::shared_ptr<void> networkStream_;
  std::vector<Member> members_;
};

}  // namespace unisono::protocol
