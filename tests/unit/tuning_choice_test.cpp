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

TEST(Choice, RefusesWhatIsNoAlgorithm) {
  for (const char* text : {"fast", "ring,", ",ring", "^", "ring direct", "^^ring"}) {
    try {
      parseAlgorithms(text);
      ADD_FAILURE() << text << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalidArgument);
      EXPECT_NE(std::string(error.what()).find("ring and direct"), std::string::npos);
    }
  }
}

TEST(Choice, SmallAllReducesGoDirectWhereAllowed) {
  Situation situation;
  situation.ranks = 4;
  situation.oneShotMaxBytes = 1024;
  EXPECT_EQ(chooseAllReduce(situation, 1), Algorithm::oneShot);
  EXPECT_EQ(chooseAllReduce(situation, 1024), Algorithm::oneShot);
  EXPECT_EQ(chooseAllReduce(situation, 1025), Algorithm::ring);
  situation.allowed = parseAlgorithms("ring");
  EXPECT_EQ(chooseAllReduce(situation, 1), Algorithm::ring);
  situation.allowed = {};
  situation.oneShotMaxBytes = 0;
  EXPECT_EQ(chooseAllReduce(situation, 1), Algorithm::ring);
}

TEST(Choice, ChannelsGrowWithTheBytes) {
  Situation situation;
  situation.channels = 16;
  situation.minBytesPerChannel = 1000;
  EXPECT_EQ(chooseChannels(situation, 0), 1);
  EXPECT_EQ(chooseChannels(situation, 1999), 1);
  EXPECT_EQ(chooseChannels(situation, 2000), 2);
  EXPECT_EQ(chooseChannels(situation, 16'000), 16);
  EXPECT_EQ(chooseChannels(situation, ~size_t{0}), 16);
}

}  // namespace
}  // namespace unisono::tuning
