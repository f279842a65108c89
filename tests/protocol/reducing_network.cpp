// SPDX-License-Identifier: Apache-2.0
#include "reducing_network.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/math.h"
#include "device/multicast.h"
#include "device/protocol/fifo.h"
#include "device/reduce/reduce_copy.h"

namespace unisono::protocol {
namespace {

using namespace device;
using namespace device::host_target;
using transport::ReducingNetwork;

constexpr size_t kMostChannels = 16;

// The steps that a launch makes on each channel, with all streams of one use.
struct NetworkArguments {
  SimulatedNetwork* network;
  const uint32_t* abortFlag;
  int peer;  // the use
  std::array<uint32_t, kMostChannels> steps;
};

// How many slots a work makes a head send on a channel.
uint32_t stepsOf(const CollectiveWork& work, int channel, uint64_t heads) {
  if (channel < work.firstChannel || channel >= work.firstChannel + work.channels) return 0;
  const uint64_t count = work.part(channel).count;
  if (usesHeads(work.algorithm)) {
    const uint64_t pieces = work.operation == Operation::allReduce ? heads : 1;
    return static_cast<uint32_t>(ceilDivide(count, work.chunkElements * pieces));
  }
  uint64_t steps = 0;
  for (uint64_t chunk = 0; chunk < count; chunk += work.chunkElements) {
    const uint64_t elements = std::min<uint64_t>(count - chunk, work.chunkElements);
    steps += ceilDivide(elements, uint64_t{work.sliceElements});
  }
  return static_cast<uint32_t>(steps);
}

}  // namespace

class NetworkKernel {
 public:
  static void run(const void* launch, const runtime::HostGroupContext& context) {
    const auto& arguments = *static_cast<const NetworkArguments*>(launch);
    ThreadGroup group(context);
    if (context.role != 0) return;
    NetworkKernel(group, arguments, context.block).runSteps();
  }

 private:
  NetworkKernel(ThreadGroup& group, const NetworkArguments& arguments, int channel)
      : group_(group), arguments_(arguments), network_(*arguments.network), channel_(channel) {}

  void runSteps() {
    if ((loadRelaxed(arguments_.abortFlag) | loadRelaxed(&network_.stopped_)) != 0) return;
    for (uint32_t s = 0; s < arguments_.steps[static_cast<size_t>(channel_)]; s++) {
      for (const auto& stream : network_.streams()) {
        if (stream->use.peer != arguments_.peer || stream->use.channel != channel_) continue;
        if (step(*stream)) continue;
        storeRelaxed(&network_.stopped_, uint32_t{1});
        return;
      }
    }
  }

  // Waits until `counter` and `ahead` exceed `step`. Returns false after an abort.
  bool wait(const char* what, const uint64_t* counter, uint64_t ahead, uint64_t step) {
    const WaitSubject subject{what, 0, arguments_.peer, channel_, counter, step + 1 - ahead};
    return waitUntil(arguments_.abortFlag, subject,
                     [&] { return loadAcquire(counter) + ahead > step; });
  }
  static std::byte* slot(const SimulatedNetwork::Stream& stream, const Fifo& fifo, uint32_t slots) {
    return fifo.slots + (fifo.step & (slots - 1)) * stream.use.slotBytes;
  }
  void copy(const std::byte* from, std::byte* to, uint64_t bytes) {
    ReduceCopy copy{};
    copy.addSource(from, false);
    copy.addDestination(to);
    copyOnly(group_, copy, bytes);
  }

  // Makes a step of a collective with a slot of every head, as they report it.
  bool step(SimulatedNetwork::Stream& stream) {
    const size_t nodes = stream.receive.size();
    const uint32_t slots = network_.slots_;
    for (Fifo& fifo : stream.receive) {
      if (!wait("operands of all nodes", fifo.tail, 0, fifo.step)) return false;
    }
    for (Fifo& fifo : stream.send) {
      if (!wait("a free slot", fifo.head, slots, fifo.step)) return false;
    }
    const auto reportOf = [&](const Fifo& fifo) {
      return loadRelaxed(fifo.tail + kReportsWord + (fifo.step & (slots - 1)));
    };
    const uint64_t first = reportOf(stream.receive.front());
    for (const Fifo& fifo : stream.receive) {
      if (reportOf(fifo) != first) throw internalError("Heads report different operations");
    }
    const SlotReport report = unpackReport(first);
    const uint64_t size = elementBytes(report.type), stride = pieceStride(report.bytes);
    const auto from = [&](size_t node) { return slot(stream, stream.receive[node], slots); };
    const auto to = [&](size_t node) { return slot(stream, stream.send[node], slots); };
    // What scales is a sum here.
    const Reduction reduction =
        report.reduction > Reduction::min ? Reduction::sum : report.reduction;
    const ReductionSpec spec{report.type, reduction, false, 0};
    const auto reduce = [&](uint64_t offset, std::byte* result) {
      for (size_t n = 0; n < nodes && report.bytes > 0; n++) {
        ReduceCopy copy{};
        if (n > 0) copy.addSource(result, false);
        copy.addSource(from(n) + offset, false);
        copy.addDestination(result);
        copy.elements = report.bytes / size;
        reduceCopy(group_, spec, copy);
      }
    };
    for (size_t n = 0; n < nodes; n++) {
      switch (report.operation) {
        case Operation::allGather:
          for (size_t f = 0; f < nodes; f++) copy(from(f), to(n) + f * stride, report.bytes);
          break;
        case Operation::reduceScatter:
          reduce(n * stride, to(n));
          break;
        default:
          if (n == 0)
            reduce(0, to(0));
          else
            copy(to(0), to(n), report.bytes);
          break;
      }
    }
    for (size_t n = 0; n < nodes; n++) {
      storeRelease(stream.receive[n].head, ++stream.receive[n].step);
      storeRelease(stream.send[n].tail, ++stream.send[n].step);
    }
    return true;
  }

