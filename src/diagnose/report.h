// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "diagnose/rank_view.h"

// Why a call does not end, from what the tables of all ranks say. Pure.
namespace unisono::diagnose {

enum class Verdict {
  differentCalls,  // ranks made other calls under the same number
  notArrived,      // a rank has not made the call
  noAnswer,        // nobody can say what a rank does, and it does not answer
  notConnected,    // all have made it, and connect
  outside,         // its kernel has not begun on some rank: other work is before it on its stream
  inNetwork,       // all kernels run, and data do not leave a host
  inKernel,        // all kernels run and do not end
};

struct Report {
  Verdict verdict = Verdict::notArrived;
  std::string headline;  // the verdict as a sentence
  Call call;
  bool isOverrun = false;  // it is one before that, which the table no longer holds
  int rank = 0;            // whose call it is
  double seconds = 0;      // since when it waits
  std::vector<int> missing, waiting, finished;  // ranks, each in one list at most
  std::vector<int> silent;                      // ranks that did not answer
  std::vector<std::pair<int, int>> waits;       // who waits for whom
  std::vector<int> cycle;                       // of ranks that wait for each other; empty: none
  std::vector<std::string> details;             // of the first such ranks, a line each
  std::vector<std::string> settings;            // that differ between ranks, a line each
  std::string next;                             // what to do

  // The same for all ranks that explain the same call.
  uint64_t key() const;

  // Several lines: the headline, the call, the lists, the details, what to do.
  std::string text(const RankView& self) const;
  std::string json(const RankView& self) const;  // one line
};

// "none", "rank 3", "ranks 0, 1, 4-9".
std::string rankList(const std::vector<int>& ranks);

// `views` are by rank. Explains the call that rank `self` is in; nothing if it is in none.
std::optional<Report> explain(const std::vector<RankView>& views, int self, int64_t now);

}  // namespace unisono::diagnose
