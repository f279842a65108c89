// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/log.h"
#include "plugin/library.h"

// Network plug-ins: libraries that move data between hosts. The interface is that of NCCL, versions
// 6 to 12.
namespace unisono::plugin {

// A port of a network, as its plug-in describes it.
struct NetPort {
  std::string name;
  std::string pciPath;       // folder of its PCI device in sysfs; empty: a virtual device
  uint64_t guid = 0;         // of the adapter
  bool reachesGpus = false;  // takes the address of device memory
  bool takesDmaBufs = false;
  bool forcesFlush = false;    // wants flushes of device memory that the GPU does not need
  int megabits = 0;            // per second
  int number = 0;              // of the adapter
  float latency = 0;           // microseconds
  int connections = 0;         // that can be open at once
  int receives = 1;            // that can be grouped
  int deviceType = 0;          // 0: no part of it runs on the GPU
  size_t messageBytes = 0;     // of the largest message
  size_t collectiveBytes = 0;  // of the largest collective of a CollNet plug-in
};

// What a receiver hands a sender so that it can connect. Plug-ins keep the state of a connection
// that is being made in it, and cast it to structures of their own.
struct alignas(16) NetHandle {
  std::array<std::byte, 128> bytes{};
};

// Where registered memory is (NCCL_PTR_HOST, NCCL_PTR_CUDA).
inline constexpr int kHostMemory = 1, kDeviceMemory = 2;

// What plug-ins tell a profiler, for a slot that they send or receive: from version 10 on they
// start events with send() and receive(), whose numbers and data are their own, and change or stop
// them later, until the connection is closed.
class NetEvent {
 public:
  virtual void update(void* data) = 0;
  virtual void stop() = 0;  // the last call

 protected:
  ~NetEvent() = default;
};
class NetEvents {
 public:
  // Null: nobody wants to know.
  virtual NetEvent* start(int64_t plugin, void* data) = 0;

 protected:
  ~NetEvents() = default;
};

// The functions of a plug-in in the terms of the newest version. They return an ncclResult_t, and
// do not wait: connect() and accept() leave null until there is a connection, send() and receive()
// leave a null request where they have to be called again.
class NetFunctions {
 public:
  virtual ~NetFunctions() = default;
  virtual int version() const = 0;
  virtual const char* name() const = 0;
  // Whether it has all functions that a plug-in must have.
  virtual bool isComplete() const = 0;
  // Whether init() makes a context, for one communicator.
  bool hasContexts() const { return version() >= 11; }
  virtual int init(void** context, uint64_t communicator, int trafficClass) const = 0;
  virtual int finalize(void* context) const = 0;
  virtual int devices(int* count) const = 0;
  virtual int describe(int device, NetPort& port) const = 0;
  virtual int listen(void* context, int device, NetHandle& handle, void** listener) const = 0;
  virtual int connect(void* context, int trafficClass, int device, NetHandle& handle,
                      void** sender) const = 0;
  virtual int accept(void* listener, void** receiver) const = 0;
  // `type`: kHostMemory or kDeviceMemory.
  virtual int registerMemory(void* connection, void* data, size_t bytes, int type,
                             void** region) const = 0;
  // Of device memory, which is in a DMA-BUF from `offset` on.
  virtual int registerDmaBuf(void* connection, void* data, size_t bytes, uint64_t offset,
                             int descriptor, void** region) const = 0;
  virtual int deregisterMemory(void* connection, void* region) const = 0;
  // `events` may be null.
  virtual int send(void* sender, void* data, size_t bytes, void* region, NetEvents* events,
                   void** request) const = 0;
  virtual int receive(void* receiver, void* data, size_t bytes, void* region, NetEvents* events,
                      void** request) const = 0;
  virtual int flush(void* receiver, void* data, int bytes, void* region, void** request) const = 0;
  virtual int test(void* request, int* done, int* bytes) const = 0;
  virtual int closeSender(void* sender) const = 0;
  virtual int closeReceiver(void* receiver) const = 0;
  virtual int closeListener(void* listener) const = 0;
};

// The plug-in that a communicator uses.
class Net {
 public:
  // As for NetFunctions::init.
  struct Member {
    uint64_t communicator = 0;  // the same on all ranks
    int trafficClass = -1;      // -1: as the plug-in likes
  };
  // Opens the first plug-in of `plugins` (NCCL_NET_PLUGIN: a list of what openPlugin() takes) that
  // can be used and, unless `name` (NCCL_NET) is empty, calls itself so. Those that cannot be used
  // are reported to `warn`. Null where the library's own sockets are to be used. Throws
  // Error(invalidUsage) where nothing is called `name`.
  static std::shared_ptr<const Net> open(const std::string& plugins, const std::string& name,
                                         const Member& member, const Warn& warn = warnOnce);
  ~Net();
  Net(const Net&) = delete;
  Net& operator=(const Net&) = delete;

  // As the plug-in calls itself, with the version of its interface: "Example (v11)".
  const std::string& name() const { return name_; }
  const NetFunctions& functions() const { return *functions_; }
  const std::vector<NetPort>& ports() const { return ports_; }
  void* context() const { return context_; }
  const Member& member() const { return member_; }
  // Where its CollNet plug-in is, if it has one.
  const OpenLibrary& library() const { return library_; }
  int trafficClass() const { return member_.trafficClass; }

 private:
  struct Loaded;  // a library, in net.cpp
  Net(OpenLibrary library, std::shared_ptr<const NetFunctions> functions, const Member& member)
      : library_(std::move(library)), functions_(std::move(functions)), member_(member) {}
  static Loaded& load(const std::string& plugin);
  // Returns why the plug-in cannot be used.
  std::string start(Loaded& loaded);

  const OpenLibrary library_;
  const std::shared_ptr<const NetFunctions> functions_;
  const Member member_;
  std::string name_;
  void* context_ = nullptr;
  bool started_ = false;
  std::vector<NetPort> ports_;
};

// "1 (ncclUnhandledCudaError)", for messages.
std::string describeResult(int result);

}  // namespace unisono::plugin
