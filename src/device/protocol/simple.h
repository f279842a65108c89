// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/reduce/reduce_copy.h"

// Protocol Simple: data moves through a FIFO of slots (device/work.h: Connection), one slot a
// slice. Readiness is a counter published with release order after the data. A separate poster
// publishes, so that workers go on to the next slice while the release waits for outstanding
// stores. A chunk is moved in several slices: while one is on its way, the next hop works on the
// one before.
//
// Contract between the two ends: both cut every chunk into the same slices, in the same order; the
// step counter of a connection is kept in device memory between launches, so a launch needs no host
// state. After an abort nothing is moved or published any more and every wait ends at once; later
// launches find Communicator::stopped, for the counters of the two ends may differ then.
namespace unisono::device::UNISONO_TARGET {

// One end of a FIFO during a launch; writes its step back when it goes.
class FifoEnd {
 public:
  FifoEnd() = default;
  UNISONO_DEVICE FifoEnd(Connection* connection, uint32_t slotBytes, uint32_t slots)
      : connection_(connection),
        slots_(connection->slots),
        tail_(connection->tail),
        head_(connection->head),
        step_(connection->step),
        slotBytes_(slotBytes),
        slotCount_(slots) {
    noteRead(&connection->step, sizeof(connection->step));
  }

  UNISONO_DEVICE bool connected() const { return connection_ != nullptr; }
  UNISONO_DEVICE void* slot() const { return slots_ + step_ % slotCount_ * slotBytes_; }
  UNISONO_DEVICE bool hasCredit() const { return loadRelaxed(head_) + slotCount_ > step_; }
  UNISONO_DEVICE bool hasData() const { return loadRelaxed(tail_) > step_; }
  // Orders what follows behind the counter that a relaxed poll has just seen.
  UNISONO_DEVICE void acquireCredit() const { loadAcquire(head_); }
  UNISONO_DEVICE void acquireData() const { loadAcquire(tail_); }
  UNISONO_DEVICE void postData() const { storeRelease(tail_, step_ + 1); }
  UNISONO_DEVICE void postCredit() const { storeRelease(head_, step_ + 1); }
  UNISONO_DEVICE void advance() { step_++; }
  UNISONO_DEVICE WaitSubject dataSubject(int rank, int peer, int channel) const {
    return {"data", rank, peer, channel, tail_, step_ + 1};
  }
  UNISONO_DEVICE WaitSubject creditSubject(int rank, int peer, int channel) const {
    return {"a free slot", rank, peer, channel, head_, step_ + 1 - slotCount_};
  }
  UNISONO_DEVICE void save() const {
    noteWrite(&connection_->step, sizeof(connection_->step));
    connection_->step = step_;
  }

 private:
  Connection* connection_ = nullptr;
  std::byte* slots_ = nullptr;
  uint64_t* tail_ = nullptr;
  uint64_t* head_ = nullptr;
  uint64_t step_ = 0;
  uint32_t slotBytes_ = 0;
  uint32_t slotCount_ = 0;
};

// At the beginning and the end of what a group does in a launch; the end follows a syncAll().
// Nothing before stayStopped touches the user's memory, and nothing after it if the communicator
// was aborted.
UNISONO_DEVICE void stayStopped(ThreadGroup& group, const DeviceCommunicator& communicator,
                                const uint32_t* launchFlag) {
  if (group.isPoster() && (loadRelaxed(launchFlag) | loadRelaxed(&communicator.stopped)) != 0) {
    group.setAborted();
  }
  group.syncAll();
}
UNISONO_DEVICE void keepStopped(ThreadGroup& group, DeviceCommunicator& communicator) {
  if (group.isPoster() && group.aborted()) storeRelaxed(&communicator.stopped, uint32_t{1});
}

class SimpleProtocol {
 public:
  // Either connection may be null; both have slots of `slotBytes`. `receivePeer` and `sendPeer`
  // name the other ends in reports.
  UNISONO_DEVICE SimpleProtocol(ThreadGroup& group, const DeviceCommunicator& communicator,
                                int channel, uint32_t slotBytes, Connection* receive,
                                int receivePeer, Connection* send, int sendPeer)
      : group_(group),
        abortFlag_(communicator.abortFlag),
        rank_(communicator.rank),
        receivePeer_(receivePeer),
        sendPeer_(sendPeer),
        channel_(channel),
        slices_(communicator.slicesPerChunk),
        slotBytes_(slotBytes) {
    if (receive != nullptr) receive_ = FifoEnd(receive, slotBytes, communicator.slots);
    if (send != nullptr) send_ = FifoEnd(send, slotBytes, communicator.slots);
  }

  // Keeps the counters for the next launch. Once, at the end, by the whole group.
  UNISONO_DEVICE void finish() {
    if (!group_.isPoster()) return;
    if (receive_.connected()) receive_.save();
    if (send_.connected()) send_.save();
  }

  // Moves one chunk: combines what is received (if `receive`) with `input` (if not null) and gives
  // the result to the next rank (if `send`) and to `output` (if not null). `prepare`: `input` is
  // the rank's own contribution; `finish`: the result is the complete reduction.
  UNISONO_DEVICE_CALL void chunk(const ReductionSpec& spec, bool receive, const void* input,
                                 bool send, void* output, uint64_t elements, bool prepare,
                                 bool finish) {
    const uint64_t bytesPerElement = elementBytes(spec.type);
    // Equal slices, as many as the chunk is meant to have; a small chunk is not worth cutting.
    const uint64_t most = slotBytes_ / bytesPerElement;
    const uint64_t even = (elements + slices_ - 1) / slices_ * bytesPerElement;
    const uint64_t sliceBytes = even < kSmallestSlice ? kSmallestSlice : even;
    uint64_t slice = (sliceBytes + kSliceGrain - 1) / kSliceGrain * kSliceGrain / bytesPerElement;
    if (slice > most) slice = most;
    uint64_t done = 0;
    do {
      uint64_t size = elements - done < slice ? elements - done : slice;
      uint64_t offset = done * bytesPerElement;
      const std::byte* from =
          input == nullptr ? nullptr : static_cast<const std::byte*>(input) + offset;
      std::byte* to = output == nullptr ? nullptr : static_cast<std::byte*>(output) + offset;
      moveSlice(spec, receive, from, send, to, size, prepare, finish);
      done += size;
    } while (done < elements);
  }

