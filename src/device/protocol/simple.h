// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/protocol/protocol.h"
#include "device/reduce/reduce_copy.h"

// Protocol Simple: readiness is a counter published with release order after the data
// (device/work.h: Fifo). A separate poster publishes, so that workers go on to the next slice while
// the release waits for outstanding stores. A chunk is moved in several slices: while one is on its
// way, the next hop works on the one before.
namespace unisono::device::UNISONO_TARGET {

// With `kCopies`, for messages, elements are bytes and nothing is ever reduced: the code of all
// reductions is part of every kernel that might use it.
template <int kReceives, int kSends, bool kCopies = false>
class Simple : public FifoEnds<kReceives, kSends> {
 public:
  static constexpr Protocol kProtocol = Protocol::simple;

  using FifoEnds<kReceives, kSends>::FifoEnds;

  UNISONO_DEVICE void move(const Slice& slice) {
    waitForPeers(slice.receive, slice.send);
    if (group_.isWorker() && !group_.aborted()) {
      ReduceCopy work{};
      work.elements = slice.elements;
      work.finish = slice.finish;
      this->forEachReceive(slice.receive, [&](int i) {
        work.addSource(receive_[i].slot(block_, block_.receive[i]), false);
      });
      if (slice.input != nullptr) work.addSource(slice.input, slice.prepare);
      this->forEachSend(slice.send,
                        [&](int i) { work.addDestination(send_[i].slot(block_, block_.send[i])); });
      if (slice.output != nullptr) work.addDestination(slice.output);
      if constexpr (kCopies) {
        copyOnly(group_, work, slice.elements);
      } else {
        reduceCopy(group_, block_.work.reduction, work);
      }
    }
    publish(slice.receive, slice.send);
  }

  // A message straight into the receiver's buffer (device/work.h: Fifo). Returns the offer, or 0
  // after an abort.
  UNISONO_DEVICE uint64_t takeOffer() {
    // Whoever has taken an offer must not wait any more, so the slot comes first.
    waitForPeers(kNobody, 1);
    const End& end = block_.send[0];
    if (group_.isWaiter(0)) {
      uint64_t taken = 0;
      const uint64_t* offer = end.fifo.offer;
      while (taken == 0 && !group_.aborted()) {
        if (waitUntil(block_.abortFlag, {"an offer", block_.rank, end.peer, block_.channel},
                      [offer] { return loadRelaxed(offer) != 0; })) {
          taken = exchange(end.fifo.offer, uint64_t{0});  // 0 if it was withdrawn
        } else {
          group_.setAborted();
        }
      }
      noteWrite(&end.origin->taken, sizeof(end.origin->taken));
      end.origin->taken = taken;
    }
    group_.syncAll();
    noteRead(&end.origin->taken, sizeof(end.origin->taken));
    return end.origin->taken;
  }
  // The address `to` is that of an offer that was taken, and was not 0.
  UNISONO_DEVICE void sendDirect(const void* from, void* to, uint64_t bytes) {
    if (group_.isWorker()) {
      ReduceCopy work{};
      work.addSource(from, false);
      work.addDestination(to);
      copyOnly(group_, work, bytes);
    }
    publish(kNobody, 1);
  }
  // Offers a buffer, or kStagedOffer. After an abort nothing is offered.
  UNISONO_DEVICE void makeOffer(uint64_t offer) {
    if (group_.isWaiter(0) && !group_.aborted()) storeRelease(block_.receive[0].fifo.offer, offer);
  }
  UNISONO_DEVICE void receiveDirect() {
    if (group_.isWaiter(0) && !group_.aborted()) {
      const End& end = block_.receive[0];
      const WaitSubject subject = receive_[0].dataSubject(block_, end);
      auto hasData = [&] { return receive_[0].hasData(end); };
      if (!waitUntil(block_.abortFlag, subject, hasData)) {
        const bool withdrawn = exchange(end.fifo.offer, uint64_t{0}) != 0;
        if (!withdrawn) waitAlways(subject, hasData);
        group_.setAborted();
      }
      loadAcquire(end.fifo.tail);
    }
    group_.syncReady();
    publish(1, kNobody);
  }

 private:
  using FifoEnds<kReceives, kSends>::group_;
  using FifoEnds<kReceives, kSends>::block_;
  using FifoEnds<kReceives, kSends>::receive_;
  using FifoEnds<kReceives, kSends>::send_;

  UNISONO_DEVICE void publish(Peers receive, Peers send) {
    group_.syncDone();
    this->forEachSend(send, [&](int i) {
      if (group_.isPoster(i) && !group_.aborted()) send_[i].postData(block_.send[i]);
    });
    this->forEachReceive(receive, [&](int i) {
      if (group_.isPoster(i) && !group_.aborted()) receive_[i].postCredit(block_.receive[i]);
    });
    this->advance(receive, send);
  }

  // The waiter looks one slice ahead of the workers, but never keeps the poster: what it waits for
  // may depend on what this rank has yet to post.
  UNISONO_DEVICE void waitForPeers(Peers receive, Peers send) {
    this->forEachReceive(receive, [&](int i) {
      if (!group_.isWaiter(i) || group_.aborted()) return;
      const End& end = block_.receive[i];
      const FifoCursor& cursor = receive_[i];
      if (!waitUntil(block_.abortFlag, cursor.dataSubject(block_, end),
                     [&] { return cursor.hasData(end); })) {
        group_.setAborted();
      }
      loadAcquire(end.fifo.tail);  // the poll is relaxed
    });
    this->waitForCredit(send);
    group_.syncReady();
  }
};

}  // namespace unisono::device::UNISONO_TARGET
