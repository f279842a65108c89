// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/unique_descriptor.h"
#include "runtime/runtime.h"

// What the CUDA runtime tests share: devices, filling and reading memory, and a second process.
namespace unisono::runtime::test {

// A CUDA runtime with NCCL_CUMEM_ENABLE = cuMem and NCCL_MNNVL_ENABLE = multiNodeNvlink.
std::unique_ptr<Runtime> makeRuntime(int cuMem = -1, bool multiNodeNvlink = true);

// Number of GPUs; 0 where CUDA cannot be used, and then why says the reason.
int gpuCount(std::string* why = nullptr);

// Sets or reads memory by work of `device` that can access it.
void fill(Runtime& runtime, int device, void* target, size_t bytes, unsigned char value);
std::vector<unsigned char> read(Runtime& runtime, int device, const void* source, size_t bytes);
// How many bytes are not `value`.
size_t countOther(Runtime& runtime, int device, const void* source, size_t bytes,
                  unsigned char value);

// What the other process is asked for.
struct ChildRequest {
  enum class What { importMemory, contexts, reset };
  What what;
  MemoryHandle handle;  // importMemory: map it on `device`, check that all is `expected`,
  int device;           // then set all to `written` by a kernel
  unsigned char expected;
  unsigned char written;
  MemoryHandle next = {};  // the allocation after `handle`, mapped with it; none if it has no bytes
};
struct ChildReply {
  bool succeeded;
  unsigned long long wrong;  // bytes that were not as expected
  char text[512];            // of the error
};

// This program run once more, as a process of its own that shares nothing with this one. A reply is
// waited for 60 s at most. The process is killed with the object.
class ChildProcess {
 public:
  ChildProcess();
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  ChildReply ask(const ChildRequest& request);

 private:
  UniqueDescriptor channel_;
  pid_t process_ = -1;
};

// The other process's main: answers until its channel closes.
int childMain(int channel);

}  // namespace unisono::runtime::test