  ThreadGroup& group_;
  const NetworkArguments& arguments_;
  SimulatedNetwork& network_;
  const int channel_;
};

void SimulatedNetwork::enqueue(const plan::CollectiveLaunch& launch, int nodes,
                               const uint32_t* abortFlag, runtime::Stream stream) {
  const Algorithm algorithm = launch.arguments.work[0].algorithm;
  NetworkArguments arguments{this, abortFlag, 0, {}};
  if (algorithm == Algorithm::collNetChain) {
    arguments.peer = kNetworkPeer;
  } else if (algorithm == Algorithm::collNetDirect) {
    arguments.peer = kDirectNetworkPeer;
  } else if (algorithm == Algorithm::nvls && nodes > 1) {
    arguments.peer = kHeadNetworkPeer;
  } else {
    return;
  }
  const auto heads = static_cast<uint64_t>(
      std::ranges::count_if(streams_, [&](const std::unique_ptr<Stream>& entry) {
        return entry->use.peer == arguments.peer && entry->use.channel == 0;
      }));
  for (int w = 0; w < launch.arguments.works; w++) {
    for (int channel = 0; channel < launch.blocks; channel++) {
      arguments.steps.at(static_cast<size_t>(channel)) +=
          stepsOf(launch.arguments.work[w], channel, heads);
    }
  }
  static const runtime::Kernel kKernel{"network", nullptr, NetworkKernel::run};
  runtime::LaunchShape shape;
  shape.blocks = launch.blocks;
  shape.argumentBytes = sizeof(arguments);
  runtime_.launch(kKernel, shape, &arguments, stream);
}

ReducingNetwork::Ends SimulatedNetwork::connect(int rank, const ReducingNetwork::Stream& use) {
  const std::lock_guard lock(mutex_);
  auto found = std::ranges::find_if(streams_, [&](const std::unique_ptr<Stream>& stream) {
    return stream->use.peer == use.peer && stream->use.channel == use.channel &&
           stream->use.heads == use.heads;
  });
  if (found == streams_.end()) {
    const size_t fifoBytes = 2 * kCounterLineBytes + size_t{slots_} * use.slotBytes;
    auto stream = std::make_unique<Stream>(
        Stream{use, {}, {}, runtime_.allocatePinned(2 * use.heads.size() * fifoBytes)});
    auto* at = static_cast<std::byte*>(stream->memory->hostAddress());
    for (auto* ends : {&stream->receive, &stream->send}) {
      for (size_t node = 0; node < use.heads.size(); node++) {
        Fifo& fifo = ends->emplace_back();
        fifo.head = reinterpret_cast<uint64_t*>(at);
        fifo.tail = reinterpret_cast<uint64_t*>(at + kCounterLineBytes);
        fifo.slots = at + 2 * kCounterLineBytes;
        fifo.hasProxy = 1;
        at += fifoBytes;
      }
    }
    streams_.push_back(std::move(stream));
    found = streams_.end() - 1;
  }
  const auto node = std::ranges::find(use.heads, rank) - use.heads.begin();
  return {(*found)->receive[static_cast<size_t>(node)], (*found)->send[static_cast<size_t>(node)]};
}

namespace {

class ReducingWorldNetwork final : public ReducingNetwork {
 public:
  ReducingWorldNetwork(SimulatedNetwork& network, int rank) : network_(network), rank_(rank) {}
  Ends connect(const Stream& stream) override { return network_.connect(rank_, stream); }

 private:
  SimulatedNetwork& network_;
  const int rank_;
};

class ReducingWorldDriver final : public transport::ReducingDriver {
 public:
  explicit ReducingWorldDriver(SimulatedNetwork& network) : network_(network) {}
  std::unique_ptr<ReducingNetwork> makeNetwork(
      const transport::TransportContext& context) const override {
    return std::make_unique<ReducingWorldNetwork>(network_, context.config.rank);
  }

 private:
  SimulatedNetwork& network_;
};

}  // namespace

std::shared_ptr<const transport::ReducingDriver> driverOf(SimulatedNetwork& network) {
  return std::make_shared<ReducingWorldDriver>(network);
}

}  // namespace unisono::protocol
