// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "bootstrap/reactor.h"
#include "plugin/net.h"
#include "transport/net/gid.h"
#include "transport/net/verbs_library.h"

// Adapters and ports of libibverbs.
namespace unisono::transport {

// The first failure that is noted, for a thread that looks often.
class FailureNote {
 public:
  void set(const std::string& failure);
  // Empty: none.
  std::string get() const;

 private:
  std::atomic<bool> isSet_{false};
  mutable std::mutex mutex_;
  std::string failure_;
};

// Lists the ports of NCCL_IB_HCA: "mlx5_0:1,mlx5_1" allows a port, and all ports of adapters whose
// names begin with mlx5_1. A leading = requires the exact name, a leading ^ excludes what is
// listed,
// ^= both.
class PortFilter {
 public:
  explicit PortFilter(std::string_view text);
  bool allows(std::string_view adapter, int port) const;

 private:
  struct Entry {
    std::string adapter;
    int port;  // -1: all
  };
  bool excludes_ = false, isExact_ = false;
  std::vector<Entry> entries_;
};

// An adapter that is open, with the protection domain of all its connections. Communicators of a
// process share it. The reactor's thread reads its asynchronous events.
class VerbsDevice final : private bootstrap::Reactor::Handler {
 public:
  // Null where the adapter cannot be opened; that is logged.
  static std::shared_ptr<VerbsDevice> open(const VerbsLibrary& library, ibv_device& device);
  ~VerbsDevice();
  VerbsDevice(const VerbsDevice&) = delete;
  VerbsDevice& operator=(const VerbsDevice&) = delete;

  const VerbsLibrary& library() const { return library_; }
  const std::string& name() const { return name_; }
  const std::string& folder() const { return folder_; }
  ibv_context* context() const { return context_; }
  ibv_pd* domain() const { return domain_; }
  const ibv_device_attr& attributes() const { return attributes_; }
  // Whether its driver registers DMA-BUFs.
  bool takesDmaBufs() const;
  // Of the whole adapter.
  std::string failure() const { return failure_.get(); }
  bool isDown(int port) const { return (downPorts_.load() >> (port % 64) & 1) != 0; }

 private:
  VerbsDevice(const VerbsLibrary& library, ibv_device& device) noexcept
      : library_(library), name_(device.name), folder_(device.ibdev_path) {}
  bool start(ibv_device& device);
  void serve(int descriptor) override;
  void tick() override {}
  void note(const ibv_async_event& event);

  const VerbsLibrary& library_;
  const std::string name_, folder_;  // folder_: of the adapter in sysfs
  ibv_context* context_ = nullptr;
  ibv_pd* domain_ = nullptr;
  ibv_device_attr attributes_{};
  FailureNote failure_;
  std::atomic<uint64_t> downPorts_{0};  // by number
  uint32_t handler_ = 0;                // of the reactor; 0: none
};

// A port that was active when the communicator began.
struct VerbsPort {
  std::shared_ptr<VerbsDevice> device;
  uint8_t number = 1;
  ibv_port_attr attributes{};
  int gidIndex = 0;       // of its connections
  plugin::NetPort facts;  // for the topology

  bool isEthernet() const { return attributes.link_layer == IBV_LINK_LAYER_ETHERNET; }
  std::string name() const { return fmt::format("{}:{}", device->name(), number); }
};

// The active ports that `filter` allows, in the order of the library's list. Where there is none,
// `problem` says why.
std::vector<VerbsPort> findVerbsPorts(const VerbsLibrary& library, const PortFilter& filter,
                                      std::string& problem);

// The GIDs of a port and their RoCE versions.
std::vector<Gid> readGids(const VerbsPort& port);

}  // namespace unisono::transport
