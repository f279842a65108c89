// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/work.h"
#include "plan/plan.h"
#include "runtime/runtime.h"
#include "transport/connector.h"

namespace unisono::transport {

// What the kernels of one communicator need that a plan does not say.
struct LaunchContext {
  device::DeviceCommunicator* communicator = nullptr;  // in device memory
  device::Channel* channels = nullptr;                 // of the communicator, too
  const uint32_t* abortFlag = nullptr;                 // ends waits
  const uint32_t* launchFlag = nullptr;                // ends kernels that begin later
  const device::DirectMemory* direct = nullptr;
  const device::WideMemory* wide = nullptr;
  device::MappedWindow* windows = nullptr;  // of peers
  device::LaunchMark mark{};
  int clusterBlocks = 1;                      // most blocks of a cluster
  bool startsEarly = false;                   // kernels, while those before them end
  bool inRemoteDomain = false;                // kernels, see runtime::LaunchShape
  runtime::ParallelCopies* copies = nullptr;  // null: no launch copies
};

// Completes the arguments of a launch and enqueues it. Returns how many thread groups mark it.
int launch(runtime::Runtime& runtime, const LaunchContext& context, plan::Launch& launch,
           runtime::Stream stream);

}  // namespace unisono::transport
