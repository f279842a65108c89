// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "diagnose/journal.h"
#include "diagnose/watchdog.h"
#include "plan/plan.h"

namespace unisono::diagnose {

constexpr int64_t kSecond = 1'000'000'000;

// A call of int32 elements, as a journal takes it.
inline plan::Task task(plan::Call call, uint64_t count, int peer = -1) {
  plan::Task made{};
  made.call = call;
  made.count = count;
  made.peer = peer;
  made.reduction.type = device::DataType::int32;
  return made;
}

// A rank that is in its call, as its watchdog looks at it, at times that the test sets.
class SimulatedWatch {
 public:
  static constexpr int64_t kPatience = 8'000'000'000, kInterval = 250'000'000;

  SimulatedWatch(std::shared_ptr<Journal> journal, std::shared_ptr<PeerTables> peers, int rank,
                 RemoteRanks::Ask ask = {})
      : journal_(std::move(journal)) {
    Questions questions;
    questions.findFailure = [] { return std::nullopt; };
    questions.isDone = [this] { return isDone_; };
    questions.readProgress = [this] {
      measurements_++;
      return Progress{2, 1};
    };
    questions.readLinks = [] { return std::vector<Link>(); };
    questions.readReplays = [] { return std::nullopt; };
    questions.hasAnyoneLeft = [] { return false; };
    questions.ask = std::move(ask);
    watched_ = std::make_unique<Watched>(journal_, std::move(peers), rank, "test",
                                         std::chrono::nanoseconds(kPatience), std::move(questions));
  }
  // One look after so much time, in which all processes either ran or did not.
  void look(int64_t after = kInterval) {
    now_ += after;
    headOf(segmentOfThisProcess()->address()).alive = now_;
    watched_->look(now_);
  }
  // Returns for how long the watchdog looked, at its usual interval.
  int64_t lookUntilReport(int64_t limit) {
    const int64_t begin = now_;
    while (!hasReported() && now_ - begin < limit) look();
    return now_ - begin;
  }
  bool hasReported() const { return journal_->table().reported.load() != 0; }
  int measurements() const { return measurements_; }
  void finish() { isDone_ = true; }
  Watched& watched() { return *watched_; }

 private:
  const std::shared_ptr<Journal> journal_;
  int64_t now_ = steadyNow();
  int measurements_ = 0;
  bool isDone_ = false;
  std::unique_ptr<Watched> watched_;
};

}  // namespace unisono::diagnose
