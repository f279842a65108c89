#pragma once

#include "bootstrap/unique_id.h"
#include "comm/registry.h"

namespace unisono::comm {

// Makers of communicators, for Group::add. Each is run by every rank of the new communicator.

// Rank `rank` of `ranks` that meet by `id`, on `device`.
Handle::Maker makeFromId(runtime::Runtime& runtime, const bootstrap::UniqueId& id, int rank,
                         int ranks, int device, const Settings& settings, const Options& options);

// The colour with which a rank takes part in a split and gets no communicator.
inline constexpr int kNoColor = -1;

// Ranks of `parent` with the same `color`, ordered by `key`, then by their rank in `parent`. Gives
// null for kNoColor.
Handle::Maker makeFromSplit(const std::shared_ptr<Communicator>& parent, int color, int key,
                            const Options& options);

}  // namespace unisono::comm
