// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bootstrap/unique_id.h"
#include "comm/agreement.h"
#include "comm/call_profile.h"
#include "comm/health.h"
#include "comm/launch_notes.h"
#include "comm/replays.h"
#include "comm/turns.h"
#include "diagnose/watchdog.h"
#include "memory/windows.h"
#include "plugin/tuner.h"
#include "transport/connector.h"
#include "transport/launcher.h"
#include "transport/net/collnet.h"
#include "transport/net/network_driver.h"

namespace unisono {
class StageTimes;
}

namespace unisono::comm {

// What a user may ask of one communicator; 0 or empty: as the settings say.
struct Options {
  int minChannels = 0;
  int maxChannels = 0;
  int netPeerChannels = 0;  // as NCCL_NCHANNELS_PER_NET_PEER, which wins
  int clusterBlocks = 4;    // as NCCL_CGA_CLUSTER_SIZE, which wins
  std::string name;
  std::string network;  // as NCCL_NET, which wins
  static constexpr int kAnyTrafficClass = -1;
  int trafficClass = kAnyTrafficClass;  // of a network plug-in
  bool collnet = false;                 // as NCCL_COLLNET_ENABLE, which wins
  bool copyEngines = false;             // as NCCL_CTA_POLICY=ZERO, which wins
  bool deterministic = false;           // as UNISONO_DETERMINISTIC=1, one of them is enough
  uint64_t id = 0;                      // the same on all ranks, set by the library
};

// A factor of a pre-multiplied sum, by the number of its operator.
struct CustomReduction {
  device::DataType type;
  bool scalarIsPointer;
  uint64_t scalar;  // as in device::ReductionSpec
};

// One rank of a communicator. Calls come from one thread at a time, abort() from any.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // Collective over the ranks of `bootstrap`; `device` is this rank's. `times`: of the stages
  // before. Throws Error. When the last owner of an aborted communicator drops it, the Reaper gets
  // it and nobody waits.
  static std::shared_ptr<Communicator> create(runtime::Runtime& runtime,
                                              std::unique_ptr<bootstrap::Bootstrap> bootstrap,
                                              int device, const Settings& settings,
                                              const Options& options,
                                              std::shared_ptr<Health> health, StageTimes times);
  // Unless it was aborted, waits for what was launched, and for peers that are still connecting to
  // this rank; other ranks need not be there any more.
  ~Communicator();

  int rank() const { return config_.rank; }
  int ranks() const { return config_.ranks; }
  int device() const { return device_; }
  const Settings& settings() const { return settings_; }
  const Options& options() const { return options_; }
  bootstrap::Bootstrap& bootstrap() { return *bootstrap_; }
  bool aborted() const { return abort_->raised(); }
  const Health& health() const { return *health_; }
  // Numbers the shrinks of this communicator: all ranks that remain make them in the same order.
  uint64_t beginShrink() { return shrinks_++; }
  // The id with which new ranks join the ranks of this communicator. Throws Error(invalidUsage)
  // while there is one that was not used.
  bootstrap::UniqueId createGrowId();
  // That id, nothing on ranks that have not made one; and its end.
  std::optional<bootstrap::UniqueId> growId() const;
  void dropGrowId();
  // The order of collectives over bootstrap(), such as those of splits.
  Turns& turns() { return *turns_; }
  runtime::Runtime& runtime() { return runtime_; }

  // The profile of a group of calls that begins now; null if nobody wants to know.
  std::shared_ptr<GroupProfile> beginProfile() {
    return profile_ == nullptr ? nullptr : profile_->beginGroup();
  }

  // The calls of a group, and what its three stages need.
  struct Prepared {
    std::vector<plan::Task> tasks;
    std::vector<runtime::Stream> streams;  // those of the calls, each once; the first launches
    plan::Plan plan;
    CallNeeds needs;
    uint64_t firstCall = 0, lastCall = 0;   // in the journal, once they are entered
    bool captured = false;                  // into a graph
    Replays::Captured replays{};            // of captured calls that are watched
    std::shared_ptr<GroupProfile> profile;  // null if nobody wants to know
    std::vector<plan::Copy> copies;  // before the launches: inputs that the calls would overwrite

    void add(const plan::Task& task, runtime::Stream stream);
    // Drops everything but memory of the lists, for the next group.
    void clear();
  };
  // The call with its choice.
  plan::Task choose(plan::Task task) const {
    plan::choose(config_, task);
    return task;
  }
  // A failure changes nothing.
  void prepare(Prepared& prepared);
  // Notes for the diagnosis that ncclCommFinalize was called.
  void noteFinalize() {
    if (journal_ != nullptr) journal_->noteFinalize();
  }
  // Notes the calls for the diagnosis of hangs.
  void enter(Prepared& prepared);
  bool isConnected(const Prepared& prepared) const;
  void connect(const Prepared& prepared);
  void launch(Prepared& prepared);

