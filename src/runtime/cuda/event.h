// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "runtime/runtime.h"

namespace unisono::runtime {

// See Runtime::createEvent and createTimedPoint.
std::unique_ptr<Event> createCudaEvent(int device);
std::unique_ptr<TimedPoint> createCudaTimedPoint(int device);

}  // namespace unisono::runtime
