// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bootstrap/socket.h"

namespace unisono::bootstrap {

// 128 bits that show that a connection belongs to a family of communicators, and a frame to one of
// these. They keep out strangers, scanners and ranks of another job. They do not protect against
// those who can read the network's traffic.
using Secret = std::array<uint64_t, 2>;

// From getrandom(2). Throws Error(systemError).
Secret randomSecret();
// That of a communicator that ranks of another one make, under a number that these have for it.
// Both have the same first half, by which the connections of a family are known.
Secret secretOfChild(const Secret& parent, uint64_t number, int color);
// Compares in a time that does not depend on the contents.
bool sameSecret(const Secret& a, const Secret& b);

enum class FrameKind : uint32_t {
  announce = 1,    // rank -> root: Announcement
  table = 2,       // root -> rank: session secret, then Neighbour for each rank to connect to
  refusal = 3,     // root -> rank: text; tag is the ErrorCode. Head -> root: that of its other root
  message = 4,     // rank -> rank: payload of send()
  collective = 5,  // rank -> rank: part of an all-gather; tag is its number
  failure = 6,     // rank -> rank: text of an error that ends the communicator; tag is the rank
                   // that it comes from
  hello = 7,       // rank -> rank: the first on a connection, by the side that opened it: its name
  welcome = 8,     // rank -> rank: the answer: the name of the other side
  report = 9,      // root -> rank: text for the log
  wrongSecret = 10,  // root -> stranger: its secret is wrong. Carries no secret itself.
  death = 11,        // rank -> rank: text on the end of a rank that did not leave; tag is the rank
  departure = 12,    // rank -> rank: DepartureCounts and a text; tag is the rank that has left
  failedCollective = 13,  // rank -> rank: the rank that failed in an all-gather and a text; tag is
                          // the number of the all-gather
  joined = 14,            // root -> head: all that the root serves have joined. Head -> root above:
                          // the same. Head -> root: all ranks have joined.
  question = 15,          // rank -> rank: answered by the thread of the connections
  answer = 16,            // rank -> rank: the answer to a question
  greeting = 17,          // rank -> rank: the first of a communicator, by each side
  absent = 18,            // rank -> rank: the sender is not in this communicator (any more)
};

// The version of all messages that ranks exchange to set up a communicator, those of `comm`
// included. Ranks whose versions differ are refused by the root.
inline constexpr uint32_t kProtocolVersion = 25;

// Every message is this header and `length` bytes of payload. Little-endian, as are all machines
// that this library is built for.
struct FrameHeader {
  uint64_t magic = kMagic;
  Secret secret = {};
  FrameKind kind = FrameKind::message;
  uint32_t sender = 0;
  uint64_t tag = 0;
  uint64_t length = 0;

  static constexpr uint64_t kMagic = 0x31306f6e6f73696e;  // "nisono01" read as text
};
static_assert(sizeof(FrameHeader) == 48);

// One kind of frame that a reader takes, and the longest payload it may have.
struct FrameLimit {
  FrameKind kind;
  uint64_t longest;
};

inline constexpr uint64_t kLongestText = 4096;
inline constexpr uint64_t kLongestName = 256;
inline constexpr uint64_t kLongestMessage = uint64_t{1} << 20;
inline constexpr uint64_t kLongestQuestion = 256;
inline constexpr uint64_t kLongestCollective = uint64_t{1} << 28;

struct Frame {
  FrameHeader header;
  std::vector<std::byte> payload;

  std::string text() const {
    return {reinterpret_cast<const char*>(payload.data()), payload.size()};
  }
};

// What a rank tells the root. Other versions of the library may append to it, but the first two
// members are those of every version.
struct Announcement {
  uint32_t ranks = 0;
  uint32_t version = kProtocolVersion;
  Address listener;
  std::array<char, 96> process = {};  // names it, NUL-terminated
  // The number of unique ids, which of them is that of this root, and a hash of all.
  uint32_t roots = 1;
  uint32_t root = 0;
  uint64_t ids = 0;
};
static_assert(sizeof(Announcement) == 144);
inline constexpr size_t kMaxAnnouncement = 256;

// What the root tells a rank of one that is next to it in RankTree.
struct Neighbour {
  uint32_t rank = 0;
  Address listener;
};
static_assert(sizeof(Neighbour) == 28);
inline constexpr size_t kMaxNeighbours = 64;

std::vector<std::byte> encodeFrame(FrameHeader header, std::span<const std::byte> payload);

// Assembles frames from a connection piece by piece. Everything in a header is checked before a
// byte of payload is asked for or memory is reserved.
class FrameReader {
 public:
  enum class Status { incomplete, complete, closed };

  // Accepts only frames of the kinds in `limits`, with `secret` unless the kind carries none.
  FrameReader(const Secret& secret, std::vector<FrameLimit> limits)
      : secret_(secret), limits_(std::move(limits)) {}
  // From now on only the first half of the secret counts: frames may be of any communicator of the
  // family.
  void acceptFamily() { acceptsFamily_ = true; }

  // Reads what has arrived, at most to the end of one frame; after `complete`, take() has it.
  // Throws Error(remoteError) when what arrives is not such a frame or ends in the middle of one,
  // and Error(invalidUsage) when only its secret is wrong.
  Status read(const Socket& socket);
  FrameKind kind() const { return frame_.header.kind; }
  Frame take();

 private:
  void checkHeader() const;

  Secret secret_;
  bool acceptsFamily_ = false;
  std::vector<FrameLimit> limits_;
  Frame frame_;
  size_t headerBytes_ = 0;
  size_t payloadBytes_ = 0;
};

}  // namespace unisono::bootstrap
