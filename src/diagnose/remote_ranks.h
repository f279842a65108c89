// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "diagnose/rank_view.h"
#include "diagnose/remote_views.h"

namespace unisono::diagnose {

class PeerTables;

// What one rank learns of those whose tables its process cannot map, such as the ranks of other
// hosts: it asks them. The watchdog's thread does, a few times a second, and never waits.
class RemoteRanks {
 public:
  // Sends a question and returns whether it is under way; with `connects` a rank to which there is
  // no connection yet is connected, for a later attempt.
  using Ask = std::function<bool(int rank, std::span<const std::byte> question, bool connects)>;

  // `uplink`: a lower rank, or -1.
  RemoteRanks(std::shared_ptr<PeerTables> peers, int rank, int uplink, Ask ask);

  // An answer. Called by any thread.
  void hear(std::vector<std::byte> answer);

  // Whether compare() has something to do for a rank that has made so many calls.
  bool isComparing(uint64_t ownCalls) const { return isPending_ || ownCalls != comparedCalls_; }
  // Asks for calls that are to be compared with those of `own`: the collectives of the uplink, and
  // what peers receive from this rank. Returns what has been answered since the last time. Only
  // connections that exist are used.
  std::vector<RankView> compare(const RankView& own, uint64_t ownCalls, int64_t now);

  // Forgets what ranks have told. `now` here and in gather() is of any clock, the same for both.
  void restart(int64_t now);
  // Asks for all ranks that cannot be read: first the uplink, which may be about to explain the
  // same, then one rank of each host, then one of each process that nobody has told of. Returns
  // whether all have answered, or have had the time to.
  bool gather(int64_t now);
  // What is known of a rank by now; null: nothing.
  const RankView* find(int rank) const;

 private:
  struct Heard {
    std::vector<std::byte> message;
    int64_t when;
  };
  struct Comparison {
    uint64_t collectives = 0, messages = 0;  // that were compared
    uint64_t quiet = 0;                      // the collectives of the last quiet point that was
    uint64_t quietMessages = 0;              // the messages of the last one that was
    bool hasCaptures = false;                // they, as last told
    int64_t due = 0;                         // when to ask again
  };
  struct Asked {
    Question question;
    bool isSent = false, isAnswered = false;
  };
  enum class Stage { uplink, hosts, processes, done };

  void takeAnswers();
  void takeAnswer(Answer answer);
  bool ask(int rank, const Question& question, bool connects) const;
  std::vector<int> targets() const;

  const std::shared_ptr<PeerTables> peers_;
  const int rank_, uplink_;
  const Ask ask_;
  std::mutex mutex_;
  std::vector<Heard> heard_;

  uint64_t questions_ = 0;               // the number of the last one
  std::map<uint64_t, int> outstanding_;  // who is to answer which

  std::map<int, Comparison> comparisons_;
  std::vector<RankView> compared_;  // answers that compare() has not returned yet
  uint64_t comparedCalls_ = 0;
  bool isPending_ = false;

  Stage stage_ = Stage::uplink;
  int64_t stageBegan_ = 0;
  std::map<int, Asked> asked_;
  std::map<int, RankView> told_;
};

}  // namespace unisono::diagnose
