// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "diagnose/rank_view.h"
#include "diagnose/remote_views.h"

namespace unisono::diagnose {

class Watched;

// What is known of a job, for clients of NCCL's RAS protocol and for `unisono doctor`.
struct JobState {
  // Of all communicators that are known. Not isKnown: a rank that nobody has told of, with the
  // place of its process.
  std::vector<RankView> views;
  double seconds = 0;  // that it took
  int timeouts = 0;    // processes that were asked and have not answered
};

// Gathers the ranks of all communicators of this process, and those of all communicators that the
// processes which are asked know: one process of each host first, then each one that nobody has
// told of. It never waits, and takes `limit` at most. Used by one thread.
class JobInquiry : public std::enable_shared_from_this<JobInquiry> {
 public:
  // `kind`: job or everything.
  static std::shared_ptr<JobInquiry> begin(int64_t now, int64_t limit,
                                           Question::Kind kind = Question::Kind::job);

  // Asks, and takes what was answered. Returns whether it is complete.
  bool proceed(int64_t now);
  JobState job(int64_t now) const;

  // Called with an answer, by any thread. Returns whether it is one to an inquiry.
  static bool hear(std::span<const std::byte> answer);

 private:
  struct Asked {
    std::shared_ptr<Watched> by;
    int rank;
    Question question;
    bool isSent = false, isAnswered = false;
  };
  struct Heard {
    std::vector<std::byte> message;
    int64_t when;
  };

  bool isCovered(const Watched& communicator, int rank) const;
  void findTargets();
  void takeAnswers();
  void add(RankView&& view);

  int64_t began_ = 0, limit_ = 0;
  Question::Kind kind_ = Question::Kind::job;
  std::vector<std::shared_ptr<Watched>> communicators_;  // each once, the largest first
  bool asksProcesses_ = false;                           // the second stage
  std::set<uint64_t> units_;                             // hosts or processes that were asked
  std::vector<Asked> asked_;
  std::map<std::pair<uint64_t, int>, RankView> views_;  // by communicator and rank
  std::mutex mutex_;
  std::vector<Heard> heard_;
};

}  // namespace unisono::diagnose
