// SPDX-License-Identifier: Apache-2.0
#include "transport/device_tables.h"

#include "base/math.h"

namespace unisono::transport {
namespace {

// Hands out aligned pieces of one range.
class Pieces {
 public:
  template <typename T>
  size_t add(size_t count) {
    size_t offset = roundUp(bytes_, alignof(T));
    bytes_ = offset + count * sizeof(T);
    return offset;
  }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
};

}  // namespace

DeviceTables::DeviceTables(runtime::Runtime& runtime, int device, memory::Arena& arena,
                           const Sizes& sizes, device::DeviceCommunicator head)
    : runtime_(runtime), sizes_(sizes) {
  const size_t ranks = static_cast<size_t>(sizes.ranks), rings = static_cast<size_t>(sizes.rings),
               peers = ranks * static_cast<size_t>(sizes.peerChannels);
  Pieces pieces;
  const size_t communicator = pieces.add<device::DeviceCommunicator>(1);
  const size_t ringTable = pieces.add<device::RingChannel>(rings);
  const size_t sendTable = pieces.add<device::Connection>(peers);
  const size_t receiveTable = pieces.add<device::Connection>(peers);
  const size_t orders = pieces.add<int32_t>(rings * ranks);
  stream_ = runtime.createStream(device);

  std::byte* base = arena.allocate(pieces.bytes()).address;
  communicator_ = reinterpret_cast<device::DeviceCommunicator*>(base + communicator);
  rings_ = reinterpret_cast<device::RingChannel*>(base + ringTable);
  send_ = reinterpret_cast<device::Connection*>(base + sendTable);
  receive_ = reinterpret_cast<device::Connection*>(base + receiveTable);
  orders_ = reinterpret_cast<int32_t*>(base + orders);
  head.rings = rings_;
  head.send = send_;
  head.receive = receive_;
  head.peerChannels = sizes.peerChannels;
  write(communicator_, &head, sizeof(head));
}

void DeviceTables::setRing(int channel, const device::Connection& receive,
                           const device::Connection& send, const std::vector<int32_t>& order,
                           int position) {
  int32_t* orderOnDevice = orders_ + static_cast<size_t>(channel) * order.size();
  write(orderOnDevice, order.data(), order.size() * sizeof(int32_t));
  const device::RingChannel ring{receive, send, orderOnDevice, position};
  write(rings_ + channel, &ring, sizeof(ring));
}

void DeviceTables::setPeer(bool sends, int peer, int firstChannel,
                           const std::vector<device::Connection>& connections) {
  device::Connection* table = sends ? send_ : receive_;
  write(table + peer * sizes_.peerChannels + firstChannel, connections.data(),
        connections.size() * sizeof(device::Connection));
}

void DeviceTables::write(void* destination, const void* source, size_t bytes) {
  runtime_.copyAsync(destination, source, bytes, stream_.get());
  runtime_.synchronize(stream_.get());
}

}  // namespace unisono::transport
