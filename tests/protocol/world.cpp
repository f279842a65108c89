// SPDX-License-Identifier: Apache-2.0
#include "world.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <numeric>
#include <span>
#include <thread>

#include "base/error.h"
#include "bootstrap/unique_id.h"
#include "device/kernels.h"
#include "device/simt/common.h"
#include "runtime/host/schedule.h"

namespace unisono::protocol {
namespace {

using runtime::HostGroupContext;
using runtime::host::HostRuntime;

// Runs `body(rank)` for all ranks at once and throws the first error.
template <typename Body>
void onEveryRank(int ranks, Body body) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; rank++) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// The network that all worlds are connected through, each with as many of its ranks as it has.
bootstrap::Bootstrap& network(int rank) {
  static const auto kNetwork = [] {
    Settings settings;
    settings.socketInterface = "lo";
    settings.socketFamily = "AF_INET";
    const bootstrap::UniqueId id = bootstrap::createUniqueId(settings);
    std::vector<std::unique_ptr<bootstrap::Bootstrap>> ends(kMostRanks);
    onEveryRank(kMostRanks, [&](int r) {
      ends[static_cast<size_t>(r)] = bootstrap::Bootstrap::connect(id, r, kMostRanks, settings);
    });
    return ends;
  }();
  return *kNetwork[static_cast<size_t>(rank)];
}

struct DelayArguments {
  uint64_t steps;
  uint32_t* flag;  // set at the end, if not null
};

void delay(const void* arguments, const HostGroupContext&) {
  const auto& work = *static_cast<const DelayArguments*>(arguments);
  for (uint64_t i = 0; i < work.steps; i++) {
    if (runsFibers()) {
      runtime::host::schedulePoint();
    } else {
      std::this_thread::yield();
    }
  }
  if (work.flag != nullptr) {
    runtime::host::store(work.flag, uint32_t{1}, std::memory_order_release);
  }
}

void launchDelay(const DelayArguments& arguments, runtime::Stream stream) {
  static const runtime::Kernel kKernel{"delay", nullptr, delay};
  runtime::LaunchShape shape;
  shape.argumentBytes = sizeof(arguments);
  testRuntime().launch(kKernel, shape, &arguments, stream);
}

}  // namespace

bool runsFibers() {
  static const bool kFibers = [] {
    const char* name = std::getenv("UNISONO_TEST_EXECUTOR");
    return name == nullptr || std::string(name) != "threads";
  }();
  return kFibers;
}

HostRuntime& testRuntime() {
  static HostRuntime runtime([] {
    Settings settings;
    settings.backend = "host";
    settings.hostExecutor = runsFibers() ? "fibers" : "threads";
    settings.hostDevices = kMostRanks;
    return settings;
  }());
  static const bool kOnce = (runtime.setDeadlockIsError(true), true);
  static_cast<void>(kOnce);
  return runtime;
}

World::World(const Geometry& geometry, int ranks)
    : geometry_(geometry), members_(static_cast<size_t>(ranks)) {
  testRuntime();
  network(0);
  onEveryRank(ranks, [this, ranks](int rank) { makeMember(rank, ranks); });
  nameMemory();
}

