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

// Who waits for whom, for reports; costs nothing on a GPU.
struct WaitSubject {
  const char* what;
  int rank;
  int peer;
  int channel;
};

}  // namespace unisono::device
