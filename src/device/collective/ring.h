// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/protocol/simple.h"

// The ring algorithms. `order[i]` is the rank i steps behind this one along the ring; data always
// flows from the previous rank to the next.
namespace unisono::device::UNISONO_TARGET {

// The elements of a work that one channel handles.
struct ChannelPart {
  uint64_t offset;
  uint64_t count;
};

UNISONO_DEVICE ChannelPart channelPart(const CollectiveWork& work, int channel) {
  int index = channel - work.firstChannel;
  if (index == 0) return {0, work.low};
  uint64_t offset = work.low + static_cast<uint64_t>(index - 1) * work.middle;
  return {offset, index == work.channels - 1 ? work.high : work.middle};
}

class RingCollective {
 public:
  UNISONO_DEVICE RingCollective(ThreadGroup& group, const DeviceCommunicator& communicator,
                                int channel, const CollectiveWork& work)
      : work_(work),
        ring_(communicator.rings[channel]),
        ranks_(communicator.ranks),
        rank_(communicator.rank),
        elementBytes_(elementBytes(work.reduction.type)),
        part_(channelPart(work, channel)),
        protocol_(group, communicator, channel, communicator.slotBytes,
                  &communicator.rings[channel].receive, ring_.order[ranks_ - 1],
                  &communicator.rings[channel].send, ring_.order[1]) {}

  UNISONO_DEVICE void run() {
    switch (work_.operation) {
      case Operation::allReduce:
        allReduce();
        break;
      case Operation::allGather:
        allGather();
        break;
      case Operation::reduceScatter:
        reduceScatter();
        break;
      case Operation::broadcast:
        broadcast();
        break;
      case Operation::reduce:
        reduce();
        break;
      case Operation::local:
        break;
    }
    protocol_.finish();
  }

 private:
  // Element `index` of the user's buffers.
  UNISONO_DEVICE const std::byte* input(uint64_t index) const {
    return static_cast<const std::byte*>(work_.input) + index * elementBytes_;
  }
  UNISONO_DEVICE std::byte* output(uint64_t index) const {
    return static_cast<std::byte*>(work_.output) + index * elementBytes_;
  }

  UNISONO_DEVICE void send(const void* from, uint64_t elements, void* alsoTo = nullptr,
                           bool prepare = false) {
    protocol_.chunk(work_.reduction, false, from, true, alsoTo, elements, prepare, false);
  }
  UNISONO_DEVICE void receive(void* to, uint64_t elements) {
    protocol_.chunk(work_.reduction, true, nullptr, false, to, elements, false, false);
  }
  UNISONO_DEVICE void receiveSend(void* to, uint64_t elements) {
    protocol_.chunk(work_.reduction, true, nullptr, true, to, elements, false, false);
  }
  UNISONO_DEVICE void receiveReduceSend(const void* own, uint64_t elements) {
    protocol_.chunk(work_.reduction, true, own, true, nullptr, elements, true, false);
  }

  // Every rank's share is cut into chunks of one slice set; n chunks, one a rank, circulate at
  // once.
  UNISONO_DEVICE void allReduce() {
    const uint64_t most = work_.chunkElements;
    const int position = ring_.position;
    for (uint64_t base = 0; base < part_.count; base += most * ranks_) {
      const uint64_t remaining = part_.count - base;
      uint64_t chunk = most;
      if (remaining < most * ranks_) {
        const uint64_t grain = 16 / elementBytes_;
        chunk = ((remaining + ranks_ - 1) / ranks_ + grain - 1) / grain * grain;
      }
      auto sizeOf = [&](int index) {
        uint64_t begin = chunk * index;
        return begin >= remaining ? uint64_t{0}
                                  : (remaining - begin < chunk ? remaining - begin : chunk);
      };
      auto offsetOf = [&](int index) { return part_.offset + base + chunk * index; };
      auto wrapped = [&](int index) { return index >= ranks_ ? index - ranks_ : index; };

      int index = wrapped(position + ranks_ - 1);
      send(input(offsetOf(index)), sizeOf(index), nullptr, true);
      for (int step = 2; step < ranks_; step++) {
        index = wrapped(position + ranks_ - step);
        receiveReduceSend(input(offsetOf(index)), sizeOf(index));
      }
      index = position;
      protocol_.chunk(work_.reduction, true, input(offsetOf(index)), true, output(offsetOf(index)),
                      sizeOf(index), true, true);
      for (int step = 1; step < ranks_ - 1; step++) {
        index = wrapped(position + ranks_ - step);
        receiveSend(output(offsetOf(index)), sizeOf(index));
      }
      index = wrapped(position + 1);
      receive(output(offsetOf(index)), sizeOf(index));
    }
  }

