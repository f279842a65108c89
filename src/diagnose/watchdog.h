// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fork.h"
#include "diagnose/journal.h"
#include "diagnose/outside_inquiries.h"
#include "diagnose/rank_view.h"
#include "diagnose/remote_ranks.h"
#include "diagnose/wait_clock.h"

namespace unisono::diagnose {

// Where the table of a rank is.
struct RankPlace {
  uint64_t process = 0;  // runtime::processToken()
  TablePlace table;
  uint64_t host = 0;  // processes of different hosts share no memory
  int64_t pid = 0;
  int device = 0;
  std::string hostName = {}, address = {}, port = {};  // for people; the last two of its listener
  // "process 17 on host n1, 10.0.0.2:4711".
  std::string text() const;
};

// The tables of all ranks of a communicator that this process can map, for all its ranks in this
// process. The watchdog's thread maps them; any thread may read.
class PeerTables {
 public:
  // `id` is that of the communicator.
  static std::shared_ptr<PeerTables> get(uint64_t id, const std::vector<RankPlace>& places);
  PeerTables(uint64_t id, const std::vector<RankPlace>& places);

  // Maps what is not mapped yet, now and then.
  void map(int64_t now);
  int ranks() const { return static_cast<int>(peers_.size()); }
  bool isMapped(int rank) const { return tableAt(rank) != nullptr; }
  uint64_t id() const { return id_; }
  const RankPlace& place(int rank) const { return at(rank).place; }
  RankView view(int rank, int64_t now) const;
  // Changes when a rank has made calls, or has come to a quiet point.
  uint64_t calls(int rank) const;
  // Fills in the settings of the process of a rank, and what it waits in with another communicator.
  void addProcess(RankView& view, int64_t now) const;

 private:
  struct Peer {
    RankPlace place;
    bool isNear = false;  // on the host of a rank of this process
    std::shared_ptr<runtime::host::MemorySegment> segment;
    std::atomic<const CallTable*> table = nullptr;  // in the segment; null while it is not mapped
  };
  const Peer& at(int rank) const { return peers_[static_cast<size_t>(rank)]; }
  const CallTable* tableAt(int rank) const {
    return at(rank).table.load(std::memory_order_acquire);
  }

  const uint64_t id_;
  std::deque<Peer> peers_;
  bool allMapped_ = false;
  int64_t nextMapping_ = 0;
};

// The numbers of the last launch whose kernel has begun, and of the last one that is done unless it
// is the last of all.
struct Progress {
  uint64_t started = 0, finished = 0;
  bool operator==(const Progress&) const = default;
};

// What the watchdog asks a communicator. Called by its thread with a lock held that Watched::stop()
// takes. An exception ends the diagnosis of the communicator.
struct Questions {
  // Why there is nothing more to find out: the communicator has an error, or was aborted.
  struct Failure {
    int error;  // ncclResult_t
    bool aborted;
  };
  std::function<std::optional<Failure>()> findFailure;
  // Whether everything that was launched is done.
  std::function<bool()> isDone;
  // Read the device while kernels run. Nothing if it does not answer.
  std::function<std::optional<Progress>()> readProgress;
  std::function<std::optional<std::vector<Link>>()> readLinks;
  std::function<std::optional<Replays>()> readReplays;
  // Whether a rank has left, which replays may need.
  std::function<bool()> hasAnyoneLeft;
  // Makes the communicator fail on all ranks.
  std::function<void(const Error&)> fail;
  // Of ranks whose tables this process cannot map: see bootstrap::Bootstrap.
  RemoteRanks::Ask ask;
  std::function<bool(int rank)> hasLeft;
  std::function<bool(int rank)> hasDied;
  int uplink = -1;
};

// The tables of this process and of all others that it has mapped for its communicators, with the
// settings of their processes and what these wait in elsewhere, or without.
std::vector<RankView> readAllTables(bool withProcesses = false);

// A communicator of this process that the watchdog looks at until stop().
class Watched {
 public:
  Watched(std::shared_ptr<Journal> journal, std::shared_ptr<PeerTables> peers, int rank,
          std::string description, std::chrono::nanoseconds patience, Questions questions);
  // Does all that is to be done at `now`, of steadyNow(). Only the watchdog's thread calls it.
  void look(int64_t now);
  // Returns when the watchdog asks no more.
  void stop();
  // The answer of another rank to a question.
  void hear(std::vector<std::byte> answer);
  // For a JobInquiry, by any thread. They return false if they would have to wait.
  bool askNow(int rank, const Question& question);
  bool hasDied(int rank);
  bool hasLeft(int rank);
  bool isStopped() const { return stopped_; }
  const std::shared_ptr<PeerTables>& peers() const { return peers_; }
  // The watchdog asks nothing while the returned lock is held.
  std::unique_lock<std::mutex> pause() { return std::unique_lock(mutex_); }

 private:
  friend class Watchdog;

  void forgetMeasurement(int64_t now);
  bool updateProgress(int64_t now);
  void measure(int64_t now);
  void lookAtReplays(int64_t now);
  void noteQuiet(int64_t now);
  void compareCalls(int64_t now);
  bool compareWith(const RankView& own, const RankView& other);
  bool isMeasured() const;
  void reportHang(int64_t now);
  std::vector<RankView> collectViews(int64_t now);
  RankView viewOf(int rank, int64_t now) const;
  bool reportsInstead(const RankView& other, int64_t now) const;

  std::mutex mutex_;
  std::atomic<bool> stopped_ = false;
  const std::shared_ptr<Journal> journal_;
  const std::shared_ptr<PeerTables> peers_;
  const int rank_;
  const std::string description_;
  const int64_t patience_;
  Questions questions_;
  WaitClock clock_;
  bool isBusy_ = false;  // a launch was not done at the last look
  int64_t nextMeasurement_ = 0;
  std::optional<Progress> measured_;  // what the device said last, while it is busy
  int unread_ = 0;                    // attempts since then that said nothing
  std::vector<int> compared_;         // the ranks whose calls were compared last
  uint64_t comparedCalls_ = 0;        // how many calls they had made
  bool mismatches_ = false;
  int64_t nextReplays_ = 0, nextQuiet_ = 0;
  std::pair<uint64_t, uint64_t> reported_;  // the call of the last report: its index, its replay
  std::pair<uint64_t, uint64_t> asked_;     // the call that other hosts are asked about
  RemoteRanks remote_;
};

// A thread of the process that looks at all its communicators a few times a second: whether calls
// go on, whether the calls of all ranks fit together, and, when one makes no progress for
// UNISONO_HANG_SECONDS, why. It sleeps while there are no communicators. It is not the thread of
// the bootstrap's connections, since what it asks the device may take long when the device hangs.
class Watchdog {
 public:
  static constexpr std::chrono::milliseconds kInterval{250}, kInquiryInterval{20};

  static Watchdog& get();
  void add(const std::shared_ptr<Watched>& watched);
  std::vector<std::shared_ptr<Watched>> all();

 private:
  Watchdog() = default;
  void run();
  void stop();

  const int forks_ = forkCount();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::weak_ptr<Watched>> watched_;
  bool running_ = false, stopped_ = false, looking_ = false;
  OutsideInquiries inquiries_;  // of the thread
};

}  // namespace unisono::diagnose
