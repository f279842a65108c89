// SPDX-License-Identifier: Apache-2.0
#include "api/boundary.h"

#include <cstdio>

#include "base/log.h"

namespace unisono::api {
namespace {

thread_local ErrorText threadError;

}  // namespace

void keepText(const char* text, bool isLogged) noexcept {
  std::snprintf(threadError, sizeof(threadError), "%s", text);
  try {
    if (!isLogged) logWarn("{}", text);
  } catch (...) {
    // Without memory for the line the result code still tells.
  }
}

const char* lastError() noexcept {
  return threadError;
}

ncclResult_t notImplemented(const char* function) noexcept {
  return guarded([function]() -> ncclResult_t {
    throw invalidUsage("{} is not implemented in this version of Unisono", function)
        .remedy("See docs/status.md for what is implemented, or use a later version");
  });
}

}  // namespace unisono::api
