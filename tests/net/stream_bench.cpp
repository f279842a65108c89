// SPDX-License-Identifier: Apache-2.0
// Measures streams over TCP between two processes, without device code: what kernels do with a FIFO
// is done by the thread that moves the data. `stream_bench receive` listens, `stream_bench send`
// connects, measures and prints. For comparison, `plain` is a ping-pong over one socket that both
// sides sleep in, `spin` one that they poll.
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "bootstrap/socket.h"
#include "device/work.h"
#include "transport/net/proxy.h"
#include "transport/net/socket_stream.h"

namespace unisono::transport {
namespace {

using bootstrap::Address;
using bootstrap::Socket;
using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

enum class Mode : uint32_t { bandwidth, latency, plain, spin };

bool isSocketOnly(Mode mode) {
  return mode == Mode::plain || mode == Mode::spin;
}

// What the sender asks of the receiver.
struct Request {
  Mode mode;
  LaneCounts lanes;  // of each stream
  uint32_t streams, slotBytes;
  uint64_t slots;  // of each stream, or round trips
};

const std::function<bool()> kNever;

// The end of a FIFO that a kernel would use.
class End {
 public:
  static constexpr uint32_t kSlots = 8;  // as by default

  explicit End(uint32_t slotBytes) : slotBytes_(slotBytes) {}
  StreamMemory memory() { return {tail_, &head_, slots_.data(), kSlots, slotBytes_}; }
  // Of the sender: fills a slot, if there is room. The data stay what they are.
  bool put(uint64_t bytes) {
    if (std::atomic_ref(head_).load(std::memory_order_acquire) + kSlots <= step_) return false;
    std::atomic_ref(tail_[device::kReportsWord + step_ % kSlots]).store(bytes);
    std::atomic_ref(tail_[0]).store(++step_, std::memory_order_release);
    return true;
  }
  // Of the receiver: frees a slot, if one is filled.
  bool take() {
    if (std::atomic_ref(tail_[0]).load(std::memory_order_acquire) <= step_) return false;
    std::atomic_ref(head_).store(++step_, std::memory_order_release);
    return true;
  }
  uint64_t step() const { return step_; }

 private:
  const uint32_t slotBytes_;
  alignas(128) uint64_t tail_[device::kReportsWord + kSlots] = {};
  alignas(128) uint64_t head_ = 0;
  std::vector<std::byte> slots_ = std::vector<std::byte>(size_t{kSlots} * slotBytes_, std::byte{7});
  uint64_t step_ = 0;
};

// A stream whose kernel is a function of the proxy's thread: it takes no core, like a kernel on a
// GPU.
class PlayedStream final : public Stream {
 public:
  PlayedStream(const StreamMemory& memory, std::unique_ptr<Stream> stream,
               std::function<void()> kernel)
      : Stream(memory), stream_(std::move(stream)), kernel_(std::move(kernel)) {}
  StreamProgress progress() override {
    kernel_();
    const StreamProgress progress = stream_->progress();
    kernel_();
    failure_ = stream_->failure();
    return progress;
  }
  bool isPending() const override { return stream_->isPending(); }
  pollfd socket() const override { return stream_->socket(); }

 private:
  const std::unique_ptr<Stream> stream_;
  const std::function<void()> kernel_;
};

double secondsOf(const timeval& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
}

double cpuSeconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return secondsOf(usage.ru_utime) + secondsOf(usage.ru_stime);
}

void readAll(const Socket& socket, std::span<std::byte> into) {
  const bootstrap::Wait wait(std::nullopt, kNever);
  while (!into.empty()) {
    const bootstrap::Transfer read = socket.read(into);
    if (read.closed) throw systemError(read.error, "The other process has ended: recv");
    if (read.bytes == 0) socket.sleepUntilReadable(wait);
    into = into.subspan(read.bytes);
  }
}

uint64_t readWord(const Socket& socket, Mode mode) {
  uint64_t word = 0;
  ssize_t bytes = 0;
  do {
    bytes = ::recv(socket.descriptor(), &word, sizeof(word), MSG_WAITALL);
    if (bytes < 0 && errno == EAGAIN && mode == Mode::spin) ::sched_yield();
  } while (bytes < 0 && errno == EAGAIN);
  if (bytes != sizeof(word)) throw systemError(errno, "The other process has ended: recv");
  return word;
}

// Makes recv() sleep.
void makeBlocking(const Socket& socket) {
  const int flags = ::fcntl(socket.descriptor(), F_GETFL);
  ::fcntl(socket.descriptor(), F_SETFL, flags & ~O_NONBLOCK);
}

template <typename Value>
Value readValue(const Socket& socket) {
  Value value{};
  readAll(socket, std::as_writable_bytes(std::span(&value, 1)));
  return value;
}

template <typename Value>
void writeValue(const Socket& socket, const Value& value) {
  const bootstrap::Transfer written = socket.write(std::as_bytes(std::span(&value, 1)));
  if (written.bytes != sizeof(value)) throw systemError(written.error, "send");
}

Socket dial(const Address& address) {
  int error = 0;
  auto socket = Socket::connect(address, bootstrap::Wait(5s, kNever), error);
  if (!socket) throw systemError(error, "connect");
  return std::move(*socket);
}

Socket acceptOne(const bootstrap::Listener& listener) {
  for (;;) {
    if (auto socket = listener.accept()) return std::move(*socket);
    pollfd ready{listener.descriptor(), POLLIN, 0};
    ::poll(&ready, 1, -1);
  }
}

// Makes all sockets of a stream, one after the other.
template <typename Make>
StreamSockets makeSockets(const Request& request, Make make) {
  StreamSockets sockets{make(), {}, request.lanes.threads};
  for (uint32_t i = 0; i < request.lanes.sockets; i++) sockets.lanes.push_back(make());
  return sockets;
}

// The kernel of a stream that moves nothing.
const std::function<bool()> kUnused = [] { return true; };

// The streams of one process and their proxy. Kernels begin when start() is called.
class Ends {
 public:
  Ends()
      : client_(proxy_.add({[] { return false; },
                            [](const Error& error) {
                              fmt::print(stderr, "{}\n", error.what());
                              std::_Exit(1);
                            }})) {}
  ~Ends() { proxy_.remove(client_); }
  Ends(const Ends&) = delete;
  Ends& operator=(const Ends&) = delete;