  UNISONO_DEVICE void allGather() {
    for (uint64_t done = 0; done < part_.count; done += work_.chunkElements) {
      uint64_t size = chunkSize(done);
      uint64_t offset = part_.offset + done;
      std::byte* own = output(rank_ * work_.count + offset);
      const std::byte* from = input(offset);
      send(from, size, own == from ? nullptr : own);
      for (int step = 1; step < ranks_ - 1; step++) {
        receiveSend(output(ring_.order[ranks_ - step] * work_.count + offset), size);
      }
      receive(output(ring_.order[1] * work_.count + offset), size);
    }
  }

  UNISONO_DEVICE void reduceScatter() {
    for (uint64_t done = 0; done < part_.count; done += work_.chunkElements) {
      uint64_t size = chunkSize(done);
      uint64_t offset = part_.offset + done;
      send(input(ring_.order[ranks_ - 1] * work_.count + offset), size, nullptr, true);
      for (int step = 2; step < ranks_; step++) {
        receiveReduceSend(input(ring_.order[ranks_ - step] * work_.count + offset), size);
      }
      protocol_.chunk(work_.reduction, true, input(rank_ * work_.count + offset), false,
                      output(offset), size, true, true);
    }
  }

  UNISONO_DEVICE void broadcast() {
    const bool last = ring_.order[1] == work_.root;
    for (uint64_t done = 0; done < part_.count; done += work_.chunkElements) {
      uint64_t size = chunkSize(done);
      uint64_t offset = part_.offset + done;
      if (rank_ == work_.root) {
        send(input(offset), size, work_.output == work_.input ? nullptr : output(offset));
      } else if (last) {
        receive(output(offset), size);
      } else {
        receiveSend(output(offset), size);
      }
    }
  }

  UNISONO_DEVICE void reduce() {
    const bool first = ring_.order[ranks_ - 1] == work_.root;
    for (uint64_t done = 0; done < part_.count; done += work_.chunkElements) {
      uint64_t size = chunkSize(done);
      uint64_t offset = part_.offset + done;
      if (rank_ == work_.root) {
        protocol_.chunk(work_.reduction, true, input(offset), false, output(offset), size, true,
                        true);
      } else if (first) {
        send(input(offset), size, nullptr, true);
      } else {
        receiveReduceSend(input(offset), size);
      }
    }
  }

  UNISONO_DEVICE uint64_t chunkSize(uint64_t done) const {
    uint64_t remaining = part_.count - done;
    return remaining < work_.chunkElements ? remaining : work_.chunkElements;
  }

  const CollectiveWork work_;  // by value: a reference would put all kernel arguments on the stack
  const RingChannel& ring_;
  int ranks_, rank_;
  uint64_t elementBytes_;
  ChannelPart part_;
  SimpleProtocol protocol_;
};

// One rank alone: the reduction of its own input.
UNISONO_DEVICE void localCollective(ThreadGroup& group, int channel, const CollectiveWork& work) {
  ChannelPart part = channelPart(work, channel);
  const uint64_t bytes = part.offset * elementBytes(work.reduction.type);
  ReduceCopy copy{};
  copy.source[0] = static_cast<const std::byte*>(work.input) + bytes;
  copy.destination[0] = static_cast<std::byte*>(work.output) + bytes;
  copy.sources = 1;
  copy.destinations = 1;
  copy.elements = part.count;
  copy.prepare = 1;
  copy.finish = true;
  if (group.isWorker() && !group.aborted()) reduceCopy(group, work.reduction, copy);
}

// What one block does: the works that cover its channel, in order.
UNISONO_DEVICE void collectiveBlock(ThreadGroup& group, int channel,
                                    const CollectiveArguments& arguments) {
  const DeviceCommunicator& communicator = *arguments.communicator;
  stayStopped(group, communicator, arguments.launchFlag);
  for (int w = 0; w < arguments.works; w++) {
    const CollectiveWork& work = arguments.work[w];
    if (channel < work.firstChannel || channel >= work.firstChannel + work.channels) continue;
    if (work.operation == Operation::local) {
      localCollective(group, channel, work);
    } else {
      RingCollective(group, communicator, channel, work).run();
    }
    group.syncAll();  // the next work reads the counters that this one saved
  }
  keepStopped(group, *arguments.communicator);
}

}  // namespace unisono::device::UNISONO_TARGET