// For reports.
void World::nameMemory() const {
  HostRuntime& runtime = testRuntime();
  const auto nameConnection = [&](const device::Connection& send, const device::Connection& receive,
                                  const std::string& which) {
    runtime.nameMemory(send.head, sizeof(*send.head), "head of " + which);
    runtime.nameMemory(send.tail, sizeof(*send.tail), "tail of " + which);
    runtime.nameMemory(&send.step, sizeof(send.step), "sender's step of " + which);
    runtime.nameMemory(&receive.step, sizeof(receive.step), "receiver's step of " + which);
    runtime.nameMemory(&send.taken, sizeof(send.taken), "taken offer of " + which);
    if (send.offer != nullptr) {
      runtime.nameMemory(send.offer, sizeof(*send.offer), "offer of " + which);
    }
    for (uint32_t slot = 0; slot < geometry_.slots; slot++) {
      runtime.nameMemory(send.slots + size_t{slot} * geometry_.slotBytes, geometry_.slotBytes,
                         fmt::format("slot {} of {}", slot, which));
    }
  };
  for (int rank = 0; rank < ranks(); rank++) {
    const Member& member = members_[index(rank)];
    const device::DeviceCommunicator& sender = tables(rank);
    runtime.nameMemory(abortFlag(rank), sizeof(uint32_t), fmt::format("abort flag of {}", rank));
    runtime.nameMemory(&sender.stopped, sizeof(sender.stopped), fmt::format("stopped of {}", rank));
    for (int channel = 0; ranks() > 1 && channel < geometry_.channels; channel++) {
      const int next = sender.rings[channel].order[1];
      nameConnection(sender.rings[channel].send, tables(next).rings[channel].receive,
                     fmt::format("connection {} -> {}, channel {}", rank, next, channel));
    }
    for (int peer = 0; peer < ranks(); peer++) {
      for (int channel = 0; channel < geometry_.peerChannels; channel++) {
        const device::Connection& send = sender.send[peer * geometry_.peerChannels + channel];
        if (send.slots == nullptr) continue;
        nameConnection(
            send, tables(peer).receive[rank * geometry_.peerChannels + channel],
            fmt::format("connection for messages {} -> {}, channel {}", rank, peer, channel));
      }
    }
    const transport::OneShotMemory& memory = member.connector->oneShot();
    if (memory.epochs == nullptr) continue;
    runtime.nameMemory(memory.epochs, device::kOneShotMaxBlocks * sizeof(uint32_t),
                       fmt::format("epochs of {}", rank));
    const size_t bytes = geometry_.oneShotMaxBytes / 8 * sizeof(device::Line);
    for (int half = 0; half < 2; half++) {
      for (int source = 0; source < ranks(); source++) {
        const size_t at = static_cast<size_t>(half * ranks() + source) * bytes;
        runtime.nameMemory(
            memory.scratch[index(rank)] + at, bytes,
            fmt::format("lines {} -> {} of {} epochs", source, rank, half == 0 ? "even" : "odd"));
      }
    }
  }
}

void World::makeMember(int rank, int ranks) {
  HostRuntime& runtime = testRuntime();
  Member& member = members_[index(rank)];
  plan::CommConfig& config = member.config;
  config.rank = rank;
  config.ranks = ranks;
  config.tuningInput.ranks = ranks;
  config.tuningInput.channels = geometry_.channels;
  config.tuningInput.oneShotMaxBytes = geometry_.oneShotMaxBytes;
  config.tuningInput.minBytesPerChannel = geometry_.minBytesPerChannel;
  config.slotBytes = config.peerSlotBytes = geometry_.slotBytes;
  config.slicesPerChunk = geometry_.slicesPerChunk;
  config.peerChannels = geometry_.peerChannels;
  config.channelsPerPeer = geometry_.channelsPerPeer;
  config.minBytesPerPart = geometry_.minBytesPerPart;
  config.directBytes = geometry_.directBytes;

  member.abortFlag = runtime.allocatePinned(sizeof(uint32_t));
  device::DeviceCommunicator head{};
  head.rank = rank;
  head.ranks = ranks;
  head.slotBytes = head.peerSlotBytes = geometry_.slotBytes;
  head.slots = geometry_.slots;
  head.slicesPerChunk = geometry_.slicesPerChunk;
  head.abortFlag = abortFlag(rank);
  member.arena = std::make_unique<memory::Arena>(runtime, rank, 1 << 20);
  member.mappings = std::make_unique<memory::MappingCache>(runtime, rank);
  member.tables = std::make_unique<transport::DeviceTables>(
      runtime, rank, *member.arena,
      transport::DeviceTables::Sizes{ranks, geometry_.channels, geometry_.peerChannels}, head);
  member.stream = runtime.createStream(rank);

  std::vector<transport::PeerPlace> places;
  for (int r = 0; r < ranks; r++) {
    places.push_back({geometry_.oneProcess ? 1 : static_cast<uint64_t>(r), r});
  }
  // Every channel's ring is another one: forwards, backwards, and by strides where they exist.
  std::vector<std::vector<int32_t>> orders;
  for (int channel = 0; channel < geometry_.channels; channel++) {
    std::vector<int32_t> order(index(ranks));
    for (int i = 0; i < ranks; i++) {
      const int stride = channel == 1 ? ranks - 1 : channel == 2 && ranks % 3 != 0 ? 3 : 1;
      order[index(i)] = i * stride % ranks;
    }
    orders.push_back(order);
  }
  transport::PeerLinks links;
  for (int a = 0; a < ranks; a++) {
    for (int b = a + 1; b < ranks; b++) links[{a, b}] = link(a, b);
  }
  member.connector = std::make_unique<transport::Connector>(
      runtime, network(rank), *member.arena, *member.mappings, *member.tables, config,
      geometry_.slots, std::move(places), std::move(links), std::move(orders));
  member.connector->connectThrough();

  plan::Plan everything;
  everything.usesOneShot = geometry_.oneShotMaxBytes > 0 && ranks > 1;
  everything.usesRings = ranks > 1;
  for (int delta = 1; delta < ranks; delta++) {
    everything.peers.push_back({(rank + delta) % ranks, true});
    everything.peers.push_back({(rank + ranks - delta) % ranks, false});
  }
  member.connector->connect(everything);
}

