#pragma once

#include <nccl.h>

#include <utility>

#include "base/result.h"

// The edge of the library: outside it errors are codes and a text for ncclGetLastError, inside they
// are exceptions.
namespace unisono::api {

// The calling thread's last error, "" if there was none. Valid until its next failing call.
const char* lastError() noexcept;

// What an exported function returns that this version lacks: ncclInvalidUsage, after setting the
// calling thread's last error to a text that names `function` and says what to do.
ncclResult_t notImplemented(const char* function) noexcept;

// Logs an error and makes it the calling thread's last one.
void keepText(const char* text) noexcept;

// Runs the body of an exported function; its result is what `body` returns, or ncclSuccess.
template <typename Body>
ncclResult_t guarded(Body&& body) noexcept {
  return unisono::guarded(keepText, std::forward<Body>(body));
}

}  // namespace unisono::api
