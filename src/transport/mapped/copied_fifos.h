// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "device/work.h"
#include "runtime/runtime.h"
#include "transport/net/fifo_memory.h"
#include "transport/net/proxy.h"
#include "transport/net/stream.h"
#include "transport/transport.h"

// Copy engines in place of kernels for FIFOs in host memory: the kernels of a rank use slots in the
// memory of their own GPU, and the proxy of its device copies slots between these and the FIFO that
// the two ranks share (decision 0022).
namespace unisono::transport {

// Copies what one FIFO of protocol Simple receives into another one, with the same step for each
// slot. Both have reports.
class CopyStream final : public Stream {
 public:
  // `stream`, of `device`, runs the copies. `sends`: whether the rank that owns this end sends.
  // All of it, and the memory, live longer, until the copies are done.
  CopyStream(runtime::Runtime& runtime, int device, runtime::Stream stream,
             const StreamMemory& from, const StreamMemory& to, bool sends);
  StreamProgress progress() override;
  bool isPending() const override { return sends_ && failure_.empty() && step_ < tail(); }

 private:
  bool begin();
  bool complete();

  runtime::Runtime& runtime_;
  const int device_;
  const runtime::Stream stream_;
  const StreamMemory to_;
  const bool sends_;
  uint64_t begun_ = 0;                                   // slots
  std::vector<std::unique_ptr<runtime::Event>> copied_;  // by slot
};

// The FIFOs of one rank that copy engines fill or empty.
class CopiedFifos {
 public:
  explicit CopiedFifos(const TransportContext& context);
  // Waits for copies that have begun, which depend on no kernel.
  ~CopiedFifos();
  CopiedFifos(const CopiedFifos&) = delete;

  // Replaces those of protocol Simple of a group, which both ranks share, by those that the kernels
  // of this rank use.
  void replace(const ConnectionGroup& group, std::vector<device::Fifo>& fifos);
  // What errors of a copy name.
  static Proxy::Place placeOf(int rank, int peer, bool sends);
  // As those of Transport.
  void noteLaunch() { proxy_.wake(); }
  void drain() { waitUntilDrained(proxy_, client_, context_); }
  void close() { proxy_.remove(client_); }

 private:
  const TransportContext context_;
  // Of what this rank sends, and receives: the two directions have different copy engines.
  const std::array<std::shared_ptr<void>, 2> streams_;
  std::vector<std::unique_ptr<FifoMemory>> memory_;
  Proxy& proxy_;
  const uint64_t client_;
};

}  // namespace unisono::transport