transport::PeerLink World::link(int a, int b) const {
  if (!geometry_.links || (a + b) % 3 == 0) return {};
  if ((a + b) % 3 == 1 || ranks() < 3) return {.read = true, .through = -1};
  int through = (a + b) % ranks();
  while (through == a || through == b) through = (through + 1) % ranks();
  return {.read = false, .through = through};
}

uint32_t* World::abortFlag(int rank) const {
  return static_cast<uint32_t*>(members_[index(rank)].abortFlag->hostAddress());
}

void World::resetConnection(device::Connection& send, device::Connection& receive, Random& random) {
  const uint64_t step = below(random, 2) == 0 ? below(random, 16) : random() >> 8;
  send.step = receive.step = step;
  *send.head = step;
  *receive.tail = step;
  if (send.offer != nullptr) {
    *send.offer = 0;
    send.taken = random();
  }
  std::memset(receive.slots, static_cast<int>(below(random, 256)),
              size_t{geometry_.slots} * geometry_.slotBytes);
}

void World::resetOneShot(Random& random) {
  if (members_.front().connector->oneShot().epochs == nullptr) return;
  const auto epoch = static_cast<uint32_t>(random() >> 33);
  const size_t lines = 2 * members_.size() * (geometry_.oneShotMaxBytes / 8);
  for (size_t r = 0; r < members_.size(); r++) {
    const transport::OneShotMemory& memory = members_[r].connector->oneShot();
    std::fill_n(memory.epochs, device::kOneShotMaxBlocks, epoch);
    auto* line = reinterpret_cast<device::Line*>(memory.scratch[r]);
    const uint64_t junk = random();
    for (size_t i = 0; i < lines; i++) {
      // The newest call that used this half, or one of those before it.
      const uint32_t half = i >= lines / 2 ? 1 : 0;
      const uint32_t newest = (epoch & 1) == half ? epoch : epoch - 1;
      const uint32_t flag = newest - 2 * static_cast<uint32_t>(junk >> (i % 60) & 3);
      line[i] = {static_cast<uint32_t>(junk), flag, static_cast<uint32_t>(junk >> 32), flag};
    }
  }
}

