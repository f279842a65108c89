// SPDX-License-Identifier: Apache-2.0
#include "transport/net/transfer_log.h"

#include <chrono>
#include <utility>

namespace unisono::transport {
namespace {

// After which the next data are another transfer. A kernel fills the next slot sooner.
constexpr int64_t kPause = 200'000;

int64_t steadyNanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

TransferLog::TransferLog(const NetworkEnd& of, NoteTransfer note)
    : transfer_{of}, note_(std::move(note)) {}

void TransferLog::before(Stream&) {
  lookedAt_ = steadyNanoseconds();
  const bool hasPassed = isOpen_ && transfer_.slots > 0;  // else a slot is on its way
  if (hasPassed && lookedAt_ - transfer_.end > kPause) end();
}

void TransferLog::after(Stream& stream, bool moved) {
  if (!moved) return;
  if (!std::exchange(isOpen_, true)) transfer_.start = lookedAt_;
  transfer_.end = steadyNanoseconds();
  transfer_.slots = stream.steps() - steps_;
  transfer_.bytes = stream.bytes() - bytes_;
}

// The last transfer is over.
void TransferLog::end() {
  if (!std::exchange(isOpen_, false) || transfer_.slots == 0) return;
  steps_ += transfer_.slots;
  bytes_ += transfer_.bytes;
  note_(transfer_);
}

}  // namespace unisono::transport
