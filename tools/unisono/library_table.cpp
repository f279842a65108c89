// SPDX-License-Identifier: Apache-2.0
#include "library_table.h"

#include <dlfcn.h>
#include <link.h>

#include <filesystem>

#include "base/error.h"

namespace unisono::bench {

void Library::Close::operator()(void* handle) const {
  ::dlclose(handle);
}

Library::Library(const std::string& path) {
  std::error_code ignored;
  std::string absolute = std::filesystem::absolute(path, ignored).string();
  if (!std::filesystem::exists(absolute, ignored)) {
    throw invalidArgument("library not found: {}", absolute)
        .remedy("Build it first, or name another with --library or --against");
  }
  // Never unmapped, because threads of a library may outlive its last communicator.
  handle_.reset(::dlopen(absolute.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE));
  if (!handle_) {
    const char* reason = ::dlerror();
    throw Error(ErrorCode::systemError,
                fmt::format("cannot load {}: {}", absolute, reason ? reason : "unknown reason"));
  }
  link_map* map = nullptr;
  bool known = ::dlinfo(handle_.get(), RTLD_DI_LINKMAP, &map) == 0 && map != nullptr;
  path_ = known ? map->l_name : absolute;

#define UNISONO_BENCH_REQUIRE(name) name = reinterpret_cast<decltype(name)>(require(#name));
  UNISONO_BENCH_FUNCTIONS(UNISONO_BENCH_REQUIRE)
#undef UNISONO_BENCH_REQUIRE
#define UNISONO_BENCH_FIND(name) name = reinterpret_cast<decltype(name)>(find(#name));
  UNISONO_BENCH_LATER_FUNCTIONS(UNISONO_BENCH_FIND)
#undef UNISONO_BENCH_FIND
  errorString_ = reinterpret_cast<decltype(errorString_)>(require("ncclGetErrorString"));
  lastError_ = reinterpret_cast<decltype(lastError_)>(find("ncclGetLastError"));
  auto getVersion = reinterpret_cast<decltype(&::ncclGetVersion)>(require("ncclGetVersion"));
  check(getVersion(&version_), "ncclGetVersion");
}

std::string Library::versionText() const {
  return fmt::format("{}.{}.{}", version_ / 10000, version_ / 100 % 100, version_ % 100);
}

void* Library::find(const char* name) const {
  return ::dlsym(handle_.get(), name);
}

void* Library::require(const char* name) const {
  void* address = find(name);
  if (address == nullptr) {
    throw invalidUsage("{} has no function {}", path_, name)
        .remedy("Name a library that has it with --library or --against");
  }
  return address;
}

void Library::check(ncclResult_t result, const char* call) const {
  if (result == ncclSuccess) return;
  const char* details = lastError_ != nullptr ? lastError_(nullptr) : nullptr;
  const bool hasDetails = details != nullptr && details[0] != '\0';
  // ncclGetErrorString says less; it is for libraries without ncclGetLastError.
  throw Error(
      static_cast<ErrorCode>(result),
      fmt::format("{} failed in {}: {}", call, path_, hasDetails ? details : errorString_(result)));
}

std::string defaultLibraryPath() {
  std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe");
  return (program.parent_path().parent_path() / "lib" / "libnccl.so.2").string();
}

}  // namespace unisono::bench
