// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace unisono {

// What went wrong, in the classes and with the numbers of ncclResult_t.
enum class ErrorCode : int {
  success = 0,
  unhandledCudaError = 1,
  systemError = 2,
  internalError = 3,
  invalidArgument = 4,
  invalidUsage = 5,
  remoteError = 6,
  inProgress = 7,
  timeout = 8,
};

// The one exception type of the library. `api` turns it into an ncclResult_t and keeps
// `what()` for ncclGetLastError. A message says what happened; the optional parts say where and
// what to do, and are appended in a fixed form:
//   "<what happened> [rank 3, peer 5, device 1]. <remedy>"
class Error : public std::exception {
 public:
  Error(ErrorCode code, std::string what);

  Error& rank(int rank) &;
  Error& peer(int peer) &;
  Error& device(int device) &;
  // What the reader should do, a full sentence.
  Error& remedy(std::string text) &;

  Error&& rank(int value) && { return std::move(this->rank(value)); }
  Error&& peer(int value) && { return std::move(this->peer(value)); }
  Error&& device(int value) && { return std::move(this->device(value)); }
  Error&& remedy(std::string text) && { return std::move(this->remedy(std::move(text))); }

  // Whether a log line has told this error already, so that each is logged once.
  void setLogged() { logged_ = true; }
  bool isLogged() const { return logged_; }

  ErrorCode code() const { return code_; }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  void compose();

  ErrorCode code_;
  bool logged_ = false;
  std::string happened_;
  std::optional<int> rank_, peer_, device_;
  std::string remedy_;
  std::string text_;
};

// Shorthands that format their message.
template <typename... Args>
Error invalidArgument(fmt::format_string<Args...> format, Args&&... args) {
  return Error(ErrorCode::invalidArgument, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
Error invalidUsage(fmt::format_string<Args...> format, Args&&... args) {
  return Error(ErrorCode::invalidUsage, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
Error internalError(fmt::format_string<Args...> format, Args&&... args) {
  return Error(ErrorCode::internalError, fmt::format(format, std::forward<Args>(args)...));
}

// A failed system call: appends the text of `errnoValue`.
Error systemError(int errnoValue, std::string_view call);

// Returns any exception as an Error: itself, or one with its text.
Error asError(const std::exception& exception);

}  // namespace unisono
