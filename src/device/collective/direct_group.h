// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/collective/direct.h"

// Several works of the direct family in one launch. In a file of its own, because whoever includes
// it compiles the functions of its tables.
namespace unisono::device::UNISONO_TARGET {

// The halves of a work in a launch of several. They are called through tables, so that the compiler
// does not inline all of them into one kernel.
using DirectGroupLaunch = DirectLaunch<DirectRanks<4, false>, DirectArguments>;
using DirectHalf = bool (*)(const DirectArguments&, const DirectLane&, int);

template <typename Combine>
UNISONO_DEVICE_CALL bool sendWork(const DirectArguments& arguments, const DirectLane& at, int w) {
  DirectGroupLaunch launch(arguments, at);
  bool isMarked = true;
  return launch.send<Combine>(w, launch.loadFor(w, 0), true, isMarked);
}
template <typename Combine>
UNISONO_DEVICE_CALL bool receiveWork(const DirectArguments& arguments, const DirectLane& at,
                                     int w) {
  DirectGroupLaunch launch(arguments, at);
  return launch.receive<Combine>(w, launch.loadFor(w, 0));
}

struct MakeSendWork {
  template <typename R>
  constexpr DirectHalf operator()() const {
    using Combine = std::conditional_t<R::kPrepares, R, DirectCopy>;
    return &sendWork<Combine>;
  }
};
struct MakeReceiveWork {
  template <typename R>
  constexpr DirectHalf operator()() const {
    return &receiveWork<R>;
  }
};
UNISONO_DEVICE_TABLE ReductionTable<DirectHalf> kSendWork =
    makeReductionTable<DirectHalf>(MakeSendWork{});
UNISONO_DEVICE_TABLE ReductionTable<DirectHalf> kReceiveWork =
    makeReductionTable<DirectHalf>(MakeReceiveWork{});

// A launch of several works, which finds their types and operators when it runs. All lines are sent
// before the first is awaited, so that no order of the works can deadlock.
template <typename Stopped, typename SyncBlock>
UNISONO_DEVICE void directGroup(const DirectArguments& arguments, const DirectLane& at,
                                Stopped stopped, SyncBlock syncBlock) {
  if (stopped()) return;
  if (at.lane == 0) markStart(arguments.mark, at.block, 0);
  DirectGroupLaunch launch(arguments, at);
  launch.acknowledge();
  bool going = true;
  for (int w = 0; going && w < arguments.works; w++) {
    const DirectWork& work = arguments.work[w];
    if (!launch.takesPart(work)) continue;
    const DirectHalf send = work.reduces ? kSendWork.of(work.reduction) : &sendWork<DirectCopy>;
    going = send(arguments, at, w);
  }
  for (int w = 0; going && w < arguments.works; w++) {
    const DirectWork& work = arguments.work[w];
    if (!launch.takesPart(work)) continue;
    const DirectHalf receive =
        work.reduces ? kReceiveWork.of(work.reduction) : &receiveWork<DirectCopy>;
    going = receive(arguments, at, w);
  }
  launch.advance(syncBlock);
  if (at.lane == 0) markEnd(arguments.mark, at.block, 0);
}

}  // namespace unisono::device::UNISONO_TARGET
