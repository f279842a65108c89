// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/protocol/fifo.h"
#include "device/reduce/copy.h"
#include "device/reduce/multicast_load.h"

// All-reduce, all-gather and reduce-scatter through multicast addresses (device/multicast.h).
namespace unisono::device::UNISONO_TARGET {

// The state of a thread group, in block-shared memory on a GPU.
struct MulticastBlock {
  CollectiveWork work;
  MulticastLayout layout;
  MulticastChannel channel;
  MulticastChannel* saved;  // where the steps are kept for the next work
  int32_t rank, head, channelIndex;
  const uint32_t* abortFlag;
};

enum MulticastGroup { kScatterGroup, kHeadGroup, kGatherGroup };

// The group that counts these steps.
constexpr int groupOf(MulticastStep step) {
  return step == kScatterStep ? kScatterGroup : step == kGatherStep ? kGatherGroup : kHeadGroup;
}

// The vectors that a head moves in one step.
struct HeadMove {
  int lane, lanes;
  std::byte* all;                 // the multicast address of the buffers
  const std::byte* input;         // null: the contributions of all ranks
  std::byte* output;              // null: the results of all ranks
  uint64_t contribution, result;  // offsets
  uint64_t bytes;

  // Combines the contributions.
  template <typename R>
  UNISONO_DEVICE void run() const {
    const MulticastView view(all);
    view.noteReads(contribution, roundedBytes());
    moveVectors(view, [&](uint64_t offset) { return loadReduced<R>(view, contribution + offset); });
  }
  // Moves the input.
  UNISONO_DEVICE void copy() const {
    const MulticastView view(all);
    noteRead(input, bytes);
    moveVectors(view, [&](uint64_t offset) { return loadUpTo16(offset); });
  }

 private:
  // Slots are whole vectors. What is behind the data in the last one is moved along.
  UNISONO_DEVICE uint64_t roundedBytes() const { return (bytes + 15) / 16 * 16; }

  template <typename Load>
  UNISONO_DEVICE void moveVectors(const MulticastView& view, Load load) const {
    constexpr int kVectors = 4;
    if (output == nullptr) {
      view.noteWrites(result, roundedBytes());
    } else {
      noteWrite(output, bytes);
    }
    for (Rounds<kVectors> rounds(lane, lanes, roundedBytes()); rounds.more(); rounds.next()) {
      Vector16 value[kVectors];
      UNISONO_UNROLL
      for (int u = 0; u < kVectors; u++) {
        if (rounds.has(u)) value[u] = load(rounds.offset() + rounds.distance(u));
      }
      UNISONO_UNROLL
      for (int u = 0; u < kVectors; u++) {
        if (!rounds.has(u)) continue;
        const uint64_t offset = rounds.offset() + rounds.distance(u);
        if (output == nullptr) {
          view.storeVector(result + offset, value[u]);
        } else {
          storeUpTo16(offset, value[u]);
        }
      }
    }
  }
  UNISONO_DEVICE Vector16 loadUpTo16(uint64_t offset) const {
    const std::byte* from = input + offset;
    const bool whole = offset + 16 <= bytes;
    if (whole && reinterpret_cast<uint64_t>(from) % 16 == 0) return loadVector(from);
    std::byte byte[16] = {};
    UNISONO_UNROLL
    for (unsigned i = 0; i < 16; i++) {
      if (offset + i < bytes) byte[i] = from[i];
    }
    return bitsAs<Vector16>(byte);
  }
  UNISONO_DEVICE void storeUpTo16(uint64_t offset, const Vector16& value) const {
    std::byte* to = output + offset;
    if (offset + 16 <= bytes) {
      storeAnywhere(to, value);
      return;
    }
    std::byte byte[16];
    memcpy(byte, &value, sizeof(byte));
    UNISONO_UNROLL
    for (unsigned i = 0; i < 16; i++) {
      if (offset + i < bytes) to[i] = byte[i];
    }
  }
};
UNISONO_DEVICE_CALL void moveHead(const HeadMove& move, const ReductionSpec& spec) {
  if (move.input != nullptr) {
    move.copy();
  } else {
    visitMulticastReducer(spec, move);
  }
}

class NvlsCollective {
 public:
  UNISONO_DEVICE NvlsCollective(ThreadGroup& group, MulticastBlock& block)
      : group_(group),
        block_(block),
        heads_(static_cast<int>(block.layout.heads)),
        elementBytes_(elementBytes(block.work.reduction.type)) {}

  UNISONO_DEVICE void run(int groupIndex) {
    const Operation operation = block_.work.operation;
    if (groupIndex == kScatterGroup && operation != Operation::allGather) scatter();
    if (groupIndex == kHeadGroup) reduceAndBroadcast();
    if (groupIndex == kGatherGroup && operation != Operation::reduceScatter) gather();
  }

