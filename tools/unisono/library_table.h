// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "nccl.h"

// A libnccl.so.2 as a table of functions. It is loaded with dlopen, so that one process can use two
// libraries with the same symbols.
namespace unisono::bench {

class Library {
 public:
  // Makes `path` absolute, so that the loader distinguishes two libraries with the same soname.
  // Throws unisono::Error if it cannot be loaded or lacks a function of the table below.
  explicit Library(const std::string& path);

  // The path of the file, as the loader found it.
  const std::string& path() const { return path_; }
  int version() const { return version_; }
  std::string versionText() const;  // "2.28.9"

  // The address of `name`, or null.
  void* find(const char* name) const;
  // Throws unisono::Error that names the function and the library if it is missing.
  void* require(const char* name) const;

  // Throws unisono::Error with the library's last error unless `result` is ncclSuccess.
  void check(ncclResult_t result, const char* call) const;

// clang-format off
#define UNISONO_BENCH_FUNCTIONS(X)                                                               \
  X(ncclGetUniqueId) X(ncclCommInitRank) X(ncclCommDestroy) X(ncclCommAbort) X(ncclGroupStart)   \
  X(ncclGroupEnd) X(ncclAllReduce) X(ncclAllGather) X(ncclReduceScatter) X(ncclBroadcast)        \
  X(ncclReduce) X(ncclSend) X(ncclRecv) X(ncclCommGetAsyncError)
// Later additions to the API: null if the library is older.
#define UNISONO_BENCH_LATER_FUNCTIONS(X)                                                         \
  X(ncclAlltoAll) X(ncclGather) X(ncclScatter) X(ncclRedOpCreatePreMulSum) X(ncclRedOpDestroy)   \
  X(ncclCommRegister) X(ncclCommDeregister) X(ncclCommWindowRegister)                            \
  X(ncclCommWindowDeregister) X(ncclMemAlloc) X(ncclMemFree)
// clang-format on
#define UNISONO_BENCH_MEMBER(name) decltype(&::name) name = nullptr;
  UNISONO_BENCH_FUNCTIONS(UNISONO_BENCH_MEMBER)
  UNISONO_BENCH_LATER_FUNCTIONS(UNISONO_BENCH_MEMBER)
#undef UNISONO_BENCH_MEMBER

 private:
  struct Close {
    void operator()(void* handle) const;
  };
  std::unique_ptr<void, Close> handle_;
  std::string path_;
  int version_ = 0;
  decltype(&::ncclGetErrorString) errorString_ = nullptr;
  decltype(&::ncclGetLastError) lastError_ = nullptr;
};

// ../lib/libnccl.so.2, relative to the directory of this program.
std::string defaultLibraryPath();

}  // namespace unisono::bench
