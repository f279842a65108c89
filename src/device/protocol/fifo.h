// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/protocol/launch_mark.h"
#include "device/simt/simt.h"
#include "device/work.h"

// What a thread group knows of its launch, and the ends of the FIFOs that it uses.
namespace unisono::device::UNISONO_TARGET {

// A set of peers, by their place in Block::receive or Block::send.
using Peers = uint32_t;
inline constexpr Peers kNobody = 0;

// The most peers that a group receives from, and the most that it sends to.
inline constexpr int kMaxFan = kMaxTreeChildren;

// One end of a FIFO during a work. `fifo.step` is the step at which the work begins; each thread
// counts on from there.
struct End {
  Fifo fifo;
  Fifo* origin;  // null: no peer
  int32_t peer;
};

// The state of a thread group, in block-shared memory on a GPU: whatever is the same for all
// threads and need not be in registers. Works replace it one after another.
struct Block {
  CollectiveWork work;
  int32_t rank, ranks, channel;
  uint32_t slots;
  uint32_t slotBytes;
  int32_t group;  // this group among those of its block
  const uint32_t* abortFlag;
  MappedWindow* windows;  // of the communicator
  Ring ring;
  Tree tree;
  End receive[kMaxFan], send[kMaxFan];
};

// The loaders of a group for collectives. Ends of FIFOs have one each, from kEndLoader on.
enum Loader { kCommunicatorLoader = 0, kWorkLoader, kEndLoader };

UNISONO_DEVICE void loadEnd(End& end, Fifo* origin, int peer) {
  end.origin = origin;
  end.peer = peer;
  if (origin == nullptr) return;
  noteRead(&origin->step, sizeof(origin->step));
  end.fifo = *origin;
}

// Fills what does not depend on a work. By one thread of a group.
UNISONO_DEVICE void loadCommunicator(Block& block, const DeviceCommunicator& communicator,
                                     int channel) {
  block.rank = communicator.rank;
  block.ranks = communicator.ranks;
  block.channel = channel;
  block.slots = communicator.slots;
  block.abortFlag = communicator.abortFlag;
  block.windows = communicator.windows;
}

// One end of a FIFO with the step at which this thread stands.
class FifoCursor {
 public:
  FifoCursor() = default;
  UNISONO_DEVICE explicit FifoCursor(const End& end)
      : step_(end.fifo.step), acquired_(end.fifo.acquired) {}

  UNISONO_DEVICE uint64_t step() const { return step_; }
  UNISONO_DEVICE void advance() { step_++; }
  UNISONO_DEVICE std::byte* slot(const Block& block, const End& end) const {
    return end.fifo.slots + (step_ & (block.slots - 1)) * block.slotBytes;
  }
  UNISONO_DEVICE bool hasData(const End& end) const { return loadRelaxed(end.fifo.tail) > step_; }
  // Wait for the data of this step, or for a free slot, and acquire what the peer did before. False
  // after an abort, unless nothing had to be awaited.
  UNISONO_DEVICE bool awaitData(const Block& block, const End& end) {
    return await(block.abortFlag, dataSubject(block, end));
  }
  UNISONO_DEVICE bool awaitCredit(const Block& block, const End& end) {
    return step_ < block.slots || await(block.abortFlag, creditSubject(block, end));
  }
  UNISONO_DEVICE void postData(const End& end) const { storeRelease(end.fifo.tail, step_ + 1); }
  UNISONO_DEVICE void postCredit(const End& end) const { storeRelease(end.fifo.head, step_ + 1); }
  UNISONO_DEVICE void postCreditRelaxed(const End& end) const {
    storeRelaxed(end.fifo.head, step_ + 1);
  }
  UNISONO_DEVICE WaitSubject dataSubject(const Block& block, const End& end) const {
    return {"data", block.rank, end.peer, block.channel, end.fifo.tail, step_ + 1};
  }
  UNISONO_DEVICE WaitSubject creditSubject(const Block& block, const End& end) const {
    return {"a free slot", block.rank,    end.peer,
            block.channel, end.fifo.head, step_ + 1 - block.slots};
  }
  UNISONO_DEVICE void save(const End& end) const {
    noteWrite(&end.origin->step, sizeof(end.origin->step));
    end.origin->step = step_;
  }
  // By the waiter. Later works then seldom load the counter of a peer before they begin.
  UNISONO_DEVICE void saveAcquired(const End& end) const {
    noteWrite(&end.origin->acquired, sizeof(end.origin->acquired));
    end.origin->acquired = acquired_;
  }

 private:
  // Until the counter is at least as wanted. A value that was acquired covers all steps before it,
  // so that these need no load. Nearly always the first load is enough; polls are relaxed.
  UNISONO_DEVICE bool await(const uint32_t* abortFlag, const WaitSubject& subject) {
    if (acquired_ >= subject.wanted) return true;
    acquired_ = loadAcquire(subject.counter);
    if (acquired_ >= subject.wanted) return true;
    const bool came = waitUntil(abortFlag, subject,
                                [&] { return loadRelaxed(subject.counter) >= subject.wanted; });
    acquired_ = loadAcquire(subject.counter);
    return came;
  }

