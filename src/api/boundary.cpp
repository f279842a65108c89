// SPDX-License-Identifier: Apache-2.0
#include "api/boundary.h"

#include <string>

#include "base/log.h"

namespace unisono::api {
namespace {

std::string& threadError() {
  thread_local std::string text;
  return text;
}

}  // namespace

void keepText(const char* text, bool isLogged) noexcept {
  try {
    threadError() = text;
    if (!isLogged) logWarn("{}", text);
  } catch (...) {
    // Without memory for the text the result code still tells.
  }
}

const char* lastError() noexcept {
  return threadError().c_str();
}

ncclResult_t notImplemented(const char* function) noexcept {
  return guarded([function]() -> ncclResult_t {
    throw invalidUsage("{} is not implemented in this version of Unisono", function)
        .remedy("See docs/status.md for what is implemented, or use a later version");
  });
}

}  // namespace unisono::api
