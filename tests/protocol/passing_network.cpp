// SPDX-License-Identifier: Apache-2.0
#include "passing_network.h"

#include "base/error.h"
#include "device/protocol/fifo.h"
#include "device/protocol/lines.h"
#include "device/reduce/reduce_copy.h"
#include "transport/net/network.h"

namespace unisono::protocol {

using namespace device;
using namespace device::host_target;

class PassingKernel {
 public:
  struct Arguments {
    PassingNetwork* network;
    uint64_t launches;  // that have to end
  };

  static void end(const void* arguments, const runtime::HostGroupContext& context) {
    if (context.role != 0) return;
    addRelease(&static_cast<const Arguments*>(arguments)->network->ended_, 1);
  }

  static void run(const void* arguments, const runtime::HostGroupContext& context) {
    if (context.role != 0) return;
    const auto& [network, launches] = *static_cast<const Arguments*>(arguments);
    ThreadGroup group(context);
    PassingKernel kernel(group);
    const std::vector<PassingNetwork::Stream*> streams = network->streams();
    for (;;) {
      // What has ended before has stored all that it had to send.
      const bool isLast = loadAcquire(&network->ended_) >= launches;
      bool moved = false;
      for (PassingNetwork::Stream* stream : streams) moved = kernel.pass(*stream) || moved;
      if (moved) {
        runtime::host::progress();
      } else if (isLast) {
        return;
      } else {
        pollFor({"slots for the network", -1, -1, -1, &network->ended_, launches});
      }
    }
  }

 private:
  explicit PassingKernel(ThreadGroup& group) : group_(group) {}

  static uint64_t* reportOf(const PassingNetwork::Stream& stream) {
    return stream.receive.tail + kReportsWord + (stream.receive.step & (stream.slots - 1));
  }
  static std::byte* slotOf(const PassingNetwork::Stream& stream, const Fifo& fifo) {
    return fifo.slots + (fifo.step & (stream.slots - 1)) * stream.slotBytes;
  }

  // Passes the next slot on, if there is one and room for it.
  bool pass(PassingNetwork::Stream& stream) {
    const bool passes = stream.protocol == Protocol::ll ? passLines(stream) : passSlot(stream);
    if (!passes) return false;
    storeRelease(stream.send.tail, ++stream.send.step);
    storeRelease(stream.receive.head, ++stream.receive.step);
    return true;
  }

  static bool hasRoom(const PassingNetwork::Stream& stream) {
    return loadAcquire(stream.send.head) + stream.slots > stream.send.step;
  }

  bool passSlot(PassingNetwork::Stream& stream) {
    if (loadAcquire(stream.receive.tail) <= stream.receive.step || !hasRoom(stream)) return false;
    const uint64_t bytes = unpackReport(loadRelaxed(reportOf(stream))).bytes;
    if (bytes > stream.slotBytes) throw internalError("A slot reports {} bytes", bytes);
    const std::byte* from = slotOf(stream, stream.receive);
    std::byte* to = slotOf(stream, stream.send);
    if (stream.protocol == Protocol::ll128) {
      // The last word first, which is a flag: only the tail tells when lines are there.
      const auto* words = reinterpret_cast<const uint64_t*>(from);
      for (uint64_t i = bytes / 8; i-- > 0;) {
        storeRelaxed(reinterpret_cast<uint64_t*>(to) + i, loadRelaxed(words + i));
      }
      return true;
    }
    ReduceCopy copy{};
    copy.addSource(from, false);
    copy.addDestination(to);
    copyOnly(group_, copy, bytes);
    return true;
  }

