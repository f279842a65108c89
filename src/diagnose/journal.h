// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "diagnose/call_table.h"
#include "runtime/descriptor_service.h"
#include "runtime/host/segment.h"

namespace unisono::diagnose {

// Where the table of a rank is, for other processes.
struct TablePlace {
  static constexpr uint32_t kNone = ~uint32_t{0};
  runtime::DescriptorTicket segment;
  uint64_t serial = 0;  // of the table in its process: no other one has or had it
  uint32_t slot = kNone;
};

// The calls of one rank in its table of this process. Calls come from one thread at a time, as
// those of the communicator do; the watchdog sets the progress.
class Journal {
 public:
  // Takes a free table. Null if there is none, or no memory for them: then nothing can be
  // diagnosed.
  static std::shared_ptr<Journal> create() noexcept;
  ~Journal();
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  TablePlace place();
  // From now on others find the table. `id` is the same on all ranks.
  // `network`: what joins this host to others, over which it has `address`. `host`: as
  // RankPlace::host.
  void start(uint64_t id, int rank, int ranks, int device, uint32_t slots, std::string_view name,
             std::string_view network = "", std::string_view address = "", uint64_t host = 0);

  // Notes a call, before anything is done for it. Returns its index.
  uint64_t enter(const plan::Task& task);
  // Notes a group of captured calls: from now on the numbers of calls are not those of other ranks.
  void noteCapture() { table_.captures.fetch_add(1, std::memory_order_release); }
  void noteFailure(int32_t error, bool aborted);
  // Notes that all calls that were entered and all replays that have begun are done. Nothing is
  // noted if calls were entered since `entered`, which the table said before `replays` was read.
  void noteQuiet(const Replays& replays, uint64_t entered);
  // Notes the call that this rank has explained: see Report::key().
  void noteReport(uint64_t key) { table_.reported.store(key, std::memory_order_release); }
  void noteFinalize() { table_.finalized.store(1, std::memory_order_release); }
  // The calls `first` to `last` are in launch `number`.
  void launched(uint64_t first, uint64_t last, uint64_t number);

  // Whether all calls that were made are done, as far as setProgress() knows.
  bool isIdle() const;
  void setProgress(uint64_t started, uint64_t finished, int64_t now);
  // Returns whether the same replay runs as when this was called last.
  bool setReplays(const Replays& replays, int64_t now);
  void setLinks(std::span<const Link> links);

  const CallTable& table() const { return table_; }
  std::byte* segment() const { return segment_->address(); }

 private:
  Journal(std::shared_ptr<runtime::host::MemorySegment> segment, uint32_t slot, uint64_t serial);

  const std::shared_ptr<runtime::host::MemorySegment> segment_;
  const uint32_t slot_;
  const uint64_t serial_;
  const int forks_;
  CallTable& table_;
  // The messages of one direction that were entered, and the record of the flow; null: there is
  // none left.
  struct Messages {
    MessageSum entered;
    FlowRecord* record = nullptr;
  };
  // With the lock held, as the next two.
  Messages& messagesOf(int peer, bool sends);
  void setReplayedMessages(const Replays& replays);
  void noteQuietMessages(const Replays& replays);

  uint64_t entered_ = 0, collectives_ = 0;
  std::atomic<uint64_t> eager_{0}, eagerHash_{0};  // collectives that were entered, and their hash
  std::mutex messagesMutex_;
  std::map<std::pair<int, bool>, Messages> messages_;  // by peer, and whether they are sent
};

// Tells the other processes what this one's settings are, NAME and value, in place of what was told
// before. They get the first that fit into kSettingsBytes.
void noteSettings(const std::vector<std::pair<std::string, std::string>>& settings);

// The segment of this process; null before its first journal.
std::shared_ptr<runtime::host::MemorySegment> segmentOfThisProcess();

// The arguments of a call.
Call callOf(const plan::Task& task);

// Nanoseconds of the steady clock, which all processes of a host share.
int64_t steadyNow();

}  // namespace unisono::diagnose