 private:
  // The pieces of one step. They are `stride` elements apart.
  struct Step {
    uint64_t first, count;  // of the piece of head 0
    uint64_t stride;
    uint64_t end;  // of all pieces
  };
  struct Piece {
    uint64_t first, count;
  };
  UNISONO_DEVICE static Piece pieceOf(const Step& step, int head) {
    const uint64_t first = step.first + step.stride * static_cast<uint64_t>(head);
    if (first >= step.end) return {step.end, 0};
    return {first, step.end - first < step.count ? step.end - first : step.count};
  }

  // Calls body(step) for each step. The pieces of an all-reduce follow each other, those of the
  // other operations are in the shares of their heads.
  template <typename Body>
  UNISONO_DEVICE void forEachStep(Body body) {
    const CollectiveWork& work = block_.work;
    const ChannelPart part = work.part(block_.channelIndex);
    const bool follow = work.operation == Operation::allReduce;
    const uint64_t chunk = work.chunkElements;
    const uint64_t all = follow ? chunk * static_cast<uint64_t>(heads_) : chunk;
    for (uint64_t done = 0; done < part.count; done += all) {
      const uint64_t first = part.offset + done, left = part.count - done;
      if (follow) {
        const uint64_t size = left < all ? part.lastChunk : chunk;
        body(Step{first, size, size, first + (left < all ? left : all)});
      } else {
        body(Step{first, left < chunk ? left : chunk, work.count, ~uint64_t{0}});
      }
    }
  }

  UNISONO_DEVICE uint64_t* counter(uint64_t offset) const {
    return reinterpret_cast<uint64_t*>(block_.channel.own + offset);
  }
  UNISONO_DEVICE const std::byte* input(uint64_t index) const {
    return static_cast<const std::byte*>(block_.work.input) + index * elementBytes_;
  }
  UNISONO_DEVICE std::byte* output(uint64_t index) const {
    return static_cast<std::byte*>(block_.work.output) + index * elementBytes_;
  }
  // For the next work.
  UNISONO_DEVICE void save(MulticastStep which, uint64_t step) {
    if (!group_.isPoster()) return;
    uint64_t* saved = &block_.saved->step[which];
    noteWrite(saved, sizeof(*saved));
    *saved = step;
  }

  // Waits until the counter of every head, in this rank's buffer, and `ahead` exceed `step`.
  template <typename Offset>
  UNISONO_DEVICE void waitForHeads(const char* what, uint64_t step, uint64_t ahead, Offset offset) {
    for (int h = 0; h < heads_; h++) {
      if (!group_.isWaiter(h) || group_.aborted()) continue;
      const uint64_t* from = counter(offset(h));
      const WaitSubject subject{what, block_.rank, h, block_.channelIndex, from, step + 1 - ahead};
      if (!waitUntil(block_.abortFlag, subject, [&] { return loadRelaxed(from) + ahead > step; })) {
        group_.setAborted();
      }
      loadAcquire(from);  // the poll is relaxed
      fenceAliases();
    }
    group_.syncReady();
  }
  // Waits until a counter of every rank, the smallest of them, and `ahead` exceed `step`. By lane
  // `lane` of the waiter.
  UNISONO_DEVICE void waitForAll(int lane, const char* what, uint64_t step, uint64_t ahead,
                                 uint64_t offset) {
    if (!group_.isWaiter(lane) || group_.aborted()) return;
    const MulticastView view(block_.channel.all);
    const WaitSubject subject{what, block_.rank, -1, block_.channelIndex};
    if (!waitUntil(block_.abortFlag, subject,
                   [&] { return view.loadMin(offset) + ahead > step; })) {
      group_.setAborted();
    }
    view.loadMinAcquire(offset);  // the poll is relaxed
    fenceAliases();
  }
  // Publishes what the workers have done.
  UNISONO_DEVICE void post(uint64_t offset, uint64_t step) {
    group_.syncDone();
    if (!group_.isPoster() || group_.aborted()) return;
    fenceAliases();
    storeRelease(counter(offset), step + 1);
  }
  // To all ranks, by lane `lane` of the poster.
  UNISONO_DEVICE void postToAll(int lane, uint64_t offset, uint64_t step) {
    if (!group_.isPoster(lane) || group_.aborted()) return;
    fenceAliases();
    MulticastView(block_.channel.all).storeRelease(offset, step + 1);
  }

  UNISONO_DEVICE void copy(const std::byte* from, std::byte* to, uint64_t elements) {
    ReduceCopy work{};
    work.addSource(from, false);
    work.addDestination(to);
    copyOnly(group_, work, elements * elementBytes_);
  }

