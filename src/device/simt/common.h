// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace unisono::device {

// 16 bytes that one instruction moves.
struct alignas(16) Vector16 {
  uint32_t word[4];
};

// 8 bytes of data and 8 of flag. Each half, data word and flag, is written and read by one 8-byte
// access, so a reader that sees the flag of a half sees its data.
struct alignas(16) Line {
  uint32_t data0, flag0, data1, flag1;
};

// A line of 16 words: 15 of data and one of flag, stored by lanes that work together so that it
// arrives as one.
inline constexpr int kLineWords = 16;

// Nanoseconds after which a peer that is in the middle of a slice is taken for dead. It takes less
// than a millisecond unless its GPU is taken away from it.
inline constexpr uint64_t kLongestShortWait = 5'000'000'000;

// What abort flags are: the first word is not 0 after an abort. The bits of the others stand for
// ranks whose process has ended, and what its device stored with it.
inline constexpr int kAbortFlagWords = 32;
inline constexpr int kEndableRanks = 32 * (kAbortFlagWords - 1);
constexpr int endedWordOf(int rank) {
  return 1 + rank / 32;
}
constexpr uint32_t endedBitOf(int rank) {
  return uint32_t{1} << rank % 32;
}

// Who waits for whom, for reports; costs nothing on a GPU. `counter` is what has to reach `wanted`;
// null if the wait is for something else.
struct WaitSubject {
  const char* what;
  int rank;
  int peer;
  int channel;
  const uint64_t* counter = nullptr;
  uint64_t wanted = 0;
};

}  // namespace unisono::device
