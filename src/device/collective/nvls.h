// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/protocol/fifo.h"
#include "device/reduce/copy.h"
#include "device/reduce/multicast_load.h"
#include "device/reduce/reduce_copy.h"

// All-reduce, all-gather and reduce-scatter through heads of the nodes (device/multicast.h). `View`
// is how a head accesses the buffers of its node.
namespace unisono::device::UNISONO_TARGET {

// The state of a thread group, in block-shared memory on a GPU.
struct MulticastBlock : Block {
  MulticastLayout layout;
  MulticastChannel buffer;
  MulticastChannel* saved;  // where the steps are kept for the next work
  int32_t head, members, nodes;
  const int32_t* rankOf;
};

enum MulticastGroup { kScatterGroup, kHeadGroup, kGatherGroup };

// The group that counts these steps.
constexpr int groupOf(MulticastStep step) {
  return step == kScatterStep ? kScatterGroup : step == kGatherStep ? kGatherGroup : kHeadGroup;
}

template <typename View>
inline constexpr bool kIsMulticast = std::is_same_v<View, MulticastView>;

template <typename View>
UNISONO_DEVICE View viewOf(const MulticastBlock& block) {
  if constexpr (kIsMulticast<View>) {
    return View(block.buffer.all);
  } else {
    return View(block.buffer.members, block.members);
  }
}

// The vectors that a head moves at once. Slots are whole vectors, so the padding after the data is
// moved too.
template <typename View>
struct HeadMove {
  const MulticastBlock* block;
  int lane, lanes;
  const std::byte* input;         // null: the contributions of all ranks and what was received
  std::byte* output;              // or null
  bool broadcasts;                // to the results of all ranks
  uint64_t contribution, result;  // offsets
  const std::byte* received[kMaxHeadChildren];  // slots, or null
  std::byte* sent[kMaxHeadChildren];            // slots, or null
  uint64_t bytes;

  // Combines the operands.
  template <typename R>
  UNISONO_DEVICE void run() const {
    const auto view = viewOf<View>(*block);
    view.noteReads(contribution, roundedBytes());
    forEach(received, [&](const std::byte* slot) { noteRead(slot, roundedBytes()); });
    moveVectors(view, [&](uint64_t offset) {
      Vector16 value = loadReduced<R>(view, contribution + offset);
      forEach(received, [&](const std::byte* slot) {
        value = combineVectors<R>(value, loadVector(slot + offset));
      });
      return value;
    });
  }
  // Moves the input.
  UNISONO_DEVICE void copy() const {
    const auto view = viewOf<View>(*block);
    noteRead(input, bytes);
    moveVectors(view, [&](uint64_t offset) { return loadUpTo16(offset); });
  }

 private:
  UNISONO_DEVICE uint64_t roundedBytes() const { return (bytes + 15) / 16 * 16; }

  template <typename Slot, typename Visit>
  UNISONO_DEVICE static void forEach(Slot* const (&slots)[kMaxHeadChildren], Visit visit) {
    UNISONO_UNROLL
    for (int i = 0; i < kMaxHeadChildren; i++) {
      if (slots[i] != nullptr) visit(slots[i]);
    }
  }

