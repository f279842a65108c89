// SPDX-License-Identifier: Apache-2.0
#include "comm/launch_notes.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace unisono::comm {
namespace {

using Kind = LaunchNote::Kind;
using Advance = LaunchNote::Advance;

uint32_t bitOf(device::Protocol protocol) {
  return uint32_t{1} << static_cast<int>(protocol);
}

void describe(const plan::CollectiveLaunch& launch, LaunchNote& note) {
  const device::CollectiveWork& work = launch.arguments.work[0];
  if (work.operation != device::Operation::local) note.protocols = bitOf(work.protocol);
}
void describe(const plan::SendReceiveLaunch&, LaunchNote& note) {
  note.protocols = bitOf(device::Protocol::simple) | bitOf(device::Protocol::ll);
}

// Barriers and copies have neither FIFOs nor lines.
void describe(const plan::BarrierLaunch&, LaunchNote&) {}
void describe(const plan::CopyLaunch&, LaunchNote&) {}

void describe(const plan::DirectLaunch& launch, LaunchNote& note) {
  note.kind = Kind::lines;
  note.blocks = launch.blocks;
  const device::DirectArguments& arguments = launch.arguments;
  for (int w = 0; w < arguments.works; w++) {
    const device::DirectWork& work = arguments.work[w];
    for (int peer = 0; peer < arguments.ranks - 1; peer++) {
      if ((work.from >> peer & 1) != 0) note.lines[peer] += device::linesOf(work.outputBytes);
    }
  }
  if (arguments.works != 1) return;
  // Where a kernel holds the streams of all peers at once: device/collective/direct.h.
  constexpr int kAlways = 4, kOnSomeBackend = 8;
  if (arguments.ranks <= kOnSomeBackend) note.advance = Advance::unknown;
  if (arguments.ranks <= kAlways) note.advance = Advance::first;
}

void describe(const plan::WideLaunch& launch, LaunchNote& note) {
  const device::WideArguments& arguments = launch.arguments;
  note.kind = Kind::wide;
  note.blocks = launch.blocks;
  note.passLines = arguments.passLines;
  note.shareBytes = arguments.work.inputBytes;
  note.endBytes = arguments.endBytes;
  note.inputStride = arguments.work.inputStride;
  note.outputStride = arguments.work.outputStride;
  note.from = arguments.work.from;
  note.reduces = arguments.work.reduces;
  note.twoShot = arguments.twoShot;
  note.offers = arguments.offers;
}

void describeStreams(const device::WideStreams& wide, LaunchNote& note) {
  note.kind = Kind::messages;
  note.wideBlocks = wide.blocks;
  note.streams = wide.streams;
  std::copy_n(wide.stream, wide.streams, note.stream);
}
void describe(const plan::WideMessagesLaunch& launch, LaunchNote& note) {
  describeStreams(launch.arguments.wide, note);
  note.blocks = launch.arguments.wide.launchBlocks();
}
void describe(const plan::MessagesLaunch& launch, LaunchNote& note) {
  const device::MessagesArguments& arguments = *launch.arguments;
  note.protocols = bitOf(device::Protocol::simple) | bitOf(device::Protocol::ll);
  describeStreams(arguments.wide, note);
  note.blocks = launch.blocks();
  note.firstLineBlock = arguments.channels;
  note.firstWideBlock = arguments.firstWideBlock();
  for (int m = 0; m < arguments.messages; m++) {
    const device::DirectMessage& message = arguments.message[m];
    if (message.blocks == 0 && !message.sends && message.peer < device::kDirectMaxPeers) {
      note.lines[message.peer] += device::linesOf(message.bytes);
    }
  }
}

size_t wordsInUse(const LaunchNote& note, const plan::Launch& launch) {
  size_t bytes = sizeof(LaunchNote);
  if (note.kind == Kind::other) bytes = offsetof(LaunchNote, blocks);
  if (note.kind == Kind::lines) {
    const auto& arguments = std::get<plan::DirectLaunch>(launch).arguments;
    bytes = offsetof(LaunchNote, lines) +
            static_cast<size_t>(arguments.ranks - 1) * sizeof(note.lines[0]);
  }
  return (bytes + sizeof(uint64_t) - 1) / sizeof(uint64_t);
}

}  // namespace

LaunchNote noteOf(uint64_t number, const plan::Launch& launch) {
  LaunchNote note;
  note.number = number;
  std::visit([&](const auto& one) { describe(one, note); }, launch);
  return note;
}

void LaunchNotes::add(uint64_t number, const plan::Launch& launch) {
  const LaunchNote note = noteOf(number, launch);
  Entry& entry = entries_[added_++ % kKept];
  entry.number.store(0, std::memory_order_relaxed);
  const auto* bytes = reinterpret_cast<const std::byte*>(&note);
  // Small calls are launched often: only what is read.
  const size_t words = wordsInUse(note, launch);
  for (size_t i = 0; i < words; i++) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + i * sizeof(word), sizeof(word));
    entry.words[i].store(word, std::memory_order_release);
  }
  entry.number.store(number, std::memory_order_release);
}

std::optional<LaunchNote> LaunchNotes::find(uint64_t number) const {
  const auto entry = std::ranges::find_if(entries_, [&](const Entry& each) {
    return each.number.load(std::memory_order_acquire) == number;
  });
  if (number == 0 || entry == entries_.end()) return std::nullopt;
  std::array<uint64_t, kWords> words{};
  for (size_t i = 0; i < kWords; i++) words[i] = entry->words[i].load(std::memory_order_acquire);
  if (entry->number.load(std::memory_order_relaxed) != number) return std::nullopt;
  LaunchNote note;
  std::memcpy(static_cast<void*>(&note), words.data(), sizeof(note));
  return note;
}

}  // namespace unisono::comm