  // A message straight into the receiver's buffer (device/work.h: Connection). Returns the offer,
  // or 0 after an abort.
  UNISONO_DEVICE uint64_t takeOffer(Connection& connection) {
    // Whoever has taken an offer must not wait any more, so the slot comes first.
    waitForPeers(false, true);
    if (group_.isWaiter(0)) {
      uint64_t taken = 0;
      const uint64_t* offer = connection.offer;
      while (taken == 0 && !group_.aborted()) {
        if (waitUntil(abortFlag_, {"an offer", rank_, sendPeer_, channel_},
                      [offer] { return loadRelaxed(offer) != 0; })) {
          taken = exchange(connection.offer, uint64_t{0});  // 0 if it was withdrawn
        } else {
          group_.setAborted();
        }
      }
      noteWrite(&connection.taken, sizeof(connection.taken));
      connection.taken = taken;
    }
    group_.syncAll();
    noteRead(&connection.taken, sizeof(connection.taken));
    return connection.taken;
  }
  // The address `to` is that of an offer that was taken, and was not 0.
  UNISONO_DEVICE void sendDirect(const ReductionSpec& spec, const void* from, void* to,
                                 uint64_t elements) {
    if (group_.isWorker()) {
      ReduceCopy work{};
      work.source[0] = from;
      work.destination[0] = to;
      work.sources = work.destinations = 1;
      work.elements = elements;
      reduceCopy(group_, spec, work);
    }
    publish(false, true);
  }
  // Offers a buffer, or kStagedOffer. After an abort nothing is offered.
  UNISONO_DEVICE void makeOffer(Connection& connection, uint64_t offer) {
    if (group_.isWaiter(0) && !group_.aborted()) storeRelease(connection.offer, offer);
  }
  UNISONO_DEVICE void receiveDirect(Connection& connection) {
    if (group_.isWaiter(0) && !group_.aborted()) {
      const FifoEnd& end = receive_;
      const WaitSubject subject = end.dataSubject(rank_, receivePeer_, channel_);
      auto hasData = [&end] { return end.hasData(); };
      if (!waitUntil(abortFlag_, subject, hasData)) {
        const bool withdrawn = exchange(connection.offer, uint64_t{0}) != 0;
        if (!withdrawn) waitAlways(subject, hasData);
        group_.setAborted();
      }
      end.acquireData();
    }
    group_.syncReady();
    publish(true, false);
  }

 private:
  static constexpr uint64_t kSliceGrain = 512;
  static constexpr uint64_t kSmallestSlice = 16 << 10;

  UNISONO_DEVICE void moveSlice(const ReductionSpec& spec, bool receive, const std::byte* input,
                                bool send, std::byte* output, uint64_t elements, bool prepare,
                                bool finish) {
    waitForPeers(receive, send);
    if (group_.isWorker() && !group_.aborted()) {
      ReduceCopy work{};
      work.elements = elements;
      work.finish = finish;
      if (receive) work.source[work.sources++] = receive_.slot();
      if (input != nullptr) {
        if (prepare) work.prepare = 1u << work.sources;
        work.source[work.sources++] = input;
      }
      if (send) work.destination[work.destinations++] = send_.slot();
      if (output != nullptr) work.destination[work.destinations++] = output;
      reduceCopy(group_, spec, work);
    }
    publish(receive, send);
  }

  UNISONO_DEVICE void publish(bool receive, bool send) {
    group_.syncDone();
    if (group_.isPoster() && !group_.aborted()) {
      if (send) send_.postData();
      if (receive) receive_.postCredit();
    }
    if (send) send_.advance();
    if (receive) receive_.advance();
  }

  // The waiter looks one slice ahead of the workers, but never keeps the poster: what it waits for
  // may depend on what this rank has yet to post.
  UNISONO_DEVICE void waitForPeers(bool receive, bool send) {
    if (receive && group_.isWaiter(0) && !group_.aborted()) {
      const FifoEnd& end = receive_;
      if (!waitUntil(abortFlag_, end.dataSubject(rank_, receivePeer_, channel_),
                     [&end] { return end.hasData(); })) {
        group_.setAborted();
      }
      end.acquireData();
    }
    if (send && group_.isWaiter(kWarpSize > 1 ? 1 : 0) && !group_.aborted()) {
      const FifoEnd& end = send_;
      if (!waitUntil(abortFlag_, end.creditSubject(rank_, sendPeer_, channel_),
                     [&end] { return end.hasCredit(); })) {
        group_.setAborted();
      }
      end.acquireCredit();
    }
    group_.syncReady();
  }

  ThreadGroup& group_;
  const uint32_t* abortFlag_;
  int rank_, receivePeer_, sendPeer_, channel_;
  uint32_t slices_;
  uint64_t slotBytes_;
  FifoEnd receive_;
  FifoEnd send_;
};

}  // namespace unisono::device::UNISONO_TARGET
