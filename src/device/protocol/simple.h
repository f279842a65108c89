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

  // Offers the output to the peers from which results are received, if the work says so.
  UNISONO_DEVICE void begin(Peers from) {
    const CollectiveWork& work = block_.work;
    if (!work.offered) return;
    UNISONO_UNROLL
    for (int i = 0; i < kSends; i++) {
      if (!group_.isWaiter(kReceives + i)) continue;
      group_.setWord(sendWord(i), 0);
      if (Fifo* origin = block_.send[i].origin; origin != nullptr) setPinned(*origin, nullptr);
    }
    this->forEachReceive(from, [&](int i) {
      const Fifo& fifo = block_.receive[i].fifo;
      if (!group_.isWaiter(i)) return;
      group_.setWord(receiveWord(i), 0);
      if (fifo.offer == nullptr || group_.aborted()) return;
      const uint64_t offer = offerOf(work.addressIsOpen, fifo, work.output, work.window);
      makeOffer(fifo, offer, work.window.window);
      if (offer != kStagedOffer) offered_ |= Peers{1} << i;
    });
  }

  UNISONO_DEVICE void move(const Slice& slice) {
    waitForPeers(slice);
    if (group_.isWorker() && !group_.aborted()) {
      ReduceCopy work{};
      work.elements = slice.elements;
      work.finish = slice.finish;
      bool isInPlace = false;  // the peer has stored it in the output
      this->forEachReceive(slice.receive, [&](int i) {
        isInPlace = hasDirectResult(slice, i);
        work.addSource(isInPlace ? slice.output : receive_[i].slot(block_, block_.receive[i]),
                       false);
      });
      if (slice.input != nullptr) work.addSource(slice.input, slice.prepare);
      this->forEachSend(slice.send, [&](int i) {
        std::byte* output = remoteOutput(slice, i);
        work.addDestination(output != nullptr ? output + slice.place
                                              : send_[i].slot(block_, block_.send[i]));
      });
      if (slice.output != nullptr && !isInPlace) work.addDestination(slice.output);
      if constexpr (kCopies) {
        copyOnly(group_, work, slice.elements);
      } else if (work.destinations > 0) {
        reduceCopy(group_, block_.work.reduction, work);
      }
    }
    publish(slice);
  }

  UNISONO_DEVICE void finish() {
    if constexpr (!kCopies) {
      if (block_.work.offered) endOffers();
    }
    FifoEnds<kReceives, kSends>::finish();
  }

  // Takes the receiver's offer for a message (device/work.h: Fifo). Returns where to write, which
  // may be kStagedOffer, or 0 after an abort.
  UNISONO_DEVICE uint64_t takeOffer() {
    // Whoever has taken an offer must not wait any more, so the slot comes first.
    waitForPeers({.send = 1});
    const End& end = block_.send[0];
    if (group_.isWaiter(0)) {
      noteWrite(&end.origin->agreed, sizeof(end.origin->agreed));
      end.origin->agreed = awaitOffer(end);
    }
    group_.syncAll();
    noteRead(&end.origin->agreed, sizeof(end.origin->agreed) + sizeof(void*));
    return end.origin->agreed;
  }
  // The address `to` is one that takeOffer() returned.
  UNISONO_DEVICE void sendDirect(const void* from, void* to, uint64_t bytes) {
    if (group_.isWorker()) {
      ReduceCopy work{};
      work.addSource(from, false);
      work.addDestination(to);
      copyOnly(group_, work, bytes);
    }
    publish({.send = 1});
    MappedWindow* pinned = block_.send[0].origin->pinned;
    if (group_.isPoster(0) && pinned != nullptr) unpinWindow(*pinned);
  }
  // Offers the receiver's buffer for a message; its place in a window, if that is not 0, or its
  // address if senders of the same process can write to it. Returns whether the message may come
  // that way. After an abort nothing is offered.
  UNISONO_DEVICE bool offerBuffer(const std::byte* buffer, bool addressIsOpen,
                                  const WindowReference& window) {
    const Fifo& fifo = block_.receive[0].fifo;
    const uint64_t offer = offerOf(addressIsOpen, fifo, buffer, window);
    if (group_.isWaiter(0) && !group_.aborted()) makeOffer(fifo, offer, window.window);
    return offer != kStagedOffer;
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
          if (!withdrawn) waitWhileAlive(block_.abortFlag, subject, hasData);
          group_.setAborted();
        }
        loadAcquire(end.fifo.tail);
        origin.agreed = loadRelaxed(end.fifo.tail + 1);
      }
    }
    group_.syncAll();
    noteRead(&origin.agreed, sizeof(origin.agreed));
    if (origin.agreed != kDirectAnswer) return false;
    publish({.receive = 1});
    return true;
  }

 private:
  using FifoEnds<kReceives, kSends>::group_;
  using FifoEnds<kReceives, kSends>::block_;
  using FifoEnds<kReceives, kSends>::receive_;
  using FifoEnds<kReceives, kSends>::send_;

  static_assert(2 * kMaxFan <= kGroupWords);
  // Of the group: whether a peer answered that it stores results in the output.
  static constexpr int receiveWord(int i) { return i; }
  // Of the group: the output of a peer in which results are stored, or 0.
  static constexpr int sendWord(int i) { return kMaxFan + i; }

  UNISONO_DEVICE bool hasDirectResult(const Slice& slice, int i) const {
    return !kCopies && slice.receivesResult && block_.work.offered &&
           group_.word(receiveWord(i)) != 0;
  }
  UNISONO_DEVICE std::byte* remoteOutput(const Slice& slice, int i) const {
    if (kCopies || !slice.sendsResult || !block_.work.offered) return nullptr;
    return reinterpret_cast<std::byte*>(group_.word(sendWord(i)));
  }

  UNISONO_DEVICE static void setPinned(Fifo& fifo, MappedWindow* window) {
    noteWrite(&fifo.pinned, sizeof(void*));
    fifo.pinned = window;
  }
  UNISONO_DEVICE static uint64_t offerOf(bool addressIsOpen, const Fifo& fifo, const void* buffer,
                                         const WindowReference& window) {
    if (addressIsOpen && fifo.byAddress != 0) return reinterpret_cast<uint64_t>(buffer);
    return window.window != 0 ? kWindowOffer | window.offset : kStagedOffer;
  }
  UNISONO_DEVICE static void makeOffer(const Fifo& fifo, uint64_t offer, uint64_t window) {
    if ((offer & kWindowOffer) != 0) storeRelaxed(fifo.offer + 1, window);
    storeRelease(fifo.offer, offer);
  }

  // Takes an offer, and answers it; the answer is released with the tail. Returns the address where
  // to write, kStagedOffer, or 0 after an abort. By a waiter.
  UNISONO_DEVICE uint64_t awaitOffer(const End& end) {
    Fifo& origin = *end.origin;
    setPinned(origin, nullptr);
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
    uint64_t address = taken;
    if ((taken & kWindowOffer) != 0) {
      const WindowReference place{loadRelaxed(end.fifo.offer + 1), taken & ~kWindowOffer};
      address = kStagedOffer;
      if (block_.windows != nullptr) {
        MappedWindow& entry = block_.windows[windowIndex(end.peer, place.window)];
        if (std::byte* base = pinWindow(entry, place); base != nullptr) {
          setPinned(origin, &entry);
          address = reinterpret_cast<uint64_t>(base);
        }
      }
    }
    if (taken > kStagedOffer) {
      storeRelaxed(end.fifo.tail + 1, address == kStagedOffer ? kStagedOffer : kDirectAnswer);
    }
    return address;
  }

  // Before the first result is sent: takes the offer. Before every one: announces the stores.
  UNISONO_DEVICE void prepareResult(int i) {
    const End& end = block_.send[i];
    if (!group_.isWaiter(kReceives + i) || end.fifo.offer == nullptr) return;
    if ((taken_ >> i & 1) == 0 && !group_.aborted()) {
      taken_ |= Peers{1} << i;
      if (const uint64_t address = awaitOffer(end); address > kStagedOffer) {
        group_.setWord(sendWord(i), address);
      }
    }
    // Also after an abort, as the poster takes it back.
    if (group_.word(sendWord(i)) == 0) return;
    if ((fetchAddAcquire(end.fifo.offer + kUsersWord, 1) & kWithdrawn) != 0) group_.setAborted();
  }

  // Before the first result is used: reads the answer.
  UNISONO_DEVICE void readAnswer(int i) {
    if ((offered_ >> i & 1) == 0 || (answered_ >> i & 1) != 0) return;
    answered_ |= Peers{1} << i;
    const uint64_t answer = loadRelaxed(block_.receive[i].fifo.tail + 1);
    group_.setWord(receiveWord(i), answer == kDirectAnswer ? 1 : 0);
  }

  // After the last slice. After an abort nobody stores in the output any more.
  UNISONO_DEVICE void endOffers() {
    UNISONO_UNROLL
    for (int i = 0; i < kReceives; i++) {
      if (!group_.isWaiter(i) || (offered_ >> i & 1) == 0 || !group_.aborted()) continue;
      const End& end = block_.receive[i];
      if (exchange(end.fifo.offer, uint64_t{0}) != 0) continue;
      uint64_t* users = end.fifo.offer + kUsersWord;
      if (fetchAddAcquire(users, kWithdrawn) == 0) continue;
      waitWhileAlive(block_.abortFlag, {"the end of stores", block_.rank, end.peer, block_.channel},
                     [users] { return loadAcquire(users) == kWithdrawn; });
    }
    UNISONO_UNROLL
    for (int i = 0; i < kSends; i++) {
      const End& end = block_.send[i];
      if (!group_.isPoster(i) || end.origin == nullptr) continue;
      noteRead(&end.origin->pinned, sizeof(void*));
      if (end.origin->pinned != nullptr) unpinWindow(*end.origin->pinned);
    }
  }

  UNISONO_DEVICE SlotReport reportOf(const Slice& slice) const {
    if constexpr (kCopies) return {slice.elements, {}, {}, {}};
    const uint64_t size = elementBytes(block_.work.reduction.type);
    return FifoEnds<kReceives, kSends>::reportOf(slice.elements * size);
  }

  UNISONO_DEVICE void publish(const Slice& slice) {
    group_.syncDone();
    this->forEachSend(slice.send, [&](int i) { this->report(i, reportOf(slice)); });
    this->forEachSend(slice.send, [&](int i) {
      if (!group_.isPoster(i)) return;
      if (!group_.aborted()) send_[i].postData(block_.send[i]);
      if (remoteOutput(slice, i) != nullptr) {
        addRelease(block_.send[i].fifo.offer + kUsersWord, ~uint64_t{0});
      }
    });
    this->forEachReceive(slice.receive, [&](int i) {
      if (group_.isPoster(i) && !group_.aborted()) receive_[i].postCredit(block_.receive[i]);
    });
    this->advance(slice.receive, slice.send);
  }

  // The waiter looks one slice ahead of the workers, but never keeps the poster: what it waits for
  // may depend on what this rank has yet to post.
  UNISONO_DEVICE void waitForPeers(const Slice& slice) {
    this->forEachReceive(slice.receive, [&](int i) {
      if (!group_.isWaiter(i) || group_.aborted()) return;
      if (!receive_[i].awaitData(block_, block_.receive[i])) group_.setAborted();
      if constexpr (!kCopies) {
        if (slice.receivesResult && !group_.aborted()) readAnswer(i);
      }
    });
    this->waitForCredit(slice.send);
    if constexpr (!kCopies) {
      if (slice.sendsResult && block_.work.offered) {
        this->forEachSend(slice.send, [&](int i) { prepareResult(i); });
      }
    }
    group_.syncReady();
  }

  static constexpr int kUsersWord = 2;  // of Fifo::offer

  // Of the waiter's lanes: peers to which this rank offered its output, that have answered, and
  // whose offer was taken.
  Peers offered_ = kNobody, answered_ = kNobody, taken_ = kNobody;
};

}  // namespace unisono::device::UNISONO_TARGET