  template <typename Load>
  UNISONO_DEVICE void moveVectors(const View& view, Load load) const {
    constexpr int kVectors = 4;
    if (broadcasts) view.noteWrites(result, roundedBytes());
    if (output != nullptr) noteWrite(output, bytes);
    forEach(sent, [&](std::byte* slot) { noteWrite(slot, roundedBytes()); });
    for (Rounds<kVectors> rounds(lane, lanes, roundedBytes()); rounds.more(); rounds.next()) {
      Vector16 value[kVectors];
      UNISONO_UNROLL
      for (int u = 0; u < kVectors; u++) {
        if (rounds.has(u)) value[u] = load(rounds.offset() + Rounds<kVectors>::distance(u));
      }
      UNISONO_UNROLL
      for (int u = 0; u < kVectors; u++) {
        if (!rounds.has(u)) continue;
        const uint64_t offset = rounds.offset() + Rounds<kVectors>::distance(u);
        if (broadcasts) view.storeVector(result + offset, value[u]);
        if (output != nullptr) storeUpTo16(offset, value[u]);
        forEach(sent, [&](std::byte* slot) { storeVector(slot + offset, value[u]); });
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
UNISONO_DEVICE_CALL void reduceMulticast(const HeadMove<MulticastView>& move,
                                         const ReductionSpec& spec) {
  visitPair<MulticastPairs>(reducedPairOf(spec), move);
}

// Loads the ends of the FIFOs to the heads of other nodes: place 0 of both arrays is the parent,
// the children follow.
UNISONO_DEVICE void loadHeadEnds(ThreadGroup& group, Block& block, Channel& channel,
                                 const Tree& tree) {
  static_assert(kMaxFan == 1 + kMaxHeadChildren);
  for (int i = 0; i < kMaxFan; i++) {
    const int connection = i == 0 ? tree.up : tree.down[i - 1];
    const bool exists = connection >= 0;
    Connection& peer = channel.connections[exists ? connection : 0];
    constexpr auto kSimple = static_cast<int>(Protocol::simple);
    if (group.isLoader(i)) {
      loadEnd(block.receive[i], exists ? &peer.receive[kSimple] : nullptr, exists ? peer.peer : -1);
    }
    if (group.isLoader(kMaxFan + i)) {
      loadEnd(block.send[i], exists ? &peer.send[kSimple] : nullptr, exists ? peer.peer : -1);
    }
  }
}

// The FIFOs of a head.
class HeadFifos : public FifoEnds<kMaxFan, kMaxFan> {
 public:
  static constexpr Peers kParent = 1;

  UNISONO_DEVICE HeadFifos(ThreadGroup& group, Block& block) : FifoEnds(group, block) {
    UNISONO_UNROLL
    for (int i = 1; i < kMaxFan; i++) {
      if (block.receive[i].origin != nullptr) children_ |= Peers{1} << i;
    }
  }
  UNISONO_DEVICE bool hasParent() const { return block_.receive[0].origin != nullptr; }
  UNISONO_DEVICE Peers children() const { return children_; }

  // By the waiter.
  UNISONO_DEVICE void wait(Peers receive, Peers send) {
    forEachReceive(receive, [&](int i) {
      if (!group_.isWaiter(i) || group_.aborted()) return;
      if (!receive_[i].awaitData(block_, block_.receive[i])) group_.setAborted();
    });
    waitForCredit(send);
  }
  template <typename View>
  UNISONO_DEVICE void setSlots(Peers receive, Peers send, HeadMove<View>& move) const {
    const auto place = [](int i) { return i == 0 ? 0 : i - 1; };
    forEachReceive(receive, [&](int i) {
      move.received[place(i)] = receive_[i].slot(block_, block_.receive[i]);
    });
    forEachSend(send, [&](int i) { move.sent[place(i)] = send_[i].slot(block_, block_.send[i]); });
  }
  // After the barrier of the workers and the poster. `bytes` are those of a piece.
  UNISONO_DEVICE void post(Peers receive, Peers send, uint64_t bytes) {
    forEachSend(send, [&](int i) { report(i, reportOf(bytes)); });
    forEachSend(send, [&](int i) {
      if (group_.isPoster(i) && !group_.aborted()) send_[i].postData(block_.send[i]);
    });
    forEachReceive(receive, [&](int i) {
      if (group_.isPoster(i) && !group_.aborted()) receive_[i].postCredit(block_.receive[i]);
    });
    advance(receive, send);
  }

 private:
  Peers children_ = kNobody;
};

template <typename View>
class HeadCollective {
 public:
  UNISONO_DEVICE HeadCollective(ThreadGroup& group, MulticastBlock& block)
      : group_(group),
        block_(block),
        heads_(static_cast<int>(block.layout.heads)),
        elementBytes_(elementBytes(block.work.reduction.type)) {}

  UNISONO_DEVICE void run(int groupIndex) {
    const Operation operation = block_.work.operation;
    if (groupIndex == kScatterGroup && operation != Operation::allGather) scatter();
    if (groupIndex == kHeadGroup && block_.head >= 0) reduceAndBroadcast();
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

  // The pieces of an all-reduce follow each other, those of the other operations are at the same
  // place in the share of each rank.
  UNISONO_DEVICE bool follow() const { return block_.work.operation == Operation::allReduce; }
  // The elements of all pieces of a step but the last one.
  UNISONO_DEVICE uint64_t stepElements() const {
    const uint64_t chunk = block_.work.chunkElements;
    return follow() ? chunk * static_cast<uint64_t>(heads_) : chunk;
  }
  UNISONO_DEVICE bool isStep(uint64_t index) const {
    return index * stepElements() < block_.work.part(block_.channel).count;
  }
  UNISONO_DEVICE Step stepAt(uint64_t index) const {
    const CollectiveWork& work = block_.work;
    const ChannelPart part = work.part(block_.channel);
    const uint64_t chunk = work.chunkElements, all = stepElements(), done = index * all;
    const uint64_t first = part.offset + done, left = part.count - done;
    if (!follow()) return {first, left < chunk ? left : chunk, 0, ~uint64_t{0}};
    const uint64_t size = left < all ? part.lastChunk : chunk;
    return {first, size, size, first + (left < all ? left : all)};
  }

  // A slot has a piece of the share of each node's head; in an all-reduce one piece.
  UNISONO_DEVICE int shares() const { return follow() ? 1 : block_.nodes; }
  UNISONO_DEVICE uint64_t paddedBytes(const Piece& piece) const {
    return pieceStride(piece.count * elementBytes_);
  }
  // Calls body(offset, index) for each piece of a head's slot: where it is in the slot, and where
  // in the buffers of the user.
  template <typename Body>
  UNISONO_DEVICE void forEachShare(int head, const Piece& piece, Body body) const {
    const int count = shares();
    for (int s = 0; s < count; s++) {
      uint64_t index = piece.first;
      if (!follow()) {
        index += static_cast<uint64_t>(block_.rankOf[head * count + s]) * block_.work.count;
      }
      body(static_cast<uint64_t>(s) * paddedBytes(piece), index);
    }
  }
  // Calls body(step) for each step.
  template <typename Body>
  UNISONO_DEVICE void forEachStep(Body body) {
    for (uint64_t i = 0; isStep(i); i++) body(stepAt(i));
  }

  UNISONO_DEVICE uint64_t* counter(uint64_t offset) const {
    return reinterpret_cast<uint64_t*>(block_.buffer.own + offset);
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
      const WaitSubject subject{what, block_.rank, h, block_.channel, from, step + 1 - ahead};
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
    const auto view = viewOf<View>(block_);
    const WaitSubject subject{what, block_.rank, -1, block_.channel};
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
    viewOf<View>(block_).storeRelease(offset, step + 1);
  }

  // Copies, or moves a rank's own operand or its result: what an NVSwitch reduces needs neither.
  UNISONO_DEVICE void moveOwn(const std::byte* from, bool prepare, std::byte* to, bool finish,
                              uint64_t elements) {
    ReduceCopy work{};
    work.addSource(from, prepare);
    work.addDestination(to);
    work.elements = elements;
    work.finish = finish;
    if constexpr (kIsMulticast<View>) {
      copyOnly(group_, work, elements * elementBytes_);
    } else {
      reduceCopy<true>(group_, block_.work.reduction, work);
    }
  }

  UNISONO_DEVICE void scatter() {
    const MulticastLayout& layout = block_.layout;
    uint64_t step = block_.buffer.step[kScatterStep];
    forEachStep([&](const Step& all) {
      waitForHeads("a free contribution slot", step, layout.slots,
                   [&](int h) { return MulticastLayout::reduced(h); });
      for (int h = 0; h < heads_; h++) {
        if (!group_.isWorker() || group_.aborted()) continue;
        const Piece piece = pieceOf(all, h);
        std::byte* slot = block_.buffer.own + layout.contribution(h, step);
        forEachShare(h, piece, [&](uint64_t offset, uint64_t index) {
          moveOwn(input(index), true, slot + offset, false, piece.count);
        });
      }
      post(MulticastLayout::contributed(), step);
      step++;
    });
    save(kScatterStep, step);
  }

  UNISONO_DEVICE void reduceAndBroadcast() {
    const Operation operation = block_.work.operation;
    const bool reduces = operation != Operation::allGather;
    const bool broadcasts = operation != Operation::reduceScatter;
    HeadFifos fifos(group_, block_);
    const Peers children = fifos.children();
    reduceStep_ = block_.buffer.step[kReduceStep];
    broadcastStep_ = block_.buffer.step[kBroadcastStep];
    if (!fifos.hasParent()) {
      forEachStep(
          [&](const Step& all) { move(fifos, all, reduces, broadcasts, children, children); });
    } else {
      uint64_t up = 0, down = 0;
      while (isStep(down)) {
        if (isStep(up) && up - down < 2 * uint64_t{block_.slots}) {
          move(fifos, stepAt(up++), reduces, false, children, HeadFifos::kParent);
        } else {
          move(fifos, stepAt(down++), false, broadcasts, HeadFifos::kParent, children);
        }
      }
    }
    fifos.finish();
    save(kReduceStep, reduceStep_);
    save(kBroadcastStep, broadcastStep_);
  }
  // Moves the piece of a head: combines the contributions and what is received, if it `reduces`;
  // stores the results, if it `broadcasts`; and sends.
  UNISONO_DEVICE void move(HeadFifos& fifos, const Step& all, bool reduces, bool broadcasts,
                           Peers receive, Peers send) {
    const MulticastLayout& layout = block_.layout;
    const CollectiveWork& work = block_.work;
    if (reduces) waitForAll(0, "contributions", reduceStep_, 0, MulticastLayout::contributed());
    if (broadcasts) {
      waitForAll(1, "a free result slot", broadcastStep_, layout.slots,
                 MulticastLayout::gathered());
    }
    fifos.wait(receive, send);
    group_.syncReady();
    if (group_.isWorker() && !group_.aborted()) {
      const Piece piece = pieceOf(all, block_.head);
      HeadMove<View> move{};
      move.block = &block_;
      move.lane = group_.rank();
      move.lanes = group_.size();
      fifos.setSlots(receive, send, move);
      // The output and, but for an all-reduce, the input are of one share.
      if (!reduces) move.input = receive != kNobody ? move.received[0] : input(piece.first);
      move.broadcasts = broadcasts;
      move.contribution = layout.contribution(block_.head, reduceStep_);
      move.result = layout.result(block_.head, broadcastStep_);
      // Between a network and the buffers of a node pass the pieces of all nodes.
      const bool ofAll = work.operation == Operation::reduceScatter ? reduces : receive != kNobody;
      move.bytes = ofAll && shares() > 1 ? static_cast<uint64_t>(shares()) * paddedBytes(piece)
                                         : piece.count * elementBytes_;
      if (work.operation == Operation::reduceScatter && send == kNobody) {
        move.output = output(piece.first);
      }
      if (piece.count > 0) moveHead(move);
    }
    group_.syncDone();
    if (reduces) postToAll(0, MulticastLayout::reduced(block_.head), reduceStep_++);
    if (broadcasts) postToAll(1, layout.broadcast(block_.head), broadcastStep_++);
    fifos.post(receive, send, pieceOf(all, block_.head).count * elementBytes_);
  }

  UNISONO_DEVICE void moveHead(const HeadMove<View>& move) {
    if (move.input != nullptr && move.output != nullptr) {
      moveOwn(move.input, false, move.output, true, move.bytes / elementBytes_);
    } else if (move.input != nullptr) {
      move.copy();
    } else if constexpr (kIsMulticast<View>) {
      reduceMulticast(move, block_.work.reduction);
    } else {
      reduceMembers(move.contribution, move.sent[0], move.bytes / elementBytes_);
    }
  }
  // Combines the contributions of all ranks, several at a time, in the head's own slot. The last
  // ones go on to `to`.
  UNISONO_DEVICE void reduceMembers(uint64_t contribution, std::byte* to, uint64_t elements) {
    std::byte* own = block_.buffer.own + contribution;
    int member = 0;
    do {
      ReduceCopy work{};
      work.addSource(own, false);
      for (; member < block_.members && work.sources < kMaxSources; member++) {
        std::byte* buffer = block_.buffer.members[member];
        if (buffer != block_.buffer.own) work.addSource(buffer + contribution, false);
      }
      work.addDestination(member < block_.members ? own : to);
      work.elements = elements;
      reduceCopy<true>(group_, block_.work.reduction, work);
    } while (member < block_.members);
  }

  UNISONO_DEVICE void gather() {
    const MulticastLayout& layout = block_.layout;
    uint64_t step = block_.buffer.step[kGatherStep];
    forEachStep([&](const Step& all) {
      waitForHeads("results", step, 0, [&](int h) { return layout.broadcast(h); });
      for (int h = 0; h < heads_; h++) {
        if (!group_.isWorker() || group_.aborted()) continue;
        const Piece piece = pieceOf(all, h);
        const std::byte* slot = block_.buffer.own + layout.result(h, step);
        forEachShare(h, piece, [&](uint64_t offset, uint64_t index) {
          moveOwn(slot + offset, false, output(index), follow(), piece.count);
        });
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
  uint64_t reduceStep_ = 0, broadcastStep_ = 0;  // of a head
};

// What one group of a block does: the works that cover its channel, in order.
template <typename View>
UNISONO_DEVICE void headBlock(ThreadGroup& group, MulticastBlock& block, int channelIndex,
                              int groupIndex, const CollectiveArguments& arguments) {
  DeviceCommunicator& communicator = *arguments.communicator;
  const Multicast& multicast = *communicator.headsOf(arguments.work[0].algorithm);
  if (group.isPoster()) markStart(arguments.mark, channelIndex, groupIndex);
  if (group.isLoader(0)) {
    loadCommunicator(block, communicator, channelIndex);
    block.slotBytes = communicator.slotBytes[static_cast<int>(Protocol::simple)];
    block.layout = multicast.layout;
    block.head = multicast.head;
    block.members = multicast.members;
    block.nodes = multicast.nodes;
    block.rankOf = multicast.rankOf;
    block.saved = &multicast.channels[channelIndex];
    block.buffer.own = block.saved->own;
    block.buffer.all = block.saved->all;
    block.buffer.members = block.saved->members;
  }
  stayStopped(group, communicator, arguments.launchFlag);
  group.syncAll();
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
        block.buffer.step[s] = block.saved->step[s];
      }
    }
    if (groupIndex == kHeadGroup) {
      const MulticastChannel& channel = multicast.channels[channelIndex];
      loadHeadEnds(group, block, communicator.channels[channelIndex],
                   work.algorithm == Algorithm::nvlsTree ? channel.tree : channel.network);
    }
    group.syncAll();
    HeadCollective<View>(group, block).run(groupIndex);
    group.syncAll();  // the next work takes the place of this one and reads what it saved
  }
  keepStopped(group, communicator);
  if (group.isPoster()) markEnd(arguments.mark, channelIndex, groupIndex);
}

}  // namespace unisono::device::UNISONO_TARGET
