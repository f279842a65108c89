// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/host/schedule.h"

namespace unisono::runtime::host {

// Enumerates the schedules of a program that is run again and again: a depth-first search over its
// choices, with sleep sets (Godefroid 1996), so that of the schedules that differ only in the order
// of accesses that do not touch each other about one is run. Use:
//   do { run the program under Schedule{.seed = 0, .explorer = &explorer}; } while
//   (explorer.next());
class Explorer {
 public:
  // A task that may run, and the access that it makes when it does; Kind::none: it runs to its next
  // access and touches nothing that others see.
  struct Candidate {
    uint64_t task;
    Access access;
  };

  // During a run: which of the candidates runs; which of `count` stores a load returns.
  size_t chooseTask(const std::vector<Candidate>& candidates);
  size_t chooseStore(size_t count);

  // After a run: whether there is another one.
  bool next();

  uint64_t runs() const { return runs_; }
  // Runs that were found to repeat earlier ones while they ran.
  uint64_t repeatedRuns() const { return repeatedRuns_; }

 private:
  struct Choice {
    std::vector<Candidate> candidates;  // empty: a choice of stores
    std::vector<Candidate> asleep;      // need not run here: their runs are explored elsewhere
    size_t chosen = 0;
    size_t count = 0;
  };

  static bool isAsleep(const Choice& choice, size_t candidate);

  std::vector<Choice> choices_;
  size_t depth_ = 0;
  std::vector<Candidate> asleep_;  // at the present point of the run
  bool repeats_ = false;
  uint64_t runs_ = 0;
  uint64_t repeatedRuns_ = 0;
};

}  // namespace unisono::runtime::host
