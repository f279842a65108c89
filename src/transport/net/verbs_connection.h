// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/net/verbs_device.h"
#include "transport/net/verbs_endpoint.h"

namespace unisono::transport {

// What the NCCL_IB_* settings say of connections.
struct VerbsOptions {
  uint8_t timeout = 20, retries = 7;
  uint16_t keyIndex = 0;  // of the partition key
  uint8_t serviceLevel = 0, trafficClass = 0;
  size_t queuePairs = 1;
  bool splitsData = false;
  std::optional<bool> adaptiveRouting;  // nothing: as the kind of network is
  uint64_t adaptiveRoutingThreshold = 8192;
  bool relaxedOrdering = true;
};

using VerbsRegion = std::unique_ptr<ibv_mr, int (*)(ibv_mr*)>;

// The reliable queue pairs of one FIFO, with one completion queue.
class VerbsConnection {
 public:
  struct Sizes {
    size_t queuePairs;
    uint32_t sends, receives;  // of each queue pair, at once
    bool flushes = false;      // whether there is a queue pair for flush()
  };
  // Its queue pairs are in state INIT. Throws Error(systemError).
  VerbsConnection(const VerbsPort& port, const VerbsOptions& options, const Sizes& sizes);

  const VerbsPort& port() const { return port_; }
  const VerbsOptions& options() const { return options_; }
  size_t queuePairs() const { return pairs_.size(); }
  bool adaptsRoutes() const { return options_.adaptiveRouting.value_or(!port_.isEthernet()); }
  // Lets the adapter read memory and, with IBV_ACCESS_REMOTE_WRITE, the other end write it, until
  // the connection ends. Throws Error(systemError).
  ibv_mr& registerMemory(void* data, size_t bytes, int access);
  // Keeps a region of the port's adapter until the connection ends.
  ibv_mr& keep(VerbsRegion region);
  // How the other end finds this one.
  VerbsEndpoint endpoint() const;
  // Makes the queue pairs ready to receive and to send (RTR, RTS). Throws Error.
  void connect(const VerbsEndpoint& remote);

  // Return whether that has succeeded.
  bool post(size_t pair, ibv_send_wr& request);
  bool post(size_t pair, ibv_recv_wr& request);
  // Reads a word of memory of the device through the adapter, which comes after all that it has
  // written there. One at a time.
  bool flush(ibv_send_wr& request);
  // What has completed. A completion that failed ends the connection.
  std::span<const ibv_wc> poll();
  // Why the connection failed; empty while it has not.
  const std::string& failure();

 private:
  template <typename T>
  using Owned = std::unique_ptr<T, int (*)(T*)>;

  const VerbsLibrary& library() const { return port_.device->library(); }
  [[noreturn]] void fail(const char* function, int error) const;
  Owned<ibv_qp> makePair(const Sizes& sizes, unsigned int access) const;
  void connect(ibv_qp& pair, uint32_t number, const VerbsEndpoint& remote) const;
  bool post(ibv_qp& pair, ibv_send_wr& request);
  void modify(ibv_qp& pair, ibv_qp_attr& attributes, int mask) const;
  std::string describe(const ibv_wc& completion) const;

  const VerbsPort port_;
  const VerbsOptions options_;
  ibv_gid gid_{};
  uint32_t firstPacket_;
  FailureNote events_;  // of the adapter's asynchronous events
  std::string failure_;
  bool isFlush_ = false;  // failure_ is a consequence of another one
  std::array<ibv_wc, 16> completions_{};
  std::vector<VerbsRegion> regions_;
  Owned<ibv_cq> queue_;
  std::vector<Owned<ibv_qp>> pairs_;
  Owned<ibv_qp> flushPair_;  // connected with itself; may be null
};

}  // namespace unisono::transport
