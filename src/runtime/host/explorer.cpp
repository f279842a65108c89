// SPDX-License-Identifier: Apache-2.0
#include "runtime/host/explorer.h"

#include <algorithm>

#include "base/error.h"

namespace unisono::runtime::host {
namespace {

// Whether the order of two accesses of different tasks may matter.
bool depend(const Access& a, const Access& b) {
  if (a.kind == Access::Kind::none || b.kind == Access::Kind::none) return false;
  if (a.kind == Access::Kind::fence || b.kind == Access::Kind::fence) {
    return a.kind == b.kind && a.order == std::memory_order_seq_cst &&
           b.order == std::memory_order_seq_cst;
  }
  return a.address == b.address && (a.writes() || b.writes());
}

bool contains(const std::vector<Explorer::Candidate>& tasks, uint64_t task) {
  return std::any_of(tasks.begin(), tasks.end(), [&](const auto& one) { return one.task == task; });
}

}  // namespace

bool Explorer::isAsleep(const Choice& choice, size_t candidate) {
  return contains(choice.asleep, choice.candidates[candidate].task);
}

size_t Explorer::chooseTask(const std::vector<Candidate>& candidates) {
  for (size_t i = 0; i < candidates.size(); i++) {
    if (candidates[i].access.kind == Access::Kind::none) return i;
  }
  if (repeats_) return 0;
  if (depth_ == choices_.size()) {
    Choice choice{candidates, asleep_, 0, candidates.size()};
    while (choice.chosen < candidates.size() && isAsleep(choice, choice.chosen)) choice.chosen++;
    if (choice.chosen == candidates.size()) {
      repeats_ = true;
      return 0;
    }
    choices_.push_back(std::move(choice));
  }
  const Choice& choice = choices_[depth_++];
  if (choice.count != candidates.size()) {
    throw internalError("A program that is explored does not replay: it has {} tasks instead of {}",
                        candidates.size(), choice.count);
  }
  const Candidate& chosen = choice.candidates[choice.chosen];
  asleep_.clear();
  for (const Candidate& one : choice.asleep) {
    if (one.task != chosen.task && !depend(one.access, chosen.access)) asleep_.push_back(one);
  }
  return choice.chosen;
}

size_t Explorer::chooseStore(size_t count) {
  if (repeats_) return 0;
  if (depth_ == choices_.size()) choices_.push_back({{}, {}, 0, count});
  return choices_[depth_++].chosen;
}

bool Explorer::next() {
  runs_++;
  repeatedRuns_ += repeats_;
  repeats_ = false;
  depth_ = 0;
  asleep_.clear();
  while (!choices_.empty()) {
    Choice& choice = choices_.back();
    if (choice.candidates.empty()) {
      if (++choice.chosen < choice.count) return true;
    } else {
      choice.asleep.push_back(choice.candidates[choice.chosen]);
      while (choice.chosen < choice.count && isAsleep(choice, choice.chosen)) choice.chosen++;
      if (choice.chosen < choice.count) return true;
      // The ones asleep may come before the one that was chosen last.
    }
    choices_.pop_back();
  }
  return false;
}

}  // namespace unisono::runtime::host
