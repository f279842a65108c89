// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "runtime/runtime.h"

namespace unisono::runtime {

// See Runtime::createParallelCopies.
std::unique_ptr<ParallelCopies> createCudaParallelCopies(Runtime& runtime, int device);

}  // namespace unisono::runtime
