// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/frame.h"

#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/math.h"

namespace unisono::bootstrap {

static_assert(std::endian::native == std::endian::little);

Secret randomSecret() {
  Secret secret = {};
  auto* bytes = reinterpret_cast<std::byte*>(secret.data());
  size_t filled = 0;
  while (filled < sizeof(secret)) {
    ssize_t count = ::getrandom(bytes + filled, sizeof(secret) - filled, 0);
    if (count < 0 && errno != EINTR) throw systemError(errno, "getrandom");
    if (count > 0) filled += static_cast<size_t>(count);
  }
  return secret;
}

Secret secretOfChild(const Secret& parent, uint64_t number, int color) {
  const uint64_t made = mix64(parent[1] + mix64(number));
  return {parent[0], mix64(made + static_cast<uint32_t>(color))};
}

bool sameSecret(const Secret& a, const Secret& b) {
  return ((a[0] ^ b[0]) | (a[1] ^ b[1])) == 0;
}

std::vector<std::byte> encodeFrame(FrameHeader header, std::span<const std::byte> payload) {
  header.length = payload.size();
  std::vector<std::byte> bytes(sizeof(header) + payload.size());
  std::memcpy(bytes.data(), &header, sizeof(header));
  if (!payload.empty()) std::memcpy(bytes.data() + sizeof(header), payload.data(), payload.size());
  return bytes;
}

void FrameReader::checkHeader() const {
  const FrameHeader& header = frame_.header;
  if (header.magic != FrameHeader::kMagic) {
    throw Error(ErrorCode::remoteError, "it does not speak this protocol");
  }
  auto limit = std::find_if(limits_.begin(), limits_.end(),
                            [&](const FrameLimit& entry) { return entry.kind == header.kind; });
  const bool needsSecret = limit == limits_.end() || limit->kind != FrameKind::wrongSecret;
  Secret expected = secret_;
  if (acceptsFamily_) expected[1] = header.secret[1];
  if (needsSecret && !sameSecret(header.secret, expected)) {
    throw Error(ErrorCode::invalidUsage, "its secret is not the one of this communicator");
  }
  if (limit == limits_.end()) {
    throw Error(ErrorCode::remoteError, fmt::format("a message of kind {} is not expected here",
                                                    static_cast<uint32_t>(header.kind)));
  }
  if (header.length > limit->longest) {
    throw Error(ErrorCode::remoteError,
                fmt::format("its message of {} bytes is longer than the {} allowed", header.length,
                            limit->longest));
  }
}

FrameReader::Status FrameReader::read(const Socket& socket) {
  for (;;) {
    std::span<std::byte> space;
    if (headerBytes_ < sizeof(FrameHeader)) {
      space = std::as_writable_bytes(std::span(&frame_.header, 1)).subspan(headerBytes_);
    } else {
      space = std::span(frame_.payload).subspan(payloadBytes_);
      if (space.empty()) return Status::complete;
    }
    const Transfer transfer = socket.read(space);
    if (transfer.closed) {
      if (headerBytes_ == 0) return Status::closed;
      throw Error(ErrorCode::remoteError, "it closed the connection in the middle of a message");
    }
    if (transfer.bytes == 0) return Status::incomplete;
    if (headerBytes_ == sizeof(FrameHeader)) {
      payloadBytes_ += transfer.bytes;
      continue;
    }
    headerBytes_ += transfer.bytes;
    // A wrong first word is enough to refuse: a stranger may never send a whole header.
    if (headerBytes_ >= sizeof(frame_.header.magic) && frame_.header.magic != FrameHeader::kMagic) {
      checkHeader();
    }
    if (headerBytes_ == sizeof(FrameHeader)) {
      checkHeader();
      frame_.payload.resize(frame_.header.length);
    }
  }
}

Frame FrameReader::take() {
  headerBytes_ = 0;
  payloadBytes_ = 0;
  return std::exchange(frame_, {});
}

}  // namespace unisono::bootstrap
