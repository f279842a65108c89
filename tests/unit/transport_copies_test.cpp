// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "support/seed.h"
#include "transport/mapped/copied_fifos.h"
#include "transport_testing.h"

namespace unisono::transport {
namespace {

using namespace std::chrono_literals;

// A FIFO of protocol Simple whose ends this thread plays.
class PlayedFifo {
 public:
  PlayedFifo() : memory_(runtime::Runtime::get(), {{kSlotBytes}}, kSlots) {}
  StreamMemory memory() const { return memory_.streamOf(0); }
  uint64_t tail() const { return std::atomic_ref(*memory().tail).load(std::memory_order_acquire); }
  uint64_t head() const { return std::atomic_ref(*memory().head).load(std::memory_order_acquire); }
  uint64_t filled() const { return filled_; }
  uint64_t taken() const { return taken_; }

  bool put(const std::vector<std::byte>& data) {
    if (head() + kSlots <= filled_) return false;
    std::ranges::copy(data, memory().slot(filled_));
    uint64_t* report = memory().tail + device::kReportsWord + filled_ % kSlots;
    std::atomic_ref(*report).store(data.size(), std::memory_order_relaxed);
    std::atomic_ref(*memory().tail).store(++filled_, std::memory_order_release);
    return true;
  }
  // With the size that its report has.
  bool take(std::vector<std::byte>& data) {
    if (tail() <= taken_) return false;
    uint64_t* report = memory().tail + device::kReportsWord + taken_ % kSlots;
    data.resize(device::unpackReport(std::atomic_ref(*report).load()).bytes);
    std::copy_n(memory().slot(taken_), data.size(), data.begin());
    std::atomic_ref(*memory().head).store(++taken_, std::memory_order_release);
    return true;
  }

 private:
  const FifoMemory memory_;
  uint64_t filled_ = 0, taken_ = 0;
};

class Copies : public ::testing::Test {
 protected:
  // A test may end before slots that nobody takes are copied.
  ~Copies() override { runtime_.synchronize(stream_.get()); }

  std::unique_ptr<CopyStream> connect(bool sends = true) {
    return std::make_unique<CopyStream>(runtime_, 0, stream_.get(), from_.memory(), to_.memory(),
                                        sends);
  }
  // Until the copies that have begun have ended.
  void settle(CopyStream& stream) {
    while (stream.progress().moved ||
           stream.steps() < std::min(from_.filled(), to_.taken() + kSlots)) {
      std::this_thread::yield();
      ASSERT_EQ(stream.failure(), "");
    }
  }

  runtime::Runtime& runtime_ = runtime::Runtime::get();
  const std::shared_ptr<void> stream_ = runtime_.createUrgentStream(0);
  PlayedFifo from_, to_;
};

TEST_F(Copies, MoveSlotsOfAnySizeInOrder) {
  std::mt19937 random(test::seed());
  const auto copies = connect();
  std::vector<std::vector<std::byte>> sent;
  while (to_.taken() < 1000) {
    std::vector<std::byte> data(random() % 4 == 0 ? 0 : random() % (kSlotBytes + 1));
    for (std::byte& byte : data) byte = static_cast<std::byte>(random());
    if (random() % 2 == 0 && from_.put(data)) sent.push_back(std::move(data));
    if (random() % 2 == 0) copies->progress();
    const uint64_t step = to_.taken();
    std::vector<std::byte> got;
    if (random() % 2 == 0 && to_.take(got)) {
      ASSERT_EQ(got, sent.at(step)) << "slot " << step;
    }
    ASSERT_LE(from_.head(), to_.tail());  // a slot may be filled again only once it is copied
    ASSERT_EQ(copies->failure(), "");
  }
}

TEST_F(Copies, WaitForRoom) {
  const auto copies = connect();
  for (uint32_t i = 0; i < kSlots; i++) ASSERT_TRUE(from_.put(std::vector<std::byte>(i)));
  settle(*copies);
  ASSERT_TRUE(from_.put(std::vector<std::byte>(kSlots)));
  settle(*copies);
  EXPECT_EQ(to_.tail(), kSlots);
  EXPECT_EQ(from_.head(), kSlots);
  EXPECT_TRUE(copies->isPending());
  EXPECT_TRUE(copies->progress().mustLook);  // nothing tells when there is room
  std::vector<std::byte> got;
  for (uint32_t i = 0; i <= kSlots; i++) {
    ASSERT_TRUE(to_.take(got));
    EXPECT_EQ(got.size(), i);
    settle(*copies);
  }
  EXPECT_FALSE(copies->isPending());
  EXPECT_FALSE(copies->progress().mustLook);
}

// What a receiver has not asked for keeps nobody waiting.
TEST_F(Copies, OfReceiversAreNeverPending) {
  const auto copies = connect(false);
  ASSERT_TRUE(from_.put(std::vector<std::byte>(10)));
  EXPECT_FALSE(copies->isPending());
}

// The size comes from memory that the peer can write to.
TEST_F(Copies, StayInsideTheSlot) {
  const auto copies = connect();
  ASSERT_TRUE(from_.put({}));
  uint64_t* report = from_.memory().tail + device::kReportsWord;
  std::atomic_ref(*report).store(uint64_t{kSlotBytes} * 2);
  to_.memory().slot(1)[0] = std::byte{7};
  settle(*copies);
  EXPECT_EQ(to_.tail(), 1u);
  EXPECT_EQ(to_.memory().slot(1)[0], std::byte{7});
}

TEST_F(Copies, NameWhatFailed) {
  StreamMemory broken = to_.memory();
  broken.slots = nullptr;
  Proxy& proxy = Proxy::ofDevice(4);
  std::atomic<bool> hasFailed = false;
  std::string text;
  const uint64_t client = proxy.add({[] { return false; },
                                     [&](const Error& error) {
                                       EXPECT_EQ(error.code(), ErrorCode::unhandledCudaError);
                                       text = error.what();
                                       hasFailed = true;
                                     }});
  proxy.addStream(
      client,
      std::make_unique<CopyStream>(runtime_, 0, stream_.get(), from_.memory(), broken, true),
      CopiedFifos::placeOf(3, 5, true));
  ASSERT_TRUE(from_.put(std::vector<std::byte>(10)));
  const auto start = std::chrono::steady_clock::now();
  while (!hasFailed) std::this_thread::sleep_for(1ms);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 900ms);  // waits for no other news
  EXPECT_TRUE(proxy.isDrained(client));
  proxy.remove(client);
  EXPECT_NE(text.find("copy by a copy engine into host memory failed: "), std::string::npos)
      << text;
  EXPECT_NE(text.find("null address"), std::string::npos) << text;
  EXPECT_NE(text.find("[rank 3, peer 5]"), std::string::npos) << text;
  EXPECT_NE(text.find("NCCL_SHM_USE_CUDA_MEMCPY=0"), std::string::npos) << text;
}

}  // namespace
}  // namespace unisono::transport
