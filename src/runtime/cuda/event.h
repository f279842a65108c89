// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "runtime/runtime.h"

namespace unisono::runtime {

// See Runtime::createEvent and createTimedPoint.
std::unique_ptr<Event> createCudaEvent(int device);
std::unique_ptr<TimedPoint> createCudaTimedPoint(int device);

// A stream with the highest priority, on which copies do not queue after work of the user. The
// device is current.
cudaStream_t createUrgentStream(int device);

}  // namespace unisono::runtime
