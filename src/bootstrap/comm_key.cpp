// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/comm_key.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/open_descriptor.h"

namespace unisono::bootstrap {
namespace {

constexpr size_t kMinKeyBytes = 16;
constexpr size_t kMaxKeyBytes = 4096;

struct SipState {
  uint64_t v0, v1, v2, v3;

  void rounds(int count) {
    for (int i = 0; i < count; i++) {
      v0 += v1;
      v1 = std::rotl(v1, 13) ^ v0;
      v0 = std::rotl(v0, 32);
      v2 += v3;
      v3 = std::rotl(v3, 16) ^ v2;
      v0 += v3;
      v3 = std::rotl(v3, 21) ^ v0;
      v2 += v1;
      v1 = std::rotl(v1, 17) ^ v2;
      v2 = std::rotl(v2, 32);
    }
  }
  void add(uint64_t word) {
    v3 ^= word;
    rounds(2);
    v0 ^= word;
  }
};

Error keyError(const std::string& path, std::string_view what) {
  return invalidArgument("UNISONO_COMM_KEY_FILE={}: {}", path, what)
      .remedy(fmt::format("Name a file with the same {} to {} bytes on all ranks, which only the "
                          "user of the job can "
                          "read (chmod 600)",
                          kMinKeyBytes, kMaxKeyBytes));
}

}  // namespace

uint64_t sipHash(const std::array<std::byte, 16>& key, std::span<const std::byte> message) {
  uint64_t k[2];
  std::memcpy(k, key.data(), sizeof(k));
  SipState state = {k[0] ^ 0x736f6d6570736575, k[1] ^ 0x646f72616e646f6d, k[0] ^ 0x6c7967656e657261,
                    k[1] ^ 0x7465646279746573};
  const uint64_t length = message.size();
  while (message.size() >= sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, message.data(), sizeof(word));
    state.add(word);
    message = message.subspan(sizeof(word));
  }
  uint64_t last = length << 56;
  if (!message.empty()) std::memcpy(&last, message.data(), message.size());
  state.add(last);
  state.v2 ^= 0xff;
  state.rounds(4);
  return state.v0 ^ state.v1 ^ state.v2 ^ state.v3;
}

std::vector<std::byte> readCommKey(const std::string& path) {
  // O_NONBLOCK: opening a pipe must not wait for somebody to write into it.
  const UniqueDescriptor file(
      tryOpenDescriptor([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); }));
  if (!file) throw keyError(path, std::strerror(errno));
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw systemError(errno, "fstat of the key file");
  if (!S_ISREG(status.st_mode)) throw keyError(path, "it is not a regular file");
  if (status.st_uid != ::geteuid() && status.st_uid != 0) {
    throw keyError(path, "it belongs to another user");
  }
  if ((status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    throw keyError(path, "other users can read or write it");
  }
  std::vector<std::byte> key(kMaxKeyBytes + 1);
  size_t bytes = 0;
  while (bytes < key.size()) {
    const ssize_t count = ::read(file.get(), key.data() + bytes, key.size() - bytes);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw systemError(errno, "reading the key file");
    if (count == 0) break;
    bytes += static_cast<size_t>(count);
  }
  if (bytes < kMinKeyBytes || bytes > kMaxKeyBytes) {
    throw keyError(path, fmt::format("it has {} bytes",
                                     bytes > kMaxKeyBytes ? "too many" : fmt::to_string(bytes)));
  }
  key.resize(bytes);
  return key;
}

Secret secretFromKey(std::span<const std::byte> key, std::string_view commId) {
  std::array<std::byte, 16> first = {};
  std::memcpy(first.data(), key.data(), std::min(key.size(), first.size()));
  // The number of the half and the length of the key keep messages with the same bytes apart.
  const uint64_t head[2] = {0, key.size()};
  std::vector<std::byte> message(sizeof(head));
  std::memcpy(message.data(), head, sizeof(head));
  message.insert(message.end(), key.begin(), key.end());
  const auto text = std::as_bytes(std::span(commId));
  message.insert(message.end(), text.begin(), text.end());
  Secret secret;
  for (size_t half = 0; half < secret.size(); half++) {
    message[0] = static_cast<std::byte>(half);
    secret[half] = sipHash(first, message);
  }
  return secret;
}

}  // namespace unisono::bootstrap
