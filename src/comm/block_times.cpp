// SPDX-License-Identifier: Apache-2.0
#include "comm/block_times.h"

#include <algorithm>
#include <cstring>
#include <variant>

namespace unisono::comm {
namespace {

using plan::Call;

// The shares that a call has in a buffer, at most.
uint64_t sharesOf(const plan::Task& call, bool isInput, int ranks) {
  const bool hasAll = call.call == Call::allToAll ||
                      (isInput ? call.call == Call::reduceScatter || call.call == Call::scatter
                               : call.call == Call::allGather || call.call == Call::gather);
  return hasAll ? static_cast<uint64_t>(ranks) : 1;
}

// Finds the calls of the parts of a launch.
class Finder {
 public:
  Finder(std::span<const plan::Task> calls, int ranks) : calls_(calls), ranks_(ranks) {}

  void operator()(const plan::CollectiveLaunch& launch) {
    for (int w = 0; w < launch.arguments.works; w++) {
      const device::CollectiveWork& work = launch.arguments.work[w];
      add(work.input, work.output, work.firstChannel, work.channels);
    }
  }
  void operator()(const plan::SendReceiveLaunch& launch) { addRounds(launch.arguments); }
  void operator()(const plan::DirectLaunch& launch) {
    for (int w = 0; w < launch.arguments.works; w++) {
      const device::DirectWork& work = launch.arguments.work[w];
      const int count = std::min<int>(work.blocks, launch.blocks - work.firstBlock);
      add(work.input, work.output, work.firstBlock, count);
      add(work.input, work.output, 0, work.blocks - count);
    }
  }
  void operator()(const plan::MessagesLaunch& launch) {
    const device::MessagesArguments& arguments = *launch.arguments;
    addRounds(arguments);
    for (int m = 0; m < arguments.messages; m++) {
      const device::DirectMessage& message = arguments.message[m];
      if (message.blocks == 0) {
        addMessage(message.buffer, message.sends, arguments.channels + message.peer, 1);
      } else {
        addMessage(message.buffer, message.sends, arguments.firstWideBlock(),
                   arguments.wide.launchBlocks());
      }
    }
  }
  void operator()(const plan::WideLaunch& launch) {
    const device::DirectWork& work = launch.arguments.work;
    add(work.input, work.output, 0, launch.blocks);
  }
  void operator()(const plan::WideMessagesLaunch& launch) {
    const device::WideMessagesArguments& arguments = launch.arguments;
    for (int m = 0; m < arguments.messages; m++) {
      addMessage(arguments.message[m].buffer, arguments.message[m].sends, 0,
                 arguments.wide.launchBlocks());
    }
  }
  // Of calls that copy engines carry.
  void operator()(const plan::BarrierLaunch&) {}
  void operator()(const plan::CopyLaunch&) {}

  std::vector<CallBlocks> take() { return std::move(found_); }

 private:
  template <typename Arguments>
  void addRounds(const Arguments& arguments) {
    for (int w = 0; w < arguments.works; w++) {
      for (const bool sends : {true, false}) {
        const device::Message& message = sends ? arguments.work[w].send : arguments.work[w].receive;
        if (message.peer < 0) continue;
        addMessage(message.buffer, sends, message.firstChannel, message.channels);
      }
    }
  }
  void addMessage(const void* buffer, bool sends, int first, int count) {
    add(sends ? buffer : nullptr, sends ? nullptr : buffer, first, count);
  }
  void add(const void* input, const void* output, int first, int count) {
    if (count <= 0) return;
    for (size_t i = 0; i < calls_.size(); i++) {
      const plan::Task& call = calls_[i];
      const bool takesInput = call.call != Call::receive, hasOutput = call.call != Call::send;
      if ((takesInput && isIn(input, call.input, call, true)) ||
          (hasOutput && isIn(output, call.output, call, false))) {
        found_.push_back({i, first, count});
      }
    }
  }
  bool isIn(const void* place, const void* buffer, const plan::Task& call, bool isInput) const {
    const uint64_t bytes =
        call.count * device::elementBytes(call.reduction.type) * sharesOf(call, isInput, ranks_);
    const auto at = reinterpret_cast<uint64_t>(place), begin = reinterpret_cast<uint64_t>(buffer);
    return place != nullptr && at >= begin && at - begin < bytes;
  }

  const std::span<const plan::Task> calls_;
  const int ranks_;
  std::vector<CallBlocks> found_;
};

}  // namespace

BlockTimes::BlockTimes(runtime::Runtime& runtime)
    : memory_(runtime.allocatePinned(kEntries * sizeof(device::BlockTime))) {}

std::optional<BlockTimes::Launch> BlockTimes::take(int blocks) {
  const auto count = static_cast<uint64_t>(blocks);
  const uint64_t left = kEntries - taken_ % kEntries;
  const uint64_t begin = taken_ + (left < count ? left : 0);
  if (begin + count - returned_.load(std::memory_order_acquire) > kEntries) return std::nullopt;
  taken_ = begin + count;
  const size_t index = begin % kEntries;
  auto* const times = static_cast<device::BlockTime*>(memory_->hostAddress()) + index;
  std::memset(static_cast<void*>(times), 0, count * sizeof(*times));
  return Launch{
      static_cast<device::BlockTime*>(memory_->deviceAddress()) + index, {times, count}, taken_};
}

device::BlockTime BlockTimes::read(device::BlockTime& block) {
  return {std::atomic_ref(block.began).load(std::memory_order_relaxed),
          std::atomic_ref(block.ended).load(std::memory_order_relaxed)};
}

std::vector<CallBlocks> blocksByCall(const plan::Launch& launch, std::span<const plan::Task> calls,
                                     int ranks) {
  if (calls.size() == 1) return {{0, 0, plan::blocksOf(launch)}};
  Finder finder(calls, ranks);
  std::visit(finder, launch);
  return finder.take();
}

}  // namespace unisono::comm