  // Lets the peers map a buffer now, not after the first call that uses it, until the returned
  // object goes. Null if peers cannot map it.
  std::shared_ptr<void> registerMemory(const void* address, uint64_t bytes);
  // The same for a buffer of every rank: returns when the peers have mapped all that they can, and
  // where this rank sees their buffers. `isSymmetric`: every rank uses the same place in its
  // buffer. Collective, in the order of turns().
  std::shared_ptr<const plan::SymmetricWindow> registerTogether(void* address, uint64_t bytes,
                                                                bool isSymmetric);
  // The consecutive ranks that load from and store to each other's windows, this one among them:
  // those of a node, where all nodes have equally many, or this one alone. NCCL's LSA team.
  struct LoadStoreTeam {
    int first, ranks;
  };
  LoadStoreTeam loadStoreTeam() const;

  // Waits until everything that this communicator launched is done, or until an abort. Work of
  // others on the device is waited for only where a graph may hold launches of ours.
  void finish();
  // Whether everything that this communicator launched is done. Throws what the device reports.
  bool isIdle();
  // Whether captured calls run, as far as that is watched; also if the device does not say.
  bool isReplaying();
  // Tells the other ranks that this one ends now with nothing in progress. `how` follows its name.
  void leave(std::string_view how) noexcept;

  // The stages of ncclCommSuspend, in which all ranks take part: waits for what was launched, and
  // then frees the memory of connections. A failure of the first changes nothing.
  void prepareToSuspend();
  void suspend();
  // Makes the communicator usable again. Collective.
  void resume();

  // The device memory that it has allocated, and the part of it that suspend() frees. Not while
  // other functions run.
  uint64_t deviceBytes() const;
  uint64_t suspendableBytes() const { return deviceBytes() - kept_.bytes(); }

  // Names the communicator and the rank in log lines.
  std::string description() const;

  // Operators of pre-multiplied sums, by a number from 0 that no other communicator of this process
  // has or had, so that an operator of another one, or a destroyed one, is found out.
  int addReduction(const CustomReduction& reduction);
  void removeReduction(int number);
  CustomReduction reduction(int number) const;

 private:
  Communicator(runtime::Runtime& runtime, std::unique_ptr<bootstrap::Bootstrap> bootstrap,
               int device, const Settings& settings, const Options& options,
               std::shared_ptr<Health> health);
  // The facts of all ranks, which the ranks of a process share.
  using AllFacts = std::shared_ptr<const std::vector<RankFacts>>;
  void agree(AllFacts ranks, StageTimes& times);
  void makeConnector();
  RankFacts facts();
  AllFacts connectCollNet(const AllFacts& ranks, const std::vector<int>& ports);
  std::shared_ptr<const tuning::Advisor> makeTuner(const std::vector<RankFacts>& ranks,
                                                   const std::vector<topology::RankPlace>& places,
                                                   tuning::CostConstants& constants) const;
  void makeWindows();
  transport::TransportOptions transportOptions();
  transport::LaunchContext launchContext() const;
  void launchKernels(Prepared& prepared, uint64_t plan, runtime::Stream stream);
  void watch(const std::vector<RankFacts>& ranks);
  void stopWatching();
  void fail(const Error& error);
  std::optional<diagnose::Progress> readProgress();
  std::optional<std::vector<diagnose::Link>> readLinks();
  std::optional<diagnose::Replays> readReplays();
  std::optional<std::vector<uint64_t>> readMarks(const uint64_t* words);
  // The launch that runs, and the marks of its kernel; nothing if none runs or it is not known.
  struct Running {
    LaunchNote note;
    std::vector<uint64_t> marks;
  };
  std::optional<Running> findRunning();
  static void release(Communicator* communicator) noexcept;
  std::shared_ptr<void> keepWindow(uint64_t window);
  // What a rank tells the others of the buffer that it registers together with them.
  struct WindowOffer {
    uint64_t window;  // 0: its memory cannot be shared
    uint64_t offset;  // in the window
    uint64_t address, bytes;
    uint32_t isOpen;  // other ranks of its process can store into it
    uint32_t usesCopyEngines;
  };
  struct SymmetricMemory {
    plan::SymmetricWindow window;
    std::vector<std::shared_ptr<runtime::MappedMemory>> mapped;
    std::shared_ptr<void> own;      // keeps the buffer of this rank registered
    bool suitsCopyEngines = false;  // of all ranks
  };
  std::shared_ptr<void> streamBehindLaunches();
  void findWindows(std::vector<plan::Task>& calls, bool captured);
  void stageInPlace(Prepared& prepared);
  std::byte* stagingBuffer(size_t bytes, bool captured);
  void releaseAfterLaunches(std::shared_ptr<void> memory);
  std::shared_ptr<SymmetricMemory> findBuffers(const std::vector<WindowOffer>& offers) const;
  void findSymmetric(std::vector<plan::Task>& calls);
  void dropSymmetric(const std::shared_ptr<SymmetricMemory>& window);

