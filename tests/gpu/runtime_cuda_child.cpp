// SPDX-License-Identifier: Apache-2.0
#include "runtime_cuda_child.h"

#include <cuda_runtime_api.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <functional>
#include <future>
#include <thread>
#include <utility>

#include "base/error.h"
#include "runtime/cuda/driver.h"
#include "runtime_cuda_kernels.h"

extern char** environ;

namespace unisono::runtime::test {
namespace {

constexpr int kChannelInChild = 3;
constexpr int kReplySeconds = 60;

// Whole messages over a stream socket. Returns false at its end or after the time limit.
template <typename Message>
bool sendMessage(int channel, const Message& message) {
  return ::send(channel, &message, sizeof(message), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(sizeof(message));
}
template <typename Message>
bool receiveMessage(int channel, Message& message) {
  return ::recv(channel, &message, sizeof(message), MSG_WAITALL) ==
         static_cast<ssize_t>(sizeof(message));
}

ChildReply importAndWrite(Runtime& runtime, const ChildRequest& request) {
  ChildReply reply{};
  std::vector<MemoryHandle> handles{request.handle};
  if (request.next.bytes > 0) handles.push_back(request.next);
  const size_t bytes = request.handle.bytes + request.next.bytes;
  auto mapped = runtime.importRun(handles, request.device);
  auto again = runtime.importRun(handles, request.device);
  if (mapped->address() != again->address()) {
    throw internalError("two imports of one range gave two addresses");
  }
  again.reset();
  reply.wrong = countOther(runtime, request.device, mapped->address(), bytes, request.expected);
  fill(runtime, request.device, mapped->address(), bytes, request.written);
  reply.succeeded = true;
  return reply;
}

// Uses device 1 as a library would, on a thread that never chose a device. Throws once there is a
// context on device 0.
void useDeviceOne(Runtime& runtime) {
  std::shared_ptr<DeviceMemory> memory;
  std::shared_ptr<PinnedMemory> pinned;
  std::shared_ptr<void> stream;
  std::unique_ptr<Event> event;
  FillArguments arguments{nullptr, 4096, 0, 1};
  const std::pair<const char*, std::function<void()>> steps[] = {
      {"allocate", [&] { memory = runtime.allocate(1, 4096); }},
      {"allocatePinned", [&] { pinned = runtime.allocatePinned(64); }},
      {"createStream", [&] { stream = runtime.createStream(1); }},
      {"createEvent", [&] { event = runtime.createEvent(1); }},
      {"prepare", [&] { runtime.prepare(fillKernel(), 1); }},
      {"exportMemory", [&] { runtime.exportMemory(memory->address(), 4096); }},
      {"inspect", [&] { runtime.inspect(memory->address()); }},
      {"a DeviceScope", [&] { DeviceScope scope(runtime, 1); }},
      {"work of a stream",
       [&] {
         DeviceScope scope(runtime, 1);
         arguments.target = static_cast<unsigned char*>(memory->address());
         runtime.launch(fillKernel(), {}, &arguments, stream.get());
         event->record(stream.get());
         event->makeWait(nullptr);
         runtime.copyAsync(memory->address(), memory->address(), 4096, nullptr);
         runtime.synchronize(nullptr);
       }},
      {"the event's end", [&] { event.reset(); }},
      {"the stream's end", [&] { stream.reset(); }},
      {"the end of pinned memory", [&] { pinned.reset(); }},
      {"the end of memory", [&] { memory.reset(); }},
  };
  for (const auto& [name, step] : steps) {
    step();
    if (hasContext(0)) throw internalError("device 0 got a context from {} on device 1", name);
  }
  if (!hasContext(1)) throw internalError("device 1 was used without a context");
}

ChildReply checkContexts(Runtime& runtime) {
  for (int device = 0; device < runtime.deviceCount(); device++) {
    runtime.properties(device);
    for (int peer = 0; peer < runtime.deviceCount(); peer++) runtime.canAccessPeer(device, peer);
  }
  int local = 0;
  runtime.inspect(&local);
  for (int device = 0; device < runtime.deviceCount(); device++) {
    if (hasContext(device)) throw internalError("looking at device {} made a context", device);
  }
  std::async(std::launch::async, useDeviceOne, std::ref(runtime)).get();
  ChildReply reply{};
  reply.succeeded = true;
  return reply;
}

// A pinned line is good after the device it was first used on was reset.
ChildReply checkReset(Runtime& runtime) {
  runtime.makeCurrent(0);
  fill(runtime, 0, runtime.allocatePinned(64)->deviceAddress(), 64, 1);
  if (cudaDeviceReset() != cudaSuccess) throw internalError("the device was not reset");
  auto pinned = runtime.allocatePinned(64);
  fill(runtime, 0, pinned->deviceAddress(), 64, 2);
  const auto* bytes = static_cast<const unsigned char*>(pinned->hostAddress());
  ChildReply reply{};
  reply.wrong = static_cast<unsigned long long>(64 - std::count(bytes, bytes + 64, 2));
  reply.succeeded = reply.wrong == 0;
  return reply;
}

ChildReply answer(Runtime& runtime, const ChildRequest& request) {
  switch (request.what) {
    case ChildRequest::What::importMemory:
      return importAndWrite(runtime, request);
    case ChildRequest::What::contexts:
      return checkContexts(runtime);
    case ChildRequest::What::reset:
      return checkReset(runtime);
  }
  throw internalError("unknown request {}", static_cast<int>(request.what));
}

}  // namespace

std::unique_ptr<Runtime> makeRuntime(int cuMem, bool multiNodeNvlink) {
  Settings settings;
  settings.cuMem = cuMem;
  settings.multiNodeNvlink = multiNodeNvlink;
  return createCudaRuntime(settings);
}

int gpuCount(std::string* why) {
  try {
    return makeRuntime()->deviceCount();
  } catch (const Error& error) {
    if (why != nullptr) *why = error.what();
    return 0;
  }
}

void fill(Runtime& runtime, int device, void* target, size_t bytes, unsigned char value) {
  DeviceScope scope(runtime, device);
  auto stream = runtime.createStream(device);
  LaunchShape shape;
  shape.blocks = 16;
  shape.threadsPerBlock = 256;
  shape.argumentBytes = sizeof(FillArguments);
  FillArguments arguments{static_cast<unsigned char*>(target), bytes, 0, value};
  runtime.launch(fillKernel(), shape, &arguments, stream.get());
  runtime.synchronize(stream.get());
}

std::vector<unsigned char> read(Runtime& runtime, int device, const void* source, size_t bytes) {
  DeviceScope scope(runtime, device);
  auto stream = runtime.createStream(device);
  std::vector<unsigned char> host(bytes);
  runtime.copyAsync(host.data(), source, bytes, stream.get());
  runtime.synchronize(stream.get());
  return host;
}

size_t countOther(Runtime& runtime, int device, const void* source, size_t bytes,
                  unsigned char value) {
  std::vector<unsigned char> host = read(runtime, device, source, bytes);
  return bytes - static_cast<size_t>(std::count(host.begin(), host.end(), value));
}

ChildProcess::ChildProcess() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    throw systemError(errno, "socketpair");
  }
  channel_ = UniqueDescriptor(ends[0]);
  UniqueDescriptor other(ends[1]);
  timeval limit{kReplySeconds, 0};
  if (::setsockopt(channel_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) != 0) {
    throw systemError(errno, "setsockopt");
  }
  // A duplicate at another number loses FD_CLOEXEC; at the same number posix_spawn clears it.
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, other.get(), kChannelInChild);
  char program[] = "/proc/self/exe";
  char option[] = "--child";
  char* arguments[] = {program, option, nullptr};
  int result = ::posix_spawn(&process_, program, &actions, nullptr, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  if (result != 0) throw systemError(result, "posix_spawn");
}

ChildProcess::~ChildProcess() {
  channel_.reset();  // the other process ends when it sees this
  for (int tries = 0; tries < 100; tries++) {
    if (::waitpid(process_, nullptr, WNOHANG) != 0) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  ::kill(process_, SIGKILL);
  ::waitpid(process_, nullptr, 0);
}

ChildReply ChildProcess::ask(const ChildRequest& request) {
  ChildReply reply{};
  if (!sendMessage(channel_.get(), request) || !receiveMessage(channel_.get(), reply)) {
    throw internalError("the other process gave no answer in {} s", kReplySeconds);
  }
  return reply;
}

int childMain(int channel) {
  std::unique_ptr<Runtime> runtime;
  ChildRequest request;
  while (receiveMessage(channel, request)) {
    ChildReply reply{};
    try {
      if (runtime == nullptr) runtime = makeRuntime();
      reply = answer(*runtime, request);
    } catch (const std::exception& error) {
      std::snprintf(reply.text, sizeof(reply.text), "%s", error.what());
    }
    if (!sendMessage(channel, reply)) return 1;
  }
  return 0;
}

}  // namespace unisono::runtime::test
