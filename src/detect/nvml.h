// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "topology/xml.h"

namespace unisono::detect {

// What the driver knows of GPUs and sysfs does not. Answers that the driver refuses are absent;
// nothing throws. Tests give their own.
class NvmlSource {
 public:
  // One active NVLink that carries GPU memory traffic.
  struct NvLink {
    enum class Remote { unknown, gpu, nvswitch };
    std::string remoteBusId;  // as the driver words it; all ones where a virtual machine hides it
    Remote remote = Remote::unknown;
  };
  // The links between a GPU and its CPU in one package.
  struct ChipLink {
    int count = 0;
    long long megabytes = 0;  // MB/s of one of them
  };
  // The NVLink fabric across hosts that a GPU has joined.
  struct Fabric {
    std::array<uint8_t, 16> cluster{};
    uint32_t clique = 0;

    uint64_t hash() const;  // equal on all GPUs of one fabric
  };

  virtual ~NvmlSource() = default;
  // The GPUs that this process may see, in the driver's order.
  virtual std::vector<topology::BusId> gpus() = 0;
  // The place of a GPU in this order; -1: unknown.
  virtual int indexOf(topology::BusId gpu) = 0;
  virtual int computeCapability(topology::BusId gpu) = 0;  // 90 is 9.0; 0: unknown
  virtual std::vector<NvLink> nvlinks(topology::BusId gpu) = 0;
  virtual ChipLink chipLink(topology::BusId gpu) = 0;
  // False only if the driver says that one GPU cannot read or write the other's memory.
  virtual bool peerAllowed(topology::BusId a, topology::BusId b) = 0;
  virtual std::optional<Fabric> fabric(topology::BusId gpu) = 0;
};

// Loads the driver's library at run time ("libnvidia-ml.so.1"); null if it is not there or does
// not start, with the reason in `problem`.
std::unique_ptr<NvmlSource> loadNvml(const std::string& library, std::string& problem);

}  // namespace unisono::detect
