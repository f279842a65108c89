// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>

#include "base/error.h"
#include "comm/health.h"
#include "runtime/host/host_runtime.h"

// Which of several errors a communicator names.
namespace unisono::comm {
namespace {

runtime::Runtime& hostRuntime() {
  static runtime::host::HostRuntime runtime([] {
    Settings settings;
    settings.backend = "host";
    settings.hostDevices = 1;
    return settings;
  }());
  return runtime;
}

class FailingHealth : public testing::Test {
 protected:
  FailingHealth() { health_->start("communicator of the test", 3, std::chrono::seconds(0), {}); }
  std::string named() const {
    const std::optional<Error> error = health_->error();
    return error ? error->what() : "";
  }
  static Error own() { return {ErrorCode::remoteError, "The connection failed"}; }
  static Error death() { return {ErrorCode::remoteError, "Rank 0 has died"}; }

  const std::shared_ptr<Health> health_ = std::make_shared<Health>(hostRuntime(), 0);
};

TEST_F(FailingHealth, NamesTheFirstError) {
  health_->peerFailed(death());
  EXPECT_EQ(health_->reserve(own()).what(), std::string("Rank 0 has died"));
  EXPECT_EQ(health_->fail(own()).what(), std::string("Rank 0 has died"));
  EXPECT_EQ(named(), "Rank 0 has died");
}

// Rank 0 is told of an error and aborts before the rank that tells it has recorded the error.
TEST_F(FailingHealth, NamesTheCauseOfADeath) {
  health_->reserve(own());
  EXPECT_FALSE(health_->hasFailed());
  health_->peerFailed(death());
  EXPECT_EQ(named(), "The connection failed");
  EXPECT_EQ(health_->fail(own()).what(), std::string("The connection failed"));
}

// The same where nothing was in progress on rank 0.
TEST_F(FailingHealth, NamesTheCauseOfADeparture) {
  health_->begin({.collectives = 1, .messages = {}});
  health_->reserve(own());
  health_->peerLeft({.rank = 0, .counts = {0, 0, 0}, .text = "Rank 0 was aborted"});
  EXPECT_EQ(named(), "The connection failed");
}

}  // namespace
}  // namespace unisono::comm
