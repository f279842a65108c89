// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "plugin/collnet.h"
#include "plugin/net.h"
#include "support/fake_net.h"
#include "support/seed.h"
#include "transport/net/collnet_stream.h"
#include "transport/net/fifo_memory.h"
#include "transport_testing.h"

namespace unisono::transport {
namespace {

// A head of two nodes: the FIFOs to the network and back, of which the test is the kernel. Results
// are in memory of a GPU, as far as the plug-in knows, and only there after a flush.
class Head {
 public:
  Head(std::shared_ptr<const plugin::CollNet> collNet, void* connection)
      : memory_(runtime::Runtime::get(),
                {{kSlotBytes, device::Protocol::simple}, {kSlotBytes, device::Protocol::simple}},
                kSlots) {
    const auto made =
        std::make_shared<const CollNetConnection>(std::move(collNet), connection, 0, 2);
    stream_ = std::make_unique<CollNetStream>(made, slots(made, 0, plugin::kHostMemory),
                                              slots(made, 1, plugin::kDeviceMemory), true);
  }

  bool hasRoom() const { return load(out().head) + kSlots > sent_; }
  void put(const std::vector<int32_t>& data) {
    const size_t bytes = data.size() * sizeof(int32_t);
    std::memcpy(out().slot(sent_), data.data(), bytes);
    const device::SlotReport report{static_cast<uint32_t>(bytes), device::Operation::allReduce,
                                    device::DataType::int32, device::Reduction::sum};
    std::atomic_ref(out().tail[device::kReportsWord + sent_ % kSlots])
        .store(device::packReport(report));
    std::atomic_ref(*out().tail).store(++sent_, std::memory_order_release);
  }
  // The results that have arrived and were not taken.
  uint64_t arrived() const { return load(back().tail) - taken_; }
  std::vector<int32_t> take(size_t count) {
    std::vector<int32_t> data(count);
    std::memcpy(data.data(), back().slot(taken_), count * sizeof(int32_t));
    std::atomic_ref(*back().head).store(++taken_, std::memory_order_release);
    return data;
  }
  CollNetStream& stream() { return *stream_; }

 private:
  static uint64_t load(uint64_t* word) {
    return std::atomic_ref(*word).load(std::memory_order_acquire);
  }
  StreamMemory out() const { return memory_.streamOf(0); }
  StreamMemory back() const { return memory_.streamOf(1); }
  CollNetStream::Slots slots(const std::shared_ptr<const CollNetConnection>& connection,
                             size_t fifo, int type) const {
    const StreamMemory memory = memory_.streamOf(fifo);
    void* region = nullptr;
    EXPECT_EQ(connection->collNet->functions().registerMemory(connection->handle, memory.slots,
                                                              memory.bytes(), type, &region),
              plugin::kSuccess);
    return {memory, makeRegion(connection, region)};
  }

  const FifoMemory memory_;
  std::unique_ptr<CollNetStream> stream_;
  uint64_t sent_ = 0, taken_ = 0;
};

class CollNetStreams : public ::testing::Test {
 protected:
  CollNetStreams() : random_(test::seed()) {
    ::setenv("FAKE_NET_POINTERS", "3", 1);
    ::setenv("FAKE_NET_LATE", "1", 1);
    net_ = plugin::Net::open(testing::fakeNetPath(11), "", {77, -1});
    const auto collNet = plugin::CollNet::open(*net_);
    const plugin::CollNetFunctions& functions = collNet->functions();
    std::array<plugin::NetHandle, 2> handles;
    std::array<void*, 2> listeners{}, connections{};
    for (size_t rank = 0; rank < 2; rank++) {
      EXPECT_EQ(functions.listen(collNet->context(), 0, handles[rank], &listeners[rank]),
                plugin::kSuccess);
    }
    // They wait for each other.
    const auto connect = [&](size_t rank) {
      EXPECT_EQ(
          functions.connect(handles, static_cast<int>(rank), listeners[rank], &connections[rank]),
          plugin::kSuccess);
    };
    std::thread first(connect, 0);
    connect(1);
    first.join();
    for (size_t rank = 0; rank < 2; rank++) {
      functions.closeListener(listeners[rank]);
      heads_.push_back(std::make_unique<Head>(collNet, connections[rank]));
    }
  }
  ~CollNetStreams() override {
    heads_.clear();
    ::unsetenv("FAKE_NET_POINTERS");
    ::unsetenv("FAKE_NET_LATE");
  }
  std::vector<int32_t> randomData(size_t count) {
    std::vector<int32_t> data(count);
    for (int32_t& value : data) value = static_cast<int32_t>(random_() % 1'000'000);
    return data;
  }
  void progress() {
    for (const auto& head : heads_) {
      head->stream().progress();
      ASSERT_EQ(head->stream().failure(), "");
    }
  }

  std::mt19937 random_;
  std::shared_ptr<const plugin::Net> net_;
  std::vector<std::unique_ptr<Head>> heads_;
};

TEST_F(CollNetStreams, FlushResultsInMemoryOfAGpu) {
  for (int i = 0; i < 100; i++) {
    const size_t count = 1 + random_() % (kSlotBytes / sizeof(int32_t));
    std::vector<int32_t> sum = randomData(count);
    heads_[0]->put(sum);
    const std::vector<int32_t> other = randomData(count);
    heads_[1]->put(other);
    for (size_t j = 0; j < count; j++) sum[j] += other[j];
    while (heads_[0]->arrived() == 0 || heads_[1]->arrived() == 0) progress();
    for (const auto& head : heads_) ASSERT_EQ(head->take(count), sum) << "slot " << i;
  }
}

// The kernel of one head takes no results until all slots have one.
TEST_F(CollNetStreams, KeepResultsThatWereNotTaken) {
  std::vector<std::vector<int32_t>> sums;
  for (uint32_t i = 0; i < 3 * kSlots; i++) {
    while (!heads_[0]->hasRoom() || !heads_[1]->hasRoom()) {
      progress();
      if (heads_[1]->arrived() > 0) heads_[1]->take(1);
      if (heads_[0]->arrived() < kSlots) continue;
      for (int look = 0; look < 1000; look++) progress();  // what the other one has sent arrives
      for (; heads_[0]->arrived() > 0; sums.erase(sums.begin())) {
        ASSERT_EQ(heads_[0]->take(sums.front().size()), sums.front());
      }
    }
    sums.push_back(randomData(1 + random_() % 100));
    heads_[0]->put(sums.back());
    heads_[1]->put(std::vector<int32_t>(sums.back().size()));
  }
}

}  // namespace
}  // namespace unisono::transport
