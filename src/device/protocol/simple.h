// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/protocol/protocol.h"
#include "device/protocol/window.h"
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

  // Takes the receiver's offer for a message (device/work.h: Fifo). Returns where to write, which
  // may be kStagedOffer, or 0 after an abort. `windows`: the table of the communicator.
  UNISONO_DEVICE uint64_t takeOffer(MappedWindow* windows) {
    // Whoever has taken an offer must not wait any more, so the slot comes first.
    waitForPeers(kNobody, 1);
    const End& end = block_.send[0];
    Fifo& origin = *end.origin;
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
      noteWrite(&origin.agreed, sizeof(origin.agreed) + sizeof(origin.pinned));
      origin.pinned = nullptr;
      origin.agreed = taken;
      if ((taken & kWindowOffer) != 0) {
        const WindowReference place{loadRelaxed(end.fifo.offer + 1), taken & ~kWindowOffer};
        origin.agreed = kStagedOffer;
        if (windows != nullptr) {
          MappedWindow& entry = windows[windowIndex(end.peer, place.window)];
          if (std::byte* address = pinWindow(entry, place); address != nullptr) {
            origin.pinned = &entry;
            origin.agreed = reinterpret_cast<uint64_t>(address);
          }
        }
      }
      // Released with the tail.
      if (taken > kStagedOffer) {
        storeRelaxed(end.fifo.tail + 1,
                     origin.agreed == kStagedOffer ? kStagedOffer : kDirectAnswer);
      }
    }
    group_.syncAll();
    noteRead(&origin.agreed, sizeof(origin.agreed) + sizeof(origin.pinned));
    return origin.agreed;
  }
  // The address `to` is one that takeOffer() returned.
  UNISONO_DEVICE void sendDirect(const void* from, void* to, uint64_t bytes) {
    if (group_.isWorker()) {
      ReduceCopy work{};
      work.addSource(from, false);
      work.addDestination(to);
      copyOnly(group_, work, bytes);
    }
    publish(kNobody, 1);
    MappedWindow* pinned = block_.send[0].origin->pinned;
    if (group_.isPoster(0) && pinned != nullptr) unpinWindow(*pinned);
  }
  // Makes an offer for a message; of a place in a window if `offer` has kWindowOffer. After an
  // abort nothing is offered.
  UNISONO_DEVICE void makeOffer(uint64_t offer, uint64_t window) {
    if (!group_.isWaiter(0) || group_.aborted()) return;
    uint64_t* word = block_.receive[0].fifo.offer;
    if ((offer & kWindowOffer) != 0) storeRelaxed(word + 1, window);
    storeRelease(word, offer);
  }
  // Waits for the answer to an offer other than kStagedOffer. Returns whether the message is in the
  // buffer; if not, it comes through the FIFO.
  UNISONO_DEVICE bool receiveDirect() {
    const End& end = block_.receive[0];
    Fifo& origin = *end.origin;
    if (group_.isWaiter(0)) {
      noteWrite(&origin.agreed, sizeof(origin.agreed));
      origin.agreed = kStagedOffer;
      if (!group_.aborted()) {
        const WaitSubject subject = receive_[0].dataSubject(block_, end);
        auto hasData = [&] { return receive_[0].hasData(end); };
        if (!waitUntil(block_.abortFlag, subject, hasData)) {
          const bool withdrawn = exchange(end.fifo.offer, uint64_t{0}) != 0;
          if (!withdrawn) waitAlways(subject, hasData);
          group_.setAborted();
        }
        loadAcquire(end.fifo.tail);
        origin.agreed = loadRelaxed(end.fifo.tail + 1);
      }
    }
    group_.syncAll();
    noteRead(&origin.agreed, sizeof(origin.agreed));
    if (origin.agreed != kDirectAnswer) return false;
    publish(1, kNobody);
    return true;
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
