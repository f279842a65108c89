#pragma once

#include <nccl.h>

namespace unisono::api {

// What an exported function returns that this version lacks: ncclInvalidUsage, after setting the
// calling thread's last error to a text that names `function` and says what to do.
ncclResult_t notImplemented(const char* function) noexcept;

}  // namespace unisono::api
