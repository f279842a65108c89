// SPDX-License-Identifier: Apache-2.0
#include "comm/identity.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string_view>

#include "base/fnv.h"
#include "base/system.h"
#include "runtime/descriptor_service.h"

namespace unisono::comm {
namespace {

uint64_t hashOf(std::string_view text) {
  Fnv hash;
  hash.add(text);
  return hash.value();
}

}  // namespace

uint64_t machineHash() {
  // Not the host name: containers of one machine have different ones and can share memory.
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string bootId;
  std::getline(file, bootId);
  return hashOf(bootId.empty() ? hostName() : bootId);
}

uint64_t hostHash(const Settings& settings) {
  if (!settings.hostId.empty()) return hashOf(settings.hostId);
  Fnv hash;
  hash.add(machineHash());
  hash.add(runtime::networkNamespace());
  hash.add(uint64_t{::geteuid()});
  return hash.value();
}

uint64_t sharedMemoryDevice() {
  struct stat status {};
  return ::stat("/dev/shm", &status) == 0 ? status.st_dev : 0;
}

}  // namespace unisono::comm