  UNISONO_DEVICE void scatter() {
    const MulticastLayout& layout = block_.layout;
    uint64_t step = block_.channel.step[kScatterStep];
    forEachStep([&](const Step& all) {
      waitForHeads("a free contribution slot", step, layout.slots,
                   [&](int h) { return MulticastLayout::reduced(h); });
      for (int h = 0; h < heads_; h++) {
        if (!group_.isWorker() || group_.aborted()) continue;
        const Piece piece = pieceOf(all, h);
        copy(input(piece.first), block_.channel.own + layout.contribution(h, step), piece.count);
      }
      post(MulticastLayout::contributed(), step);
      step++;
    });
    save(kScatterStep, step);
  }

  UNISONO_DEVICE void reduceAndBroadcast() {
    const MulticastLayout& layout = block_.layout;
    const CollectiveWork& work = block_.work;
    const bool reduces = work.operation != Operation::allGather;
    const bool broadcasts = work.operation != Operation::reduceScatter;
    // In the buffer of one share.
    const uint64_t share = static_cast<uint64_t>(block_.head) * work.count;
    uint64_t reduceStep = block_.channel.step[kReduceStep];
    uint64_t broadcastStep = block_.channel.step[kBroadcastStep];
    forEachStep([&](const Step& all) {
      if (reduces) waitForAll(0, "contributions", reduceStep, 0, MulticastLayout::contributed());
      if (broadcasts) {
        waitForAll(1, "a free result slot", broadcastStep, layout.slots,
                   MulticastLayout::gathered());
      }
      group_.syncReady();
      if (group_.isWorker() && !group_.aborted()) {
        const Piece piece = pieceOf(all, block_.head);
        HeadMove move{};
        move.lane = group_.rank();
        move.lanes = group_.size();
        move.all = block_.channel.all;
        if (!reduces) move.input = input(piece.first - share);
        if (!broadcasts) move.output = output(piece.first - share);
        move.contribution = layout.contribution(block_.head, reduceStep);
        move.result = layout.result(block_.head, broadcastStep);
        move.bytes = piece.count * elementBytes_;
        if (move.bytes > 0) moveHead(move, work.reduction);
      }
      group_.syncDone();
      if (reduces) postToAll(0, MulticastLayout::reduced(block_.head), reduceStep++);
      if (broadcasts) postToAll(1, layout.broadcast(block_.head), broadcastStep++);
    });
    save(kReduceStep, reduceStep);
    save(kBroadcastStep, broadcastStep);
  }

  UNISONO_DEVICE void gather() {
    const MulticastLayout& layout = block_.layout;
    uint64_t step = block_.channel.step[kGatherStep];
    forEachStep([&](const Step& all) {
      waitForHeads("results", step, 0, [&](int h) { return layout.broadcast(h); });
      for (int h = 0; h < heads_; h++) {
        if (!group_.isWorker() || group_.aborted()) continue;
        const Piece piece = pieceOf(all, h);
        copy(block_.channel.own + layout.result(h, step), output(piece.first), piece.count);
      }
      post(MulticastLayout::gathered(), step);
      step++;
    });
    save(kGatherStep, step);
  }

  ThreadGroup& group_;
  MulticastBlock& block_;
  int heads_;
  uint64_t elementBytes_;
};

// What one group of a block does: the works that cover its channel, in order.
UNISONO_DEVICE void multicastBlock(ThreadGroup& group, MulticastBlock& block, int channelIndex,
                                   int groupIndex, const CollectiveArguments& arguments) {
  DeviceCommunicator& communicator = *arguments.communicator;
  const Multicast& multicast = *communicator.multicast;
  if (group.isPoster()) markStart(arguments.mark, channelIndex, groupIndex);
  if (group.isLoader(0)) {
    block.layout = multicast.layout;
    block.rank = communicator.rank;
    block.head = multicast.head;
    block.channelIndex = channelIndex;
    block.abortFlag = communicator.abortFlag;
    block.saved = &multicast.channels[channelIndex];
    block.channel.own = block.saved->own;
    block.channel.all = block.saved->all;
  }
  stayStopped(group, communicator, arguments.launchFlag);
  for (int w = 0; w < arguments.works; w++) {
    const CollectiveWork& work = arguments.work[w];
    if (channelIndex < work.firstChannel || channelIndex >= work.firstChannel + work.channels) {
      continue;
    }
    if (group.isLoader(0)) {
      block.work = work;
      for (int s = 0; s < kMulticastSteps; s++) {
        if (groupOf(static_cast<MulticastStep>(s)) != groupIndex) continue;
        noteRead(&block.saved->step[s], sizeof(block.saved->step[s]));
        block.channel.step[s] = block.saved->step[s];
      }
    }
    group.syncAll();
    NvlsCollective(group, block).run(groupIndex);
    group.syncAll();  // the next work takes the place of this one and reads what it saved
  }
  keepStopped(group, communicator);
  if (group.isPoster()) markEnd(arguments.mark, channelIndex, groupIndex);
}

}  // namespace unisono::device::UNISONO_TARGET
