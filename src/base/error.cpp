// SPDX-License-Identifier: Apache-2.0
#include "base/error.h"

#include <cstring>
#include <new>

namespace unisono {

Error::Error(ErrorCode code, std::string what) : code_(code), happened_(std::move(what)) {
  compose();
}

Error& Error::rank(int rank) & {
  rank_ = rank;
  compose();
  return *this;
}

Error& Error::peer(int peer) & {
  peer_ = peer;
  compose();
  return *this;
}

Error& Error::device(int device) & {
  device_ = device;
  compose();
  return *this;
}

Error& Error::remedy(std::string text) & {
  remedy_ = std::move(text);
  compose();
  return *this;
}

void Error::compose() {
  std::string where;
  auto append = [&where](std::string_view name, const std::optional<int>& value) {
    if (value) where += fmt::format("{}{} {}", where.empty() ? "" : ", ", name, *value);
  };
  append("rank", rank_);
  append("peer", peer_);
  append("device", device_);
  text_ = happened_;
  if (!where.empty()) text_ += fmt::format(" [{}]", where);
  if (!remedy_.empty()) text_ += fmt::format(". {}", remedy_);
}

Error systemError(int errnoValue, std::string_view call) {
  return Error(ErrorCode::systemError, fmt::format("{} failed: {} (errno {})", call,
                                                   std::strerror(errnoValue), errnoValue));
}

Error asError(const std::exception& exception) {
  if (const auto* error = dynamic_cast<const Error*>(&exception)) return *error;
  const bool memory = dynamic_cast<const std::bad_alloc*>(&exception) != nullptr;
  return Error(memory ? ErrorCode::systemError : ErrorCode::internalError,
               memory ? "Out of host memory" : exception.what());
}

}  // namespace unisono
