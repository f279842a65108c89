// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "device/work.h"
#include "plugin/net.h"

// CollNet plug-ins: networks that reduce what one rank of each node sends. The interface is that of
// NCCL, versions 6 to 12. A CollNet plug-in is part of the library of a net plug-in.
namespace unisono::plugin {

// Memory that is registered with a collective connection, or a part of it.
struct CollNetBuffer {
  std::byte* data;
  void* region;
};

// The functions of a plug-in in the terms of the newest version, which return an ncclResult_t. But
// for connect() they do not wait: what begins an operation leaves a null request where it has to be
// called again. The ranks of a connection begin the same operations in the same order.
class CollNetFunctions {
 public:
  virtual ~CollNetFunctions() = default;
  virtual int version() const = 0;
  virtual const char* name() const = 0;
  // Whether it has all functions that a plug-in must have.
  virtual bool isComplete() const = 0;
  // Whether init() makes a context, for one communicator.
  bool hasContexts() const { return version() >= 11; }
  virtual int init(void** context, uint64_t communicator) const = 0;
  virtual int finalize(void* context) const = 0;
  virtual int devices(int* count) const = 0;
  virtual int describe(int device, NetPort& port) const = 0;
  virtual int listen(void* context, int device, NetHandle& handle, void** listener) const = 0;
  // Joins the ranks whose listeners have these handles, in their order, and may wait for them.
  virtual int connect(std::span<NetHandle> handles, int rank, void* listener,
                      void** connection) const = 0;
  virtual int canReduce(device::DataType type, device::Reduction reduction, int* can) const = 0;
  virtual bool hasAllGather() const = 0;
  virtual bool hasReduceScatter() const = 0;
  // As those of NetFunctions.
  virtual int registerMemory(void* connection, void* data, size_t bytes, int type,
                             void** region) const = 0;
  virtual int registerDmaBuf(void* connection, void* data, size_t bytes, uint64_t offset,
                             int descriptor, void** region) const = 0;
  virtual int deregisterMemory(void* connection, void* region) const = 0;
  virtual int allReduce(void* connection, const CollNetBuffer& from, const CollNetBuffer& to,
                        size_t elements, device::DataType type, device::Reduction reduction,
                        void** request) const = 0;
  // `bytes` of each of `ranks` ranks.
  virtual int allGather(void* connection, const CollNetBuffer& from, const CollNetBuffer& to,
                        size_t bytes, size_t ranks, void** request) const = 0;
  virtual int reduceScatter(void* connection, const CollNetBuffer& from, const CollNetBuffer& to,
                            size_t bytes, size_t ranks, device::DataType type,
                            device::Reduction reduction, void** request) const = 0;
  // Of results in memory of the device.
  virtual int flush(void* connection, const CollNetBuffer& data, int bytes,
                    void** request) const = 0;
  virtual int test(void* request, int* done) const = 0;
  virtual int closeConnection(void* connection) const = 0;
  virtual int closeListener(void* listener) const = 0;
};

// The plug-in that a communicator uses.
class CollNet {
 public:
  // That of the library of `net`. Null if it has none, or one that cannot be used, which is
  // reported to `warn`.
  static std::shared_ptr<const CollNet> open(const Net& net, const Warn& warn = warnOnce);
  ~CollNet();
  CollNet(const CollNet&) = delete;
  CollNet& operator=(const CollNet&) = delete;

  // As the plug-in calls itself, with the version of its interface.
  const std::string& name() const { return name_; }
  const CollNetFunctions& functions() const { return *functions_; }
  const std::vector<NetPort>& ports() const { return ports_; }
  void* context() const { return context_; }

 private:
  explicit CollNet(std::shared_ptr<const CollNetFunctions> functions)
      : functions_(std::move(functions)) {}
  // Returns why the plug-in cannot be used.
  std::string start(uint64_t communicator, bool& initialized);

  const std::shared_ptr<const CollNetFunctions> functions_;
  std::string name_;
  void* context_ = nullptr;
  bool started_ = false;
  std::vector<NetPort> ports_;
};

}  // namespace unisono::plugin
