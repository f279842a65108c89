// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "transport/net/stream.h"
#include "transport/transport.h"

namespace unisono::transport {

// Tells what a stream moves, for a timeline: a transfer is all that follows without a pause.
// Streams that nobody wants to see have none.
class TransferLog {
 public:
  // `transfer` says whose transfers these are.
  TransferLog(const Transfer& transfer, NoteTransfer note);
  ~TransferLog() { end(); }
  TransferLog(const TransferLog&) = delete;
  TransferLog& operator=(const TransferLog&) = delete;

  // Around each look at the stream.
  void begin();
  void look(const Stream& stream, bool moved);
  // The last transfer is over.
  void end();

 private:
  Transfer transfer_;
  const NoteTransfer note_;
  bool isOpen_ = false;
  int64_t lookedAt_ = 0;
  uint64_t steps_ = 0, bytes_ = 0;  // of the stream, before this transfer
};

}  // namespace unisono::transport
