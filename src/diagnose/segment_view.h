// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <map>
#include <string>

#include "diagnose/rank_view.h"

namespace unisono::diagnose {

// Whether a segment of kSegmentBytes holds tables of calls that this version can read.
bool isTables(std::byte* segment);

// Calls visit(table) for each communicator of a process.
template <typename Visit>
void forEachTable(std::byte* segment, Visit visit) {
  const size_t used =
      std::min<size_t>(headOf(segment).tables.load(std::memory_order_acquire), kTables);
  for (size_t slot = 0; slot < used; slot++) {
    const CallTable& table = tableOf(segment, slot);
    if (table.id.load(std::memory_order_acquire) != 0) visit(table);
  }
}

// The settings that a process has told. Empty while they change.
std::map<std::string, std::string> readSettings(const ProcessHead& head);

// What the process of a rank waits in with another communicator on the same device; "" if it is in
// no other call for more than a moment.
std::string waitElsewhere(std::byte* segment, const RankView& rank, int64_t now);

}  // namespace unisono::diagnose
