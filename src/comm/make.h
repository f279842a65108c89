// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "bootstrap/unique_id.h"
#include "comm/registry.h"

namespace unisono::comm {

// Functions that initialize communicators, for CallGroup::add. Every rank of the new communicator
// runs one.

// Joins the communicator of `ids`, whose roots share the ranks, as `rank` of `ranks`, on `device`.
Handle::InitFunction makeFromIds(runtime::Runtime& runtime, std::vector<bootstrap::UniqueId> ids,
                                 int rank, int ranks, int device, const Settings& settings,
                                 const Options& options);

// The color with which a rank takes part in a split without getting a communicator.
inline constexpr int kNoColor = -1;

// Joins the ranks of `parent` that have the same `color`, in the order of `key` and then of their
// rank in `parent`. Returns null for kNoColor.
Handle::InitFunction makeFromSplit(const std::shared_ptr<Communicator>& parent, int color, int key,
                                   const Options& options);

// Joins the ranks of `parent` but those in `excluded`, in the same order. The excluded ones, which
// may have ended, and failures of `parent` do not matter. Throws Error(invalidArgument) when this
// rank or a rank that does not exist is excluded.
Handle::InitFunction makeFromShrink(const std::shared_ptr<Communicator>& parent,
                                    std::span<const int> excluded, const Options& options);

// Joins all ranks of `parent`, with the same numbers, and new ranks that makeFromIds() joins with
// the id that one of them has from Communicator::createGrowId(). `id`: that id, or nothing. Throws
// Error(invalidArgument) when there are no new ranks, or the id is another one than this rank's.
Handle::InitFunction makeFromGrow(const std::shared_ptr<Communicator>& parent, int ranks,
                                  const std::optional<bootstrap::UniqueId>& id,
                                  const Options& options);

}  // namespace unisono::comm
