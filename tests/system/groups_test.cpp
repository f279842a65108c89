// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <memory>
#include <random>
#include <thread>

#include "collective_case.h"

// Groups: nested, mixed, over several communicators and streams, by one thread and by many.
namespace unisono::system_test {
namespace {

using bench::ElementType;

// `calls` on every rank of `ranks`, in one group on rank-dependent streams.
struct Batch {
  std::vector<Case> calls;
  std::vector<std::unique_ptr<CaseBuffers>> buffers;  // [call * ranks + rank]

  Batch(std::vector<Case> list, int ranks) : calls(std::move(list)) {
    for (const Case& call : calls) {
      for (int rank = 0; rank < ranks; rank++) {
        buffers.push_back(std::make_unique<CaseBuffers>(call, rank, ranks, rank));
      }
    }
  }
  CaseBuffers& of(size_t call, int rank, int ranks) {
    return *buffers[call * static_cast<size_t>(ranks) + static_cast<size_t>(rank)];
  }
  void verify() const {
    for (const auto& buffer : buffers) EXPECT_NO_THROW(buffer->verify());
  }
};

std::vector<Case> randomCalls(std::mt19937& random, int count, int ranks, size_t most) {
  std::vector<Case> calls;
  for (int i = 0; i < count; i++) {
    Case call;
    call.call = kCalls[random() % std::size(kCalls)];
    call.type = static_cast<ElementType>(random() % bench::kElementTypes);
    call.op = kOperators[random() % std::size(kOperators)];
    call.inPlace = canBeInPlace(call.call) && random() % 2 == 0;
    // Sizes of every order of magnitude.
    call.count = random() % (most >> random() % 12);
    call.root = static_cast<int>(random() % static_cast<unsigned>(ranks));
    call.offsetElements = random() % 3;
    calls.push_back(call);
  }
  return calls;
}

class Groups : public ::testing::TestWithParam<int> {};

// Any calls in any order in one group, nested as it comes.
TEST_P(Groups, RandomMixesOfOneThread) {
  const int n = GetParam();
  const Ranks ranks(n);
  for (unsigned seed = 0; seed < static_cast<unsigned>(scaled(40, 6)); seed++) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    Batch batch(randomCalls(random, 1 + static_cast<int>(random() % 60), n, 20'000), n);
    const bool ranksOutside = random() % 2 == 0;
    check(ncclGroupStart());
    const size_t calls = batch.calls.size(), all = calls * static_cast<size_t>(n);
    for (size_t i = 0; i < all; i++) {
      const size_t call = ranksOutside ? i % calls : i / static_cast<size_t>(n);
      const int rank = static_cast<int>(ranksOutside ? i / calls : i % static_cast<size_t>(n));
      const bool nested = i % 3 == 0;
      if (nested) check(ncclGroupStart());
      EXPECT_OK(batch.of(call, rank, n).enqueue(ranks.comm(rank), ranks.stream(rank)));
      if (nested) check(ncclGroupEnd());
    }
    ASSERT_OK(ncclGroupEnd());
    ranks.synchronize();
    batch.verify();
    if (HasFailure()) return;
  }
}

// Each rank on a thread, without groups and with some.
TEST_P(Groups, RandomMixesOfThreads) {
  const int n = GetParam();
  const ncclUniqueId id = newId();
  std::vector<std::unique_ptr<Batch>> batches;
  std::mt19937 random(4711);
  for (int i = 0; i < scaled(12, 4); i++) {
    batches.push_back(std::make_unique<Batch>(randomCalls(random, 12, n, 30'000), n));
  }
  onThreads(n, [&](int rank) {
    Member member(id, rank, n);
    DeviceStream stream(rank);
    for (size_t b = 0; b < batches.size(); b++) {
      if (b % 2 == 0) check(ncclGroupStart());
      for (size_t call = 0; call < batches[b]->calls.size(); call++) {
        check(batches[b]->of(call, rank, n).enqueue(member.comm, stream));
      }
      if (b % 2 == 0) check(ncclGroupEnd());
      if (b % 3 == 0) stream.synchronize();
    }
    stream.synchronize();
    for (const auto& batch : batches) {
      for (size_t call = 0; call < batch->calls.size(); call++) batch->of(call, rank, n).verify();
    }
  });
}

// Every rank sends several messages of its own sizes to every other rank and to itself, in an order
// of its own: only the order between two ranks counts.
TEST_P(Groups, SendsAndReceivesInAnyOrder) {
  const int n = GetParam();
  const Ranks ranks(n);
  constexpr int kEach = 3;
  for (unsigned seed = 0; seed < static_cast<unsigned>(scaled(15, 3)); seed++) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    auto bytesOf = [seed](int from, int to, int k) {
      std::mt19937 random(seed * 1000003 + static_cast<unsigned>((from * 64 + to) * 8 + k));
      // Nothing, small, over the FIFO, and enough for a direct transfer.
      static constexpr size_t kSizes[] = {0, 1, 100, 5000, 70'000, 300'000, 700'001};
      return kSizes[random() % std::size(kSizes)];
    };
    auto byteOf = [](int from, int to, int k, size_t i) {
      return static_cast<unsigned char>(static_cast<size_t>(from * 31 + to * 7 + k) + i * 13);
    };
    struct Message {
      int from, to, k;
      DeviceBuffer buffer;
    };
    std::vector<std::vector<Message>> sends(static_cast<size_t>(n)),
        receives(static_cast<size_t>(n));
    for (int from = 0; from < n; from++) {
      for (int to = 0; to < n; to++) {
        for (int k = 0; k < kEach; k++) {
          const size_t bytes = bytesOf(from, to, k);
          sends[static_cast<size_t>(from)].push_back({from, to, k, DeviceBuffer(from, bytes + 1)});
          auto* data = sends[static_cast<size_t>(from)].back().buffer.as<unsigned char>();
          for (size_t i = 0; i < bytes; i++) data[i] = byteOf(from, to, k, i);
          receives[static_cast<size_t>(to)].push_back({from, to, k, DeviceBuffer(to, bytes + 1)});
        }
      }
    }
    std::mt19937 random(seed);
    ranks.inGroup([&](int rank) {
      auto& out = sends[static_cast<size_t>(rank)];
      auto& in = receives[static_cast<size_t>(rank)];
      std::shuffle(out.begin(), out.end(), random);
      std::shuffle(in.begin(), in.end(), random);
      auto byPair = [](auto& list) {
        // The k-th message between two ranks stays the k-th.
        for (Message& message : list) {
          for (Message& other : list) {
            if (&other > &message && other.from == message.from && other.to == message.to &&
                other.k < message.k) {
              std::swap(message, other);
            }
          }
        }
      };
      byPair(out);
      byPair(in);
      for (size_t i = 0; i < out.size(); i++) {
        const Message& s = out[i];
        const Message& r = in[i];
        EXPECT_OK(ncclSend(s.buffer.as(), bytesOf(s.from, s.to, s.k), ncclInt8, s.to,
                           ranks.comm(rank), ranks.stream(rank)));
        EXPECT_OK(ncclRecv(r.buffer.as(), bytesOf(r.from, r.to, r.k), ncclInt8, r.from,
                           ranks.comm(rank), ranks.stream(rank)));
      }
    });
    ranks.synchronize();
    for (const auto& list : receives) {
      for (const Message& m : list) {
        const auto* data = m.buffer.as<unsigned char>();
        const size_t bytes = bytesOf(m.from, m.to, m.k);
        size_t wrong = data[bytes] == 0 ? 0 : 1;
        for (size_t i = 0; i < bytes; i++) wrong += data[i] != byteOf(m.from, m.to, m.k, i);
        ASSERT_EQ(wrong, 0u) << m.from << " to " << m.to << ", message " << m.k << " of " << bytes;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Groups, ::testing::ValuesIn(numbersOfRanks()));

// Two communicators over the same devices, in opposite orders of ranks, in one group.
TEST(GroupsOfSeveral, Communicators) {
  constexpr int kRanks = 4;
  const int backwards[] = {3, 2, 1, 0};
  ncclComm_t first[kRanks], second[kRanks];
  ASSERT_OK(ncclCommInitAll(first, kRanks, nullptr));
  ASSERT_OK(ncclCommInitAll(second, kRanks, backwards));
  std::vector<DeviceStream> streams;
  for (int device = 0; device < kRanks; device++) streams.emplace_back(device);
  std::mt19937 random(99);
  for (int round = 0; round < scaled(20, 5); round++) {
    const std::vector<Case> calls = randomCalls(random, 8, kRanks, 10'000);
    std::vector<std::unique_ptr<CaseBuffers>> buffers;
    check(ncclGroupStart());
    for (size_t i = 0; i < calls.size(); i++) {
      for (int rank = 0; rank < kRanks; rank++) {
        const bool reversed = (i + static_cast<size_t>(round)) % 2 == 0;
        const int device = reversed ? backwards[rank] : rank;
        buffers.push_back(std::make_unique<CaseBuffers>(calls[i], rank, kRanks, device));
        EXPECT_OK(buffers.back()->enqueue(reversed ? second[rank] : first[rank],
                                          streams[static_cast<size_t>(device)]));
      }
    }
    ASSERT_OK(ncclGroupEnd());
    for (const DeviceStream& stream : streams) stream.synchronize();
    for (const auto& buffer : buffers) EXPECT_NO_THROW(buffer->verify());
  }
  for (ncclComm_t comm : first) EXPECT_OK(ncclCommDestroy(comm));
  for (ncclComm_t comm : second) EXPECT_OK(ncclCommDestroy(comm));
}

// Two communicators of devices 0 and 1, of which the second rank of the first one is gone.
class GroupsThatFail : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(ncclCommInitAll(broken_, 2, nullptr));
    ASSERT_OK(ncclCommInitAll(whole_, 2, nullptr));
    EXPECT_OK(ncclCommDestroy(broken_[1]));
  }
  void TearDown() override {
    for (ncclComm_t comm : {broken_[0], whole_[0], whole_[1]}) EXPECT_OK(ncclCommDestroy(comm));
  }
  ncclResult_t sum(ncclComm_t comm) {
    return ncclAllReduce(buffer_.as(), buffer_.as(), 4, ncclInt, ncclSum, comm, stream_);
  }
  ncclResult_t sumOfBoth() {
    check(ncclGroupStart());
    EXPECT_OK(sum(broken_[0]));
    EXPECT_OK(sum(whole_[0]));
    return ncclGroupEnd();
  }
  static ncclResult_t stateOf(ncclComm_t comm) {
    ncclResult_t state = ncclSuccess;
    check(ncclCommGetAsyncError(comm, &state));
    return state;
  }

  ncclComm_t broken_[2], whole_[2];
  DeviceBuffer buffer_{0, 64};
  DeviceStream stream_{0};
};

// The peer of the other communicator may have launched its call: the next one here would be matched
// with it.
TEST_F(GroupsThatFail, LeaveNoCommunicatorInUse) {
  onThreads(2, [&](int rank) { useOnce(whole_[rank]); });
  EXPECT_EQ(sumOfBoth(), ncclRemoteError);
  EXPECT_EQ(stateOf(broken_[0]), ncclRemoteError);
  EXPECT_EQ(stateOf(whole_[0]), ncclRemoteError);
  EXPECT_EQ(sum(whole_[0]), ncclRemoteError);
}

// The other communicator waits for a peer that makes no call.
TEST_F(GroupsThatFail, DoNotWaitForTheOthers) {
  EXPECT_EQ(sumOfBoth(), ncclRemoteError);
  EXPECT_EQ(stateOf(whole_[0]), ncclRemoteError);
}

// Its peer lives, and never maps what it was sent.
TEST_F(GroupsThatFail, DestroyWaitsForNobody) {
  EXPECT_EQ(sumOfBoth(), ncclRemoteError);
  auto ending =
      std::async(std::launch::async, [&] { return ncclCommDestroy(std::exchange(whole_[0], {})); });
  EXPECT_EQ(ending.wait_for(std::chrono::seconds(10)), std::future_status::ready);
  EXPECT_OK(ending.get());
}

TEST_F(GroupsThatFail, AbortEndsWhatWasLaunchedBefore) {
  onThreads(2, [&](int rank) { useOnce(whole_[rank]); });
  device::use(0);
  EXPECT_OK(sum(whole_[0]));  // waits for its peer on the device
  EXPECT_EQ(sumOfBoth(), ncclRemoteError);
  EXPECT_FALSE(device::isIdle(stream_));
  EXPECT_OK(ncclCommAbort(std::exchange(whole_[0], nullptr)));
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!device::isIdle(stream_) && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(device::isIdle(stream_));
}

TEST_F(GroupsThatFail, DropTheCommunicatorsOfTheGroup) {
  ncclComm_t made = nullptr;
  const ncclUniqueId id = newId();
  check(ncclGroupStart());
  EXPECT_OK(ncclCommInitRank(&made, 1, id, 0));
  EXPECT_OK(sum(broken_[0]));
  EXPECT_EQ(ncclGroupEnd(), ncclRemoteError);
  EXPECT_EQ(made, nullptr);
}

// All streams of a group wait for it, and it waits for all of them.
TEST(GroupsOfSeveral, Streams) {
  const Ranks ranks(3);
  constexpr size_t kCount = 50'000;
  onThreads(3, [&](int rank) {
    DeviceStream streams[3] = {DeviceStream(rank), DeviceStream(rank), DeviceStream(rank)};
    DeviceBuffer source(rank, kCount * sizeof(int)), in(rank, kCount * sizeof(int)),
        out(rank, kCount * sizeof(int)), copy(rank, kCount * sizeof(int));
    for (int round = 0; round < scaled(20, 4); round++) {
      for (size_t i = 0; i < kCount; i++) source.as<int>()[i] = round + rank;
      // The input comes on one stream, the result is read on another.
      check(unisonoHostMemcpyAsync(in.as(), source.as(), source.bytes(), streams[2]));
      check(ncclGroupStart());
      check(ncclAllReduce(in.as(), out.as(), kCount / 2, ncclInt, ncclSum, ranks.comm(rank),
                          streams[0]));
      check(ncclAllReduce(in.as<int>() + kCount / 2, out.as<int>() + kCount / 2, kCount / 2,
                          ncclInt, ncclSum, ranks.comm(rank), streams[1]));
      check(ncclSend(in.as(), 1, ncclInt, rank, ranks.comm(rank), streams[2]));
      check(ncclRecv(copy.as(), 1, ncclInt, rank, ranks.comm(rank), streams[2]));
      check(ncclGroupEnd());
      check(unisonoHostMemcpyAsync(copy.as(), out.as(), out.bytes(), streams[round % 3]));
      streams[round % 3].synchronize();
      for (size_t i = 0; i < kCount; i++) {
        if (copy.as<int>()[i] != 3 * round + 3) throw std::runtime_error("wrong sum");
      }
    }
  });
}

// A group may hold a small and a larger message of which the peer makes the second one only when it
// has got the first: the larger one needs nothing more of the peer before it is launched.
TEST(GroupsOfSeveral, SmallAndLargeMessageReceivedOneByOne) {
  const Ranks ranks(2);
  constexpr size_t kSmall = 1 << 10, kLarge = 1 << 20;
  onThreads(2, [&](int rank) {
    DeviceBuffer small(rank, kSmall), large(rank, kLarge);
    const ncclComm_t comm = ranks.comm(rank);
    const cudaStream_t stream = ranks.stream(rank);
    if (rank == 0) {
      std::fill_n(small.as<char>(), kSmall, 'a');
      std::fill_n(large.as<char>(), kLarge, 'b');
      check(ncclGroupStart());
      check(ncclSend(small.as(), kSmall, ncclInt8, 1, comm, stream));
      check(ncclSend(large.as(), kLarge, ncclInt8, 1, comm, stream));
      check(ncclGroupEnd());
    } else {
      check(ncclRecv(small.as(), kSmall, ncclInt8, 0, comm, stream));
      check(unisonoHostStreamSynchronize(stream));
      check(ncclRecv(large.as(), kLarge, ncclInt8, 0, comm, stream));
    }
    check(unisonoHostStreamSynchronize(stream));
    if (std::count(small.as<char>(), small.as<char>() + kSmall, 'a') != kSmall ||
        std::count(large.as<char>(), large.as<char>() + kLarge, 'b') != kLarge) {
      throw std::runtime_error("wrong bytes");
    }
  });
}

// The sends of a group do not wait for its receives, however many they are: a peer that makes its
// calls one by one may receive everything before it sends.
TEST(GroupsOfSeveral, ManySmallMessagesReceivedOneByOneBeforeTheFirstIsSent) {
  struct Shape {
    int messages;
    size_t bytes;
  };
  const Ranks ranks(2);
  for (const Shape& shape : {Shape{12, 200'003}, Shape{60, 1'000}}) {
    SCOPED_TRACE(std::to_string(shape.messages) + " messages");
    onThreads(2, [&](int rank) {
      const size_t count = static_cast<size_t>(shape.messages) * shape.bytes;
      DeviceBuffer input(rank, count), output(rank, count);
      const ncclComm_t comm = ranks.comm(rank);
      const cudaStream_t stream = ranks.stream(rank);
      const auto valueOf = [](int sender, size_t i) {
        return static_cast<char>(i * 7 + i / 1000 + static_cast<size_t>(sender));
      };
      for (size_t i = 0; i < count; i++) input.as<char>()[i] = valueOf(rank, i);
      std::fill_n(output.as<char>(), count, '-');
      const int peer = 1 - rank;
      const auto send = [&](int m) {
        check(ncclSend(input.as<char>() + static_cast<size_t>(m) * shape.bytes, shape.bytes,
                       ncclInt8, peer, comm, stream));
      };
      const auto receive = [&](int m) {
        check(ncclRecv(output.as<char>() + static_cast<size_t>(m) * shape.bytes, shape.bytes,
                       ncclInt8, peer, comm, stream));
      };
      if (rank == 0) check(ncclGroupStart());
      for (int m = 0; m < shape.messages; m++) receive(m);
      for (int m = 0; m < shape.messages; m++) send(m);
      if (rank == 0) check(ncclGroupEnd());
      check(unisonoHostStreamSynchronize(stream));
      for (size_t i = 0; i < count; i++) {
        if (output.as<char>()[i] != valueOf(peer, i)) throw std::runtime_error("wrong bytes");
      }
      // Calls of many blocks go on where the group has ended.
      const size_t sums = std::min<size_t>(count, 256 << 10);
      check(ncclAllReduce(input.as(), output.as(), sums, ncclInt8, ncclSum, comm, stream));
      check(unisonoHostStreamSynchronize(stream));
      for (size_t i = 0; i < sums; i++) {
        if (output.as<char>()[i] != static_cast<char>(valueOf(0, i) + valueOf(1, i))) {
          throw std::runtime_error("wrong sums");
        }
      }
    });
  }
}

// As synchronize(), but a program that hangs ends.
void synchronizeSoon(cudaStream_t stream, const std::string& what) {
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::seconds(kSanitized ? 90 : 30);
  while (!device::isIdle(stream)) {
    if (std::chrono::steady_clock::now() > deadline) {
      std::fprintf(stderr, "deadlock: %s\n", what.c_str());
      std::_Exit(1);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  check(unisonoHostStreamSynchronize(stream));
}

// In a group none of the messages waits for one of another size, direction or peer. Rank 0 has
// everything in a group, more than one launch of small messages can move, and larger ones between
// them; the other ranks make their calls one after the other, and wait for each.
class LongGroups : public ::testing::TestWithParam<int> {};

TEST_P(LongGroups, OfMessagesOfAllSizesWaitForNoOrder) {
  const int n = GetParam();
  // Peers that share a channel for the largest messages wait for each other.
  const Setting channels("NCCL_MIN_P2P_NCHANNELS", "4");
  const Ranks ranks(n);
  std::vector<DeviceBuffer> tiny;  // a byte for each peer, and one for what is sent
  for (int rank = 0; rank < n; rank++) {
    tiny.emplace_back(ranks.device(rank), static_cast<size_t>(n) + 1);
  }
  for (unsigned seed = 0; seed < static_cast<unsigned>(scaled(8, 2)); seed++) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    struct Letter {
      int peer;
      bool fromPeer;
      size_t bytes, place;
    };
    std::vector<Letter> letters;
    size_t total = 0;
    const auto add = [&](size_t bytes) {
      const int peer = 1 + static_cast<int>(random() % static_cast<unsigned>(n - 1));
      letters.push_back({peer, random() % 2 == 0, bytes, total});
      total += bytes;
    };
    // The streams to a rank hold 1 MiB that it has not taken yet.
    for (int i = 0; i < 16 * (n - 1); i++) add(200'000 + random() % 60'000);
    for (int i = 0; i < 4 * (n - 1); i++) add(300'000 + random() % 900'000);
    for (int i = 0; i < scaled(2, 0); i++) add(8'400'000 + random() % 100'000);
    std::shuffle(letters.begin(), letters.end(), random);
    // What rank 0 exchanges with a rank is in the same order on both; its directions are not.
    const bool sendsFirst = random() % 2 == 0;
    const auto orders = [&](int rank) {
      std::vector<Letter> order;
      for (const Letter& letter : letters) {
        if (letter.peer == rank) order.push_back(letter);
      }
      std::stable_partition(order.begin(), order.end(),
                            [&](const Letter& letter) { return letter.fromPeer == sendsFirst; });
      return order;
    };
    const auto valueOf = [](const Letter& letter, size_t i) {
      return static_cast<char>(i * 7 + i / 1000 + letter.place);
    };
    // Connecting, which only the first messages do, takes all calls of both ranks.
    ranks.inGroup([&](int rank) {
      for (int peer = 0; peer < n; peer++) {
        if (peer == rank) continue;
        char* bytes = tiny[static_cast<size_t>(rank)].as<char>();
        EXPECT_OK(ncclSend(bytes + n, 1, ncclInt8, peer, ranks.comm(rank), ranks.stream(rank)));
        EXPECT_OK(ncclRecv(bytes + peer, 1, ncclInt8, peer, ranks.comm(rank), ranks.stream(rank)));
      }
    });
    ranks.synchronize();
    onThreads(n, [&](int rank) {
      DeviceBuffer buffer(ranks.device(rank), total);
      const ncclComm_t comm = ranks.comm(rank);
      const cudaStream_t stream = ranks.stream(rank);
      const std::vector<Letter> order = rank == 0 ? letters : orders(rank);
      const auto sends = [&](const Letter& letter) { return letter.fromPeer == (rank != 0); };
      const auto call = [&](const Letter& letter) {
        char* at = buffer.as<char>() + letter.place;
        const int peer = rank == 0 ? letter.peer : 0;
        check(sends(letter) ? ncclSend(at, letter.bytes, ncclInt8, peer, comm, stream)
                            : ncclRecv(at, letter.bytes, ncclInt8, peer, comm, stream));
      };
      for (const Letter& letter : order) {
        char* at = buffer.as<char>() + letter.place;
        for (size_t i = 0; i < letter.bytes; i++) at[i] = sends(letter) ? valueOf(letter, i) : '-';
      }
      if (rank == 0) check(ncclGroupStart());
      for (const Letter& letter : order) {
        call(letter);
        if (rank != 0) {
          synchronizeSoon(stream, "a message of rank " + std::to_string(rank));
        }
      }
      if (rank == 0) check(ncclGroupEnd());
      synchronizeSoon(stream, "the group of rank 0, or calls of another");
      for (const Letter& letter : order) {
        const char* at = buffer.as<char>() + letter.place;
        for (size_t i = 0; i < letter.bytes; i++) {
          if (at[i] != valueOf(letter, i)) throw std::runtime_error("wrong bytes");
        }
      }
    });
    if (HasFailure()) return;
  }
}
INSTANTIATE_TEST_SUITE_P(Ranks, LongGroups, ::testing::Values(2, 3, scaled(5, 4)));

// After the first call of a kind, no call waits on the CPU for another rank, however large it is:
// one thread can make the calls of all ranks one after the other, without a group.
TEST(GroupsOfSeveral, LargerCallsDoNotWaitForOtherRanks) {
  constexpr int kRanks = 3;
  constexpr size_t kSmall = 8, kLarge = 1 << 19;
  const Ranks ranks(kRanks);
  std::vector<DeviceBuffer> sums, messages;
  for (int rank = 0; rank < kRanks; rank++) {
    sums.emplace_back(rank, kRanks * kLarge * sizeof(int));
    messages.emplace_back(rank, kLarge * sizeof(int));
    std::fill_n(sums.back().as<int>(), kRanks * kLarge, rank + 1);
  }
  auto reduceScatter = [&](int rank, size_t count) {
    int* data = sums[static_cast<size_t>(rank)].as<int>();
    ASSERT_OK(ncclReduceScatter(data, data + static_cast<size_t>(rank) * count, count, ncclInt,
                                ncclSum, ranks.comm(rank), ranks.stream(rank)));
  };
  auto message = [&](int rank, size_t count) {
    void* data = messages[static_cast<size_t>(rank)].as();
    if (rank == 0) {
      ASSERT_OK(ncclSend(data, count, ncclInt, 1, ranks.comm(0), ranks.stream(0)));
    } else if (rank == 1) {
      ASSERT_OK(ncclRecv(data, count, ncclInt, 0, ranks.comm(1), ranks.stream(1)));
    }
  };
  ranks.inGroup([&](int rank) { reduceScatter(rank, kSmall); });
  ranks.inGroup([&](int rank) { message(rank, kSmall); });
  ranks.synchronize();

  for (int rank = 0; rank < kRanks; rank++) {
    std::fill_n(sums[static_cast<size_t>(rank)].as<int>(), kRanks * kLarge, rank + 1);
  }
  std::fill_n(messages[0].as<int>(), kLarge, 42);
  for (int rank = 0; rank < kRanks && !HasFatalFailure(); rank++) {
    reduceScatter(rank, kLarge);
    message(rank, kLarge);
  }
  if (HasFatalFailure()) return;
  ranks.synchronize();
  for (int rank = 0; rank < kRanks; rank++) {
    const int* sum = sums[static_cast<size_t>(rank)].as<int>() + static_cast<size_t>(rank) * kLarge;
    EXPECT_EQ(std::count(sum, sum + kLarge, 6), static_cast<ptrdiff_t>(kLarge)) << rank;
  }
  const int* received = messages[1].as<int>();
  EXPECT_EQ(std::count(received, received + kLarge, 42), static_cast<ptrdiff_t>(kLarge));
}

// Calls on one communicator keep their order on whatever streams they are.
// More launches on a GPU than CUDA queues, which end when those of other GPUs of the group run.
TEST(GroupsOfSeveral, ManyLaunches) {
  const Setting algorithm("NCCL_ALGO", "Direct"), protocol("NCCL_PROTO", "LL128");
  constexpr int kCalls = 600;
  const Ranks ranks(2);
  std::vector<DeviceBuffer> buffers;
  for (int rank = 0; rank < 2; rank++) {
    device::use(deviceOf(rank));
    buffers.emplace_back(deviceOf(rank), sizeof(int));
    *buffers.back().as<int>() = rank;
  }
  ranks.inGroup([&](int rank) {
    int* const buffer = buffers[static_cast<size_t>(rank)].as<int>();
    for (int i = 0; i < kCalls; i++) {
      check(ncclAllReduce(buffer, buffer, 1, ncclInt, i == 0 ? ncclSum : ncclMax, ranks.comm(rank),
                          ranks.stream(rank)));
    }
  });
  ranks.synchronize();
  for (const DeviceBuffer& buffer : buffers) EXPECT_EQ(*buffer.as<int>(), 1);
}

TEST(GroupsOfSeveral, CallsOnAlternatingStreams) {
  const Ranks ranks(2);
  onThreads(2, [&](int rank) {
    DeviceStream streams[2] = {DeviceStream(rank), DeviceStream(rank)};
    DeviceBuffer buffer(rank, 100'000 * sizeof(int));
    for (int i = 0; i < scaled(60, 12); i++) {
      check(ncclAllReduce(buffer.as(), buffer.as(), i % 2 == 0 ? 100'000 : 10, ncclInt, ncclMax,
                          ranks.comm(rank), streams[i % 2]));
      if (i % 7 == 0) {
        check(ncclBcast(buffer.as(), 1000, ncclInt, i % 2, ranks.comm(rank), nullptr));
      }
    }
    for (const DeviceStream& stream : streams) stream.synchronize();
    check(unisonoHostStreamSynchronize(nullptr));
  });
}

}  // namespace
}  // namespace unisono::system_test