  runtime::Runtime& runtime_;
  std::shared_ptr<Health> health_;
  AbortSignal* abort_;  // of health_
  Settings settings_;
  Options options_;
  int clusterBlocks_ = 1;  // of launches
  int device_;
  std::string cpuAffinity_, portAffinity_;  // cores near the GPU and its port; may be empty
  std::unique_ptr<bootstrap::Bootstrap> bootstrap_;
  std::shared_ptr<Turns> turns_ = std::make_shared<Turns>();
  std::shared_ptr<const plugin::TunerLibrary> tunerLibrary_;  // null without a plug-in
  std::shared_ptr<const transport::NetworkDriver> network_;
  std::vector<int> netPorts_;                                     // see TransportOptions::ports
  std::vector<transport::DirectAccess> directAccess_;             // see TransportOptions::direct
  std::shared_ptr<const plugin::CollNet> collNet_;                // null: it is not wanted
  std::shared_ptr<const transport::CollNetConnections> reducer_;  // null: it is not used
  uint64_t id_ = 0;                                               // the same on all ranks
  std::shared_ptr<const Decision> decision_;  // shared with the other ranks of the process
  plan::CommConfig config_;                   // of the decision, for this rank
  std::shared_ptr<memory::Arena> arena_;
  std::shared_ptr<memory::Windows> windows_;              // null if no peer can use any
  std::unique_ptr<runtime::ParallelCopies> copyEngines_;  // null: they may not be used
  std::mutex symmetricMutex_;
  std::vector<std::shared_ptr<SymmetricMemory>> symmetric_;  // all windows of this communicator
  std::unique_ptr<memory::MappingCache> mappings_;
  std::unique_ptr<runtime::Event> lastLaunch_;  // recorded after it: its stream may be gone by now
  std::atomic<bool> captures_{false};           // captured_ for other threads
  std::unique_ptr<transport::DeviceTables> tables_;
  // See TransportOptions::deviceBytes.
  const std::shared_ptr<std::atomic<uint64_t>> connectionBytes_ =
      std::make_shared<std::atomic<uint64_t>>(0);
  // Null if nobody wants to know. Connections tell it of their last transfers when they end.
  std::shared_ptr<CallProfile> profile_;
  std::unique_ptr<transport::Connector> connector_;
  // What the last three are made from, and the memory that stays when they are gone.
  std::shared_ptr<const std::vector<transport::PeerPlace>> peerPlaces_;
  std::vector<RankProcess> otherProcesses_;  // those that this one can look at
  transport::PeerLinks peerLinks_;
  memory::Arena::Mark kept_;

  // Null if hangs are not to be diagnosed, or cannot be.
  std::shared_ptr<diagnose::Journal> journal_;
  std::shared_ptr<diagnose::Watched> watched_;
  std::atomic<uint64_t> launches_ = 1;  // the number of the last plan that was launched
  std::unique_ptr<Replays> replays_;
  LaunchNotes notes_;
  std::mutex countersMutex_;
  // Of the FIFOs that are connected, and what the direct family has connected.
  std::vector<transport::Connector::FifoCounters> counters_;
  device::DirectMemory lines_{};
  device::WideMemory wide_{};

  std::atomic<uint64_t> shrinks_{0};
  mutable std::mutex growMutex_;
  std::optional<bootstrap::UniqueId> growId_;
  bool launched_ = false, captured_ = false;
  uint64_t lastStream_ = 0;               // runtime::Runtime::streamNumber
  std::unique_ptr<runtime::Event> join_;  // between the streams of one group

  // For copies of the input of all-to-alls in place.
  std::shared_ptr<runtime::DeviceMemory> staging_, capturedStaging_;
  std::vector<std::shared_ptr<runtime::DeviceMemory>> earlierCapturedStaging_;

  mutable std::mutex reductionsMutex_;
  std::map<int, CustomReduction> reductions_;
};

}  // namespace unisono::comm
