// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nccl.h>

#include <utility>

#include "base/result.h"

// The boundary of the library: callers get result codes and a text from ncclGetLastError, the
// layers below throw exceptions.
namespace unisono::api {

// A text that a caller of ncclGetLastError sees. An array, because destructors of static objects
// may still make calls when the main thread's thread-local objects have been destroyed.
using ErrorText = char[4096];

// Returns the calling thread's last error, "" if there was none. Valid until its next failing call.
const char* lastError() noexcept;

// For exported functions that are not implemented: sets the calling thread's last error to a text
// that names `function` and says what to do, and returns ncclInvalidUsage.
ncclResult_t notImplemented(const char* function) noexcept;

// Logs an error, unless it was logged before, and makes it the calling thread's last one.
void keepText(const char* text, bool isLogged) noexcept;

// Runs the body of an exported function. Returns the result of `body`, or ncclSuccess if it is
// void.
template <typename Body>
ncclResult_t guarded(Body&& body) noexcept {
  return unisono::guarded(keepText, std::forward<Body>(body));
}

}  // namespace unisono::api