  End& make(uint32_t slotBytes) { return *ends_.emplace_back(std::make_unique<End>(slotBytes)); }
  // `kernel` returns whether it has done all that it will do.
  template <typename Stream>
  void add(StreamSockets sockets, End& end, std::function<bool()> kernel) {
    running_++;
    const auto step = [this, kernel = std::move(kernel), done = false]() mutable {
      if (done || !started_ || !kernel()) return;
      done = true;
      running_--;
      running_.notify_one();
    };
    auto stream = std::make_unique<Stream>(std::move(sockets), end.memory());
    stream->setWake([this] { proxy_.wake(); });
    proxy_.addStream(client_, std::make_unique<PlayedStream>(end.memory(), std::move(stream), step),
                     {0, {1}, "of this program"});
  }
  void start() { started_ = true; }
  void wait() const {
    for (int left = running_; left > 0; left = running_) running_.wait(left);
  }

 private:
  std::vector<std::unique_ptr<End>> ends_;
  std::atomic<bool> started_{false};
  std::atomic<int> running_{0};
  Proxy& proxy_ = Proxy::ofDevice(0);
  const uint64_t client_;
};

// A kernel that fills `slots` slots, and one that takes them.
std::function<bool()> filling(End& end, const Request& request) {
  return [&end, request] {
    while (end.step() < request.slots && end.put(request.slotBytes)) {
    }
    return end.step() == request.slots;
  };
}
std::function<bool()> taking(End& end, const Request& request) {
  return [&end, request] {
    while (end.step() < request.slots && end.take()) {
    }
    return end.step() == request.slots;
  };
}

void pingPong(const Socket& socket, const Request& request, bool begins) {
  if (request.mode == Mode::plain) makeBlocking(socket);
  uint64_t word = 0;
  for (uint64_t i = 0; i < request.slots; i++) {
    if (!begins) word = readWord(socket, request.mode);
    writeValue(socket, word);
    if (begins) word = readWord(socket, request.mode);
  }
}

void send(const Address& address, const Request& request) {
  const Socket control = dial(address);
  writeValue(control, request);
  const bool isLatency = request.mode != Mode::bandwidth;
  Ends ends;
  if (request.mode == Mode::latency) {
    End &to = ends.make(request.slotBytes), &from = ends.make(request.slotBytes);
    ends.add<ReceiveStream>({dial(address)}, from, taking(from, request));
    ends.add<SendStream>({dial(address)}, to, [&to, &from, request] {
      if (to.step() < request.slots && to.step() == from.step()) to.put(8);
      return to.step() == request.slots;
    });
    for (uint32_t i = 1; i < request.streams; i++) {
      ends.add<ReceiveStream>({dial(address)}, ends.make(request.slotBytes), kUnused);
      ends.add<SendStream>({dial(address)}, ends.make(request.slotBytes), kUnused);
    }
  } else {
    for (uint32_t i = 0; i < request.streams; i++) {
      End& end = ends.make(request.slotBytes);
      ends.add<SendStream>(makeSockets(request, [&] { return dial(address); }), end,
                           filling(end, request));
    }
  }
  readValue<char>(control);
  const double cpu = cpuSeconds();
  const auto start = Clock::now();
  double receiverCpu = 0;
  if (isSocketOnly(request.mode)) {
    pingPong(control, request, true);
  } else {
    ends.start();
    ends.wait();
    receiverCpu = readValue<double>(control);
  }
  const std::chrono::duration<double> time = Clock::now() - start;
  if (isLatency) {
    fmt::print("{:.2f} us one way\n", time.count() * 1e6 / 2 / static_cast<double>(request.slots));
    return;
  }
  const double gigabytes =
      static_cast<double>(request.slots * request.streams * request.slotBytes) * 1e-9;
  fmt::print("{} stream(s): {:.2f} GB/s, CPU seconds a GB: sender {:.3f}, receiver {:.3f}\n",
             request.streams, gigabytes / time.count(), (cpuSeconds() - cpu) / gigabytes,
             receiverCpu / gigabytes);
}

void receive(const bootstrap::Listener& listener) {
  const Socket control = acceptOne(listener);
  const auto request = readValue<Request>(control);
  Ends ends;
  if (request.mode == Mode::latency) {
    End &from = ends.make(request.slotBytes), &to = ends.make(request.slotBytes);
    Socket answers = acceptOne(listener);
    ends.add<ReceiveStream>({acceptOne(listener)}, from, taking(from, request));
    ends.add<SendStream>({std::move(answers)}, to, [&to, &from, request] {
      if (to.step() < from.step()) to.put(8);
      return to.step() == request.slots;
    });
    for (uint32_t i = 1; i < request.streams; i++) {
      ends.add<SendStream>({acceptOne(listener)}, ends.make(request.slotBytes), kUnused);
      ends.add<ReceiveStream>({acceptOne(listener)}, ends.make(request.slotBytes), kUnused);
    }
  } else {
    for (uint32_t i = 0; i < request.streams; i++) {
      End& end = ends.make(request.slotBytes);
      ends.add<ReceiveStream>(makeSockets(request, [&] { return acceptOne(listener); }), end,
                              taking(end, request));
    }
  }
  const double cpu = cpuSeconds();
  ends.start();
  writeValue(control, 'g');
  if (isSocketOnly(request.mode)) {
    pingPong(control, request, false);
    return;
  }
  ends.wait();
  writeValue(control, cpuSeconds() - cpu);
  // The other process may not have taken its last slot yet.
  char end = 0;
  const bootstrap::Wait wait(5s, kNever);
  while (!control.read(std::as_writable_bytes(std::span(&end, 1))).closed && !wait.isExpired()) {
    control.sleepUntilReadable(wait);
  }
}

int run(int argc, char** argv) {
  CLI::App app("Measures streams over TCP between two processes");
  std::string address = "127.0.0.1:5302", mode = "bandwidth";
  Request request{Mode::bandwidth, {}, 1, 512 << 10, 0};
  int64_t socketsPerThread = 1;
  uint64_t repeats = 100;
  app.add_option("--address", address, "Where the receiver listens")->capture_default_str();
  auto* receiver = app.add_subcommand("receive", "Wait for a sender and take what it sends");
  auto* sender = app.add_subcommand("send", "Send to a receiver and print how long that took");
  sender->add_option("--mode", mode, "bandwidth, latency, plain or spin")->capture_default_str();
  sender
      ->add_option(
          "--streams", request.streams,
          "FIFOs, each with a connection of its own; for latency, those of each direction, of "
          "which all but one are unused")
      ->capture_default_str();
  sender->add_option("--threads", request.lanes.threads, "As NCCL_SOCKET_NTHREADS")
      ->capture_default_str();
  sender->add_option("--sockets-per-thread", socketsPerThread, "As NCCL_NSOCKS_PERTHREAD")
      ->capture_default_str();
  sender->add_option("--slot-bytes", request.slotBytes, "Bytes of a slot")->capture_default_str();
  sender->add_option("--repeats", repeats, "Messages of 64 MiB, or thousands of round trips")
      ->capture_default_str();
  app.require_subcommand(1);
  CLI11_PARSE(app, argc, argv);
  const Address parsed = bootstrap::parseAddress(address, bootstrap::AddressFamily::any, "address");
  if (receiver->parsed()) {
    receive(bootstrap::Listener(parsed, bootstrap::Wait(5s, kNever)));
    return 0;
  }
  request.mode = mode == "bandwidth" ? Mode::bandwidth
                 : mode == "latency" ? Mode::latency
                 : mode == "spin"    ? Mode::spin
                                     : Mode::plain;
  request.lanes = chooseLanes(request.lanes.threads, socketsPerThread, "");
  request.slots = request.mode == Mode::bandwidth
                      ? (repeats << 26) / request.slotBytes / request.streams
                      : repeats * 1000;
  send(parsed, request);
  return 0;
}

}  // namespace
}  // namespace unisono::transport

int main(int argc, char** argv) {
  try {
    return unisono::transport::run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "stream_bench: {}\n", error.what());
    return 1;
  }
}
