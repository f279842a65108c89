// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "transport/net/stream.h"
#include "transport/transport.h"

namespace unisono::transport {

// Tells what a stream moves, for a timeline: a transfer is all that follows without a pause.
class TransferLog final : public StreamObserver {
 public:
  TransferLog(const NetworkEnd& of, NoteTransfer note);
  ~TransferLog() override { end(); }
  TransferLog(const TransferLog&) = delete;
  TransferLog& operator=(const TransferLog&) = delete;

  void before(Stream& stream) override;
  void after(Stream& stream, bool moved) override;
  void rest() override { end(); }

 private:
  void end();

  Transfer transfer_;
  const NoteTransfer note_;
  bool isOpen_ = false;
  int64_t lookedAt_ = 0;
  uint64_t steps_ = 0, bytes_ = 0;  // of the stream, before this transfer
};

}  // namespace unisono::transport
