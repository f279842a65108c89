// SPDX-License-Identifier: Apache-2.0
#include "tuning/choice.h"

#include <gtest/gtest.h>

#include <string>

#include "base/error.h"

namespace unisono::tuning {
namespace {

std::string allowed(std::string_view text) {
  const AllowedAlgorithms result = parseAlgorithms(text);
  return std::string(result[Algorithm::ring] ? "ring " : "") +
         (result[Algorithm::oneShot] ? "direct " : "");
}

TEST(Choice, ParsesAlgorithms) {
  EXPECT_EQ(allowed(""), "ring direct ");
  EXPECT_EQ(allowed("ring"), "ring ");
  EXPECT_EQ(allowed("Direct"), "direct ");
  EXPECT_EQ(allowed("RING,direct"), "ring direct ");
  EXPECT_EQ(allowed("^direct"), "ring ");
  EXPECT_EQ(allowed("^ring,direct"), "");
}

TEST(Choice, ParsesAlgorithmsOfOneCollective) {
  EXPECT_EQ(allowed("allreduce:ring"), "ring ");
  EXPECT_EQ(allowed("AllReduce:^Direct"), "ring ");
  EXPECT_EQ(allowed("broadcast:tree"), "ring direct ");
  EXPECT_EQ(allowed("allreduce:ring,tree;broadcast:ring"), "ring ");
  EXPECT_EQ(allowed("ring;allreduce:direct"), "direct ");
  EXPECT_EQ(allowed("allreduce:ring;reduce:direct;allgather:nvls"), "ring ");
}

// As NCCL, which splits with strtok.
TEST(Choice, SkipsEmptyNames) {
  EXPECT_EQ(allowed("ring,"), "ring ");
  EXPECT_EQ(allowed(",,ring"), "ring ");
  EXPECT_EQ(allowed("^"), "ring direct ");
  EXPECT_EQ(allowed(";"), "ring direct ");
}

template <typename Parse>
void expectRefused(Parse parse, const char* text, const char* part) {
  try {
    parse(text);
    ADD_FAILURE() << text << " was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalidUsage);
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(Choice, RefusesUnknownAlgorithms) {
  for (const char* text : {"fast", "ring direct", "^^ring", "ring,fast", "allreduce:fast",
                           "broadcast:fast", "allreduce:ring:direct"}) {
    expectRefused(parseAlgorithms, text, "Use ring, direct, tree");
  }
  expectRefused(parseAlgorithms, "alltoall:ring", "not a collective");
  expectRefused(parseAlgorithms, "allreduce:ring;direct", "without a collective");
}

TEST(Choice, ChecksProtocols) {
  for (const char* text : {"", "LL", "ll128,SIMPLE", "^LL128", "allreduce:LL;reduce:^simple"}) {
    EXPECT_NO_THROW(checkProtocols(text)) << text;
  }
  expectRefused(checkProtocols, "LL256", "Use ll, ll128, simple");
  expectRefused(checkProtocols, "ring", "NCCL_PROTO=ring");
}

TEST(Choice, SmallAllReducesGoDirectWhereAllowed) {
  TuningInput tuningInput;
  tuningInput.ranks = 4;
  tuningInput.oneShotMaxBytes = 1024;
  EXPECT_EQ(chooseAllReduce(tuningInput, 1), Algorithm::oneShot);
  EXPECT_EQ(chooseAllReduce(tuningInput, 1024), Algorithm::oneShot);
  EXPECT_EQ(chooseAllReduce(tuningInput, 1025), Algorithm::ring);
  tuningInput.allowed = parseAlgorithms("ring");
  EXPECT_EQ(chooseAllReduce(tuningInput, 1), Algorithm::ring);
  tuningInput.allowed = {};
  tuningInput.oneShotMaxBytes = 0;
  EXPECT_EQ(chooseAllReduce(tuningInput, 1), Algorithm::ring);
}

TEST(Choice, ChannelsGrowWithTheBytes) {
  TuningInput tuningInput;
  tuningInput.channels = 16;
  tuningInput.minBytesPerChannel = 1000;
  EXPECT_EQ(chooseChannels(tuningInput, 0), 1);
  EXPECT_EQ(chooseChannels(tuningInput, 1999), 1);
  EXPECT_EQ(chooseChannels(tuningInput, 2000), 2);
  EXPECT_EQ(chooseChannels(tuningInput, 16'000), 16);
  EXPECT_EQ(chooseChannels(tuningInput, ~size_t{0}), 16);
}

}  // namespace
}  // namespace unisono::tuning