  uint64_t step_ = 0;
  uint64_t acquired_ = 0;  // of the counter that the peer advances; of the waiter
};

// What all protocols do with the ends of their FIFOs.
template <int kReceives, int kSends>
class FifoEnds {
 public:
  UNISONO_DEVICE FifoEnds(ThreadGroup& group, Block& block) : group_(group), block_(block) {
    UNISONO_UNROLL
    for (int i = 0; i < kReceives; i++) receive_[i] = FifoCursor(block.receive[i]);
    UNISONO_UNROLL
    for (int i = 0; i < kSends; i++) send_[i] = FifoCursor(block.send[i]);
  }

  // Keeps the steps for the next work.
  UNISONO_DEVICE void finish() {
    UNISONO_UNROLL
    for (int i = 0; i < kReceives; i++) {
      if (group_.isWaiter(i) && block_.receive[i].origin != nullptr) {
        receive_[i].saveAcquired(block_.receive[i]);
      }
    }
    UNISONO_UNROLL
    for (int i = 0; i < kSends; i++) {
      if (group_.isWaiter(kReceives + i) && block_.send[i].origin != nullptr) {
        send_[i].saveAcquired(block_.send[i]);
      }
    }
    if (!group_.isPoster()) return;
    UNISONO_UNROLL
    for (int i = 0; i < kReceives; i++) {
      if (block_.receive[i].origin != nullptr) receive_[i].save(block_.receive[i]);
    }
    UNISONO_UNROLL
    for (int i = 0; i < kSends; i++) {
      if (block_.send[i].origin != nullptr) send_[i].save(block_.send[i]);
    }
  }

 protected:
  // Calls visit(i) for the peers of a set.
  template <typename Visit>
  UNISONO_DEVICE static void forEachReceive(Peers peers, Visit visit) {
    UNISONO_UNROLL
    for (int i = 0; i < kReceives; i++) {
      if ((peers >> i & 1) != 0) visit(i);
    }
  }
  template <typename Visit>
  UNISONO_DEVICE static void forEachSend(Peers peers, Visit visit) {
    UNISONO_UNROLL
    for (int i = 0; i < kSends; i++) {
      if ((peers >> i & 1) != 0) visit(i);
    }
  }

  // Waits until the slots of the next step are free. By the waiter.
  UNISONO_DEVICE void waitForCredit(Peers peers) {
    forEachSend(peers, [&](int i) {
      if (!group_.isWaiter(kReceives + i) || group_.aborted()) return;
      if (!send_[i].awaitCredit(block_, block_.send[i])) group_.setAborted();
    });
  }

  // Reports a slot to the proxy of a network. After an abort the slot may still hold an older step.
  UNISONO_DEVICE void report(int i, const SlotReport& slot) {
    const End& end = block_.send[i];
    if (!group_.isPoster(i) || group_.aborted() || end.fifo.hasProxy == 0) return;
    storeRelaxed(end.fifo.tail + kReportsWord + (send_[i].step() & (block_.slots - 1)),
                 packReport(slot));
  }
  // The same with protocol LL, by the waiter: the slot is free, and the proxy may look for its
  // lines.
  UNISONO_DEVICE void reportLines(int i, uint32_t bytes) {
    const End& end = block_.send[i];
    if (!group_.isWaiter(kReceives + i) || group_.aborted() || end.fifo.hasProxy == 0) return;
    storeRelaxed(end.fifo.tail + kReportsWord + (send_[i].step() & (block_.slots - 1)),
                 packLineReport(send_[i].step(), bytes));
  }
  // Of a work's slot.
  UNISONO_DEVICE SlotReport reportOf(uint64_t bytes) const {
    const CollectiveWork& work = block_.work;
    return {static_cast<uint32_t>(bytes), work.operation, work.reduction.type,
            work.reduction.reduction};
  }

  UNISONO_DEVICE void advance(Peers receive, Peers send) {
    forEachReceive(receive, [&](int i) { receive_[i].advance(); });
    forEachSend(send, [&](int i) { send_[i].advance(); });
  }

  ThreadGroup& group_;
  Block& block_;
  FifoCursor receive_[kReceives > 0 ? kReceives : 1];
  FifoCursor send_[kSends > 0 ? kSends : 1];
};

// At the beginning and the end of what a group does in a launch; a syncAll() follows the one and
// comes before the other. Nothing before that syncAll() touches the user's memory, and nothing
// after it if the communicator was aborted. Later launches find `stopped`, for the counters of the
// two ends of a FIFO may differ after an abort.
UNISONO_DEVICE void stayStopped(ThreadGroup& group, const DeviceCommunicator& communicator,
                                const uint32_t* launchFlag) {
  if (group.isPoster() && (loadRelaxed(launchFlag) | loadRelaxed(&communicator.stopped)) != 0) {
    group.setAborted();
  }
}
UNISONO_DEVICE void keepStopped(ThreadGroup& group, DeviceCommunicator& communicator) {
  if (group.isPoster() && group.aborted()) storeRelaxed(&communicator.stopped, uint32_t{1});
}

}  // namespace unisono::device::UNISONO_TARGET