void World::reset(Random& random) {
  for (Member& member : members_) {
    device::DeviceCommunicator& tables = *member.tables->address();
    const int rank = tables.rank;
    for (int channel = 0; ranks() > 1 && channel < geometry_.channels; channel++) {
      const int next = tables.rings[channel].order[1];
      resetConnection(tables.rings[channel].send,
                      members_[index(next)].tables->address()->rings[channel].receive, random);
    }
    for (int peer = 0; peer < ranks(); peer++) {
      for (int channel = 0; channel < geometry_.peerChannels; channel++) {
        device::Connection& send = tables.send[peer * geometry_.peerChannels + channel];
        if (send.slots == nullptr) continue;
        device::DeviceCommunicator& theirs = *members_[index(peer)].tables->address();
        resetConnection(send, theirs.receive[rank * geometry_.peerChannels + channel], random);
      }
    }
  }
  resetOneShot(random);
}

void World::enqueue(int rank, const std::vector<plan::Task>& tasks) {
  HostRuntime& runtime = testRuntime();
  Member& member = members_[index(rank)];
  plan::Plan plan = plan::makePlan(member.config, tasks);
  if (!member.connector->isConnected(plan)) {
    throw internalError("The plan uses connections that the test did not make").rank(rank);
  }
  runtime::DeviceScope scope(runtime, rank);
  for (plan::Launch& launch : plan.launches) {
    runtime::LaunchShape shape;
    if (auto* collective = std::get_if<plan::CollectiveLaunch>(&launch)) {
      collective->arguments.communicator = member.tables->address();
      collective->arguments.launchFlag = abortFlag(rank);
      shape.blocks = collective->blocks;
      shape.argumentBytes = sizeof(collective->arguments);
      runtime.launch(device::collectiveKernel(), shape, &collective->arguments, stream(rank));
    } else if (auto* messages = std::get_if<plan::SendReceiveLaunch>(&launch)) {
      messages->arguments.communicator = member.tables->address();
      messages->arguments.launchFlag = abortFlag(rank);
      shape.blocks = messages->blocks;
      shape.groupsPerBlock = device::kSendReceiveGroups;
      shape.argumentBytes = sizeof(messages->arguments);
      runtime.launch(device::sendReceiveKernel(), shape, &messages->arguments, stream(rank));
    } else {
      auto& oneShot = std::get<plan::OneShotLaunch>(launch);
      const transport::OneShotMemory& memory = member.connector->oneShot();
      std::copy(memory.scratch.begin(), memory.scratch.end(), oneShot.arguments.scratch);
      oneShot.arguments.epochs = memory.epochs;
      oneShot.arguments.abortFlag = oneShot.arguments.launchFlag = abortFlag(rank);
      shape.blocks = oneShot.blocks;
      shape.argumentBytes = sizeof(oneShot.arguments);
      runtime.launch(device::oneShotKernel(ranks(), oneShot.arguments.reduction), shape,
                     &oneShot.arguments, stream(rank));
    }
  }
}

void World::enqueueDelay(int rank, uint64_t steps) {
  launchDelay({steps, nullptr}, stream(rank));
}

void World::enqueueAbort(int rank, uint64_t steps, runtime::Stream other) {
  launchDelay({steps, abortFlag(rank)}, other);
}

void World::raiseAbort(int rank) {
  std::atomic_ref<uint32_t>(*abortFlag(rank)).store(1, std::memory_order_release);
}

void World::enqueueTouch(void* address, size_t bytes, runtime::Stream on) {
  struct Range {
    void* address;
    size_t bytes;
  };
  static const runtime::Kernel kKernel{"touch", nullptr,
                                       [](const void* arguments, const HostGroupContext& context) {
                                         const auto& range = *static_cast<const Range*>(arguments);
                                         if (context.role == 0) {
                                           runtime::host::noteWrite(range.address, range.bytes);
                                         }
                                       }};
  const Range range{address, bytes};
  runtime::LaunchShape shape;
  shape.argumentBytes = sizeof(range);
  testRuntime().launch(kKernel, shape, &range, on);
}

std::vector<std::string> World::synchronize() {
  std::vector<std::string> errors;
  for (int rank = 0; rank < ranks(); rank++) {
    try {
      testRuntime().synchronize(stream(rank));
      errors.emplace_back();
    } catch (const Error& error) {
      errors.emplace_back(error.what());
    }
  }
  return errors;
}

}  // namespace unisono::protocol
