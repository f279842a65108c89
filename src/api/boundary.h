#pragma once

#include <nccl.h>

#include <exception>
#include <utility>

#include "base/error.h"

// The edge of the library: outside it errors are codes and a text for ncclGetLastError, inside they
// are exceptions.
namespace unisono::api {

// The result that stands for `error`, whose text becomes the calling thread's last error.
ncclResult_t report(const Error& error) noexcept;
ncclResult_t report(const std::exception& error) noexcept;

// The calling thread's last error, "" if there was none. Valid until its next failing call.
const char* lastError() noexcept;

// What an exported function returns that this version lacks: ncclInvalidUsage, after setting the
// calling thread's last error to a text that names `function` and says what to do.
ncclResult_t notImplemented(const char* function) noexcept;

// Runs the body of an exported function; its result is what `body` returns, or ncclSuccess.
template <typename Body>
ncclResult_t guarded(Body&& body) noexcept {
  try {
    if constexpr (std::is_void_v<decltype(body())>) {
      std::forward<Body>(body)();
      return ncclSuccess;
    } else {
      return std::forward<Body>(body)();
    }
  } catch (const Error& error) {
    return report(error);
  } catch (const std::exception& error) {
    return report(error);
  }
}

}  // namespace unisono::api
