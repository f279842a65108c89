// SPDX-License-Identifier: Apache-2.0
// The key file that protects NCCL_COMM_ID.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <latch>

#include "bootstrap/comm_key.h"
#include "bootstrap_testing.h"

namespace unisono::bootstrap {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class KeyFile {
 public:
  explicit KeyFile(const std::string& content, mode_t mode = 0600)
      : path_(testing::TempDir() + fmt::format("unisono_key_{}_{}", ::getpid(), made_++)) {
    std::ofstream(path_) << content;
    ::chmod(path_.c_str(), mode);
  }
  ~KeyFile() { ::unlink(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  inline static int made_ = 0;
  std::string path_;
};

std::string refusalOf(const std::string& path) {
  try {
    readCommKey(path);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalidArgument);
    return error.what();
  }
  return "taken";
}

// From the paper's appendix and the authors' list of test vectors: key 00 01 ... 0f, message
// 00 01 ... of each length.
TEST(CommKey, SipHashOfTheAuthorsTestVectors) {
  std::array<std::byte, 16> key;
  std::vector<std::byte> message;
  for (size_t i = 0; i < key.size(); i++) key[i] = static_cast<std::byte>(i);
  EXPECT_EQ(sipHash(key, message), 0x726fdb47dd0e0e31u);
  for (size_t i = 0; i < 15; i++) message.push_back(static_cast<std::byte>(i));
  EXPECT_EQ(sipHash(key, std::span(message).first(8)), 0x93f5f5799a932462u);
  EXPECT_EQ(sipHash(key, message), 0xa129ca6149be45e5u);
}

TEST(CommKey, FileMustBeLongAndPrivate) {
  const std::string good(16, 'k');
  EXPECT_EQ(refusalOf(KeyFile(good).path()), "taken");
  EXPECT_EQ(refusalOf(KeyFile(std::string(4096, 'k'), 0400).path()), "taken");
  EXPECT_THAT(refusalOf(KeyFile("").path()), AllOf(HasSubstr("0 bytes"), HasSubstr("chmod 600")));
  EXPECT_THAT(refusalOf(KeyFile(std::string(15, 'k')).path()), HasSubstr("15 bytes"));
  EXPECT_THAT(refusalOf(KeyFile(std::string(4097, 'k')).path()), HasSubstr("too many"));
  EXPECT_THAT(refusalOf(KeyFile(good, 0640).path()), HasSubstr("other users"));
  EXPECT_THAT(refusalOf(KeyFile(good, 0604).path()), HasSubstr("other users"));
  EXPECT_THAT(
      refusalOf("/nonexistent/key"),
      AllOf(HasSubstr("UNISONO_COMM_KEY_FILE=/nonexistent/key"), HasSubstr("No such file")));
  EXPECT_THAT(refusalOf("/dev/zero"), HasSubstr("regular file"));
}

TEST(CommKey, SecretDependsOnAllOfKeyAndAddress) {
  const std::string base = "0123456789abcdefXYZ";
  auto secretOf = [](const std::string& key, std::string_view text) {
    return secretFromKey(std::as_bytes(std::span(key)), text);
  };
  const Secret secret = secretOf(base, "host:1");
  EXPECT_EQ(secretOf(base, "host:1"), secret);
  EXPECT_NE(secret[0], secret[1]);
  for (size_t i = 0; i < base.size(); i++) {
    std::string other = base;
    other[i] ^= 1;
    const Secret changed = secretOf(other, "host:1");
    EXPECT_NE(changed[0], secret[0]) << i;
    EXPECT_NE(changed[1], secret[1]) << i;
  }
  EXPECT_NE(secretOf(base, "host:2"), secret);
  EXPECT_NE(secretOf(base + "h", "ost:1"), secret);
}

// One that knows NCCL_COMM_ID but not the key is told so at once, and the job goes on.
TEST(CommKey, RankWithAnotherKeyIsRefusedAndTheJobIsUnharmed) {
  const KeyFile right(std::string(32, 'r')), wrong(std::string(32, 'w'));
  Settings settings = localSettings();
  {
    const std::function<bool()> never;
    const Listener probe(Address{AddressFamily::ipv4, 0, 0, {127, 0, 0, 1}},
                         Wait(std::chrono::seconds(1), never));
    settings.commId = probe.address().text();  // a free port
  }
  constexpr int kStranger = 99;
  std::latch refused(1);
  const auto errors = runThreads({0, 1, kStranger}, [&](int number) {
    Settings mine = settings;
    mine.commKeyFile = (number == kStranger ? wrong : right).path();
    const int rank = number == kStranger ? 1 : number;
    if (number == 1) refused.wait();
    try {
      Bootstrap::connect(createUniqueId(mine), rank, 2, mine)->barrier();
    } catch (const Error&) {
      if (number == kStranger) refused.count_down();
      throw;
    }
  });
  expectNoErrors({errors[0], errors[1]});
  EXPECT_EQ(errorOf(errors[2]).code(), ErrorCode::invalidUsage);
  EXPECT_THAT(errorOf(errors[2]).what(),
              AllOf(HasSubstr("secrets differ"), HasSubstr("UNISONO_COMM_KEY_FILE")));
}

}  // namespace
}  // namespace unisono::bootstrap
