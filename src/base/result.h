// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nccl.h>

#include <new>
#include <system_error>
#include <type_traits>
#include <utility>

#include "base/error.h"

namespace unisono {

// ncclTimeout is newer than the header that programs of NCCL 2.28 were compiled with.
constexpr ncclResult_t resultOf(ErrorCode code) {
  return code == ErrorCode::timeout ? ncclRemoteError : static_cast<ncclResult_t>(code);
}

// Runs the body of an exported C function. Its result is what `body` returns, or ncclSuccess if
// that is void. An exception ends here: `keepText` gets its text, which is valid during that call
// only, and whether it was logged before.
template <typename Body>
ncclResult_t guarded(void (*keepText)(const char*, bool isLogged) noexcept, Body&& body) noexcept {
  ErrorCode code = ErrorCode::internalError;
  try {
    if constexpr (std::is_void_v<decltype(body())>) {
      std::forward<Body>(body)();
      return ncclSuccess;
    } else {
      return std::forward<Body>(body)();
    }
  } catch (const Error& error) {
    code = error.code();
    keepText(error.what(), error.isLogged());
  } catch (const std::bad_alloc&) {
    code = ErrorCode::systemError;
    keepText("Out of host memory", false);
  } catch (const std::system_error& error) {
    code = ErrorCode::systemError;
    keepText(error.what(), false);
  } catch (const std::exception& error) {
    keepText(error.what(), false);
  }
  return resultOf(code);
}

}  // namespace unisono