  // Relies on nothing but the flags: no order of the lines with each other or with the report. What
  // the ranks do is ordered by the data alone where it is so inside a node (lines.h: dependent).
  static bool passLines(PassingNetwork::Stream& stream) {
    const uint64_t report = loadRelaxed(reportOf(stream));
    if (!isLineReportOf(report, stream.receive.step)) return false;
    const uint64_t bytes = unpackReport(report).bytes, lines = (bytes + 7) / 8;
    if (lines * sizeof(Line) > stream.slotBytes) throw internalError("{} lines reported", lines);
    const auto* from = reinterpret_cast<const Line*>(slotOf(stream, stream.receive));
    const uint32_t flag = lineFlagOf(stream.receive.step);
    for (uint64_t i = 0; i < lines; i++) {
      if (!lineHolds(loadLine(from + i), flag)) return false;
    }
    if (!hasRoom(stream)) return false;
    std::vector<Line> line(lines);
    for (uint64_t i = 0; i < lines; i++) line[i] = loadLine(from + i, true);
    auto* to = reinterpret_cast<uint64_t*>(slotOf(stream, stream.send));
    for (uint64_t word = 2 * lines; word-- > 0;) {
      // Backwards, or first the odd words.
      const uint64_t at = stream.send.step % 2 == 0 ? word : (2 * word + 1) % (2 * lines + 1);
      uint64_t value;
      std::memcpy(&value, reinterpret_cast<const std::byte*>(line.data()) + at * 8, sizeof(value));
      storeRelease(to + at, value);
    }
    if (mustClearLines(stream.receive.step, stream.slots)) {
      auto* sent = reinterpret_cast<Line*>(slotOf(stream, stream.receive));
      for (uint64_t i = 0; i < stream.slotBytes / sizeof(Line); i++) storeLine(sent + i, 0, 0);
    }
    return true;
  }

  ThreadGroup& group_;
};

void PassingNetwork::connect(uint64_t tag, size_t fifo, bool sends,
                             const transport::StreamMemory& memory) {
  const std::lock_guard lock(mutex_);
  auto& stream = streams_[{tag, fifo}];
  if (stream == nullptr) stream = std::make_unique<Stream>();
  stream->protocol = memory.protocol;
  stream->slots = memory.slotCount;
  stream->slotBytes = memory.slotBytes;
  Fifo& end = sends ? stream->receive : stream->send;
  end.slots = memory.slots;
  end.tail = memory.tail;
  end.head = memory.head;
  end.hasProxy = 1;
}

void PassingNetwork::enqueue(runtime::Stream ofRank, runtime::Stream ofNetwork) {
  static const runtime::Kernel kEnd{"end of a launch", nullptr, PassingKernel::end};
  static const runtime::Kernel kRun{"network", nullptr, PassingKernel::run};
  const PassingKernel::Arguments arguments{this, ++launched_};
  runtime::LaunchShape shape;
  shape.argumentBytes = sizeof(arguments);
  runtime_.launch(kEnd, shape, &arguments, ofRank);
  runtime_.launch(kRun, shape, &arguments, ofNetwork);
}

std::vector<PassingNetwork::Stream*> PassingNetwork::streams() {
  std::vector<Stream*> streams;
  for (const auto& [key, stream] : streams_) streams.push_back(stream.get());
  return streams;
}

namespace {

// What the proxy would move.
class IdleStream final : public transport::Stream {
 public:
  using Stream::Stream;
  transport::StreamProgress progress() override { return {}; }
};

class WorldNetwork final : public transport::Network {
 public:
  explicit WorldNetwork(PassingNetwork& network) : network_(network) {}
  std::vector<std::byte> listen(const transport::NetworkGroup&) override { return {}; }
  std::vector<transport::NetworkConnection> connect(const transport::NetworkGroup& group,
                                                    std::span<const std::byte>) override {
    return make(group, true);
  }
  std::vector<transport::NetworkConnection> accept(const transport::NetworkGroup& group) override {
    return make(group, false);
  }

 private:
  std::vector<transport::NetworkConnection> make(const transport::NetworkGroup& group, bool sends) {
    std::vector<transport::NetworkConnection> connections;
    for (size_t fifo = 0; fifo < group.memory->fifos(); fifo++) {
      network_.connect(group.tag, fifo, sends, group.memory->streamOf(fifo));
      connections.push_back(
          {std::make_unique<IdleStream>(group.memory->streamOf(fifo)), "simulated", ""});
    }
    return connections;
  }

  PassingNetwork& network_;
};

class WorldDriver final : public transport::NetworkDriver {
 public:
  explicit WorldDriver(PassingNetwork& network) : network_(network) {}
  std::string name() const override { return "simulated"; }
  std::unique_ptr<transport::Network> makeNetwork(
      const transport::TransportContext&) const override {
    return std::make_unique<WorldNetwork>(network_);
  }

 private:
  PassingNetwork& network_;
};

}  // namespace

std::shared_ptr<const transport::NetworkDriver> driverOf(PassingNetwork& network) {
  return std::make_shared<WorldDriver>(network);
}

}  // namespace unisono::protocol
