// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <dlfcn.h>

#include <map>
#include <string>

// The network plug-in of system/fake_net.c, one library for each version of the interface.
namespace unisono::testing {

inline std::string fakeNetPath(int version) {
  return std::string(UNISONO_FAKE_NETS) + "/libnccl-net-fake" + std::to_string(version) + ".so";
}

// For FAKE_NET_PORTS: the adapters next to the GPUs of
// tests/data/topologies/h800x8-vm.detected.xml.
inline constexpr const char* kFakeNetPorts =
    "0000:65:01.0,0000:67:01.0,0000:69:01.0,0000:6b:01.0,0000:6f:01.0,0000:71:01.0,0000:73:01.0,"
    "0000:75:01.0";

// What makes a network that reduces of the plug-in, with the GPUs of that file.
inline const std::map<std::string, std::string>& collNetVariables() {
  static const std::map<std::string, std::string> variables = {{"NCCL_COLLNET_ENABLE", "1"},
                                                               {"NCCL_NET_PLUGIN", fakeNetPath(11)},
                                                               {"FAKE_NET_PORTS", kFakeNetPorts}};
  return variables;
}

// A number that the plug-in counts in this process.
inline int fakeNetCounter(int version, const char* name) {
  void* library = ::dlopen(fakeNetPath(version).c_str(), RTLD_NOW | RTLD_LOCAL);
  const int value = __atomic_load_n(static_cast<int*>(::dlsym(library, name)), __ATOMIC_SEQ_CST);
  ::dlclose(library);
  return value;
}

}  // namespace unisono::testing
