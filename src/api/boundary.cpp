#include "api/boundary.h"

#include <string>

#include "base/log.h"

namespace unisono::api {
namespace {

std::string& threadError() {
  thread_local std::string text;
  return text;
}

// ncclTimeout is newer than the header that programs of 2.28 were compiled with.
ncclResult_t resultOf(ErrorCode code) {
  return code == ErrorCode::timeout ? ncclRemoteError : static_cast<ncclResult_t>(code);
}

}  // namespace

ncclResult_t report(const Error& error) noexcept {
  try {
    threadError() = error.what();
    logWarn("{}", error.what());
  } catch (...) {
    // Out of memory for the text: the code still tells.
  }
  return resultOf(error.code());
}

ncclResult_t report(const std::exception& error) noexcept {
  try {
    return report(Error(ErrorCode::systemError, error.what()));
  } catch (...) {
    return ncclSystemError;
  }
}

const char* lastError() noexcept {
  return threadError().c_str();
}

ncclResult_t notImplemented(const char* function) noexcept {
  return guarded([function]() -> ncclResult_t {
    throw invalidUsage("{} is not implemented in this version of Unisono", function)
        .remedy("docs/status.md lists what is there; do without the call or use a later version");
  });
}

}  // namespace unisono::api
