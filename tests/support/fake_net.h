// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <dlfcn.h>

#include <map>
#include <string>

// The network plug-in of system/fake_net.c, one library for each version of the interface.
namespace unisono::testing {

inline std::string fakeNetPath(int version) {
  std::string path = UNISONO_FAKE_NETS "/libnccl-net-fake";
  path += std::to_string(version);
  return path += ".so";
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

// Calls `use` with a number of the plug-in in this process.
template <typename Use>
auto useFakeNetCounter(int version, const char* name, Use use) {
  void* library = ::dlopen(fakeNetPath(version).c_str(), RTLD_NOW | RTLD_LOCAL);
  const auto result = use(static_cast<int*>(::dlsym(library, name)));
  ::dlclose(library);
  return result;
}

// A number that the plug-in counts.
inline int fakeNetCounter(int version, const char* name) {
  return useFakeNetCounter(version, name,
                           [](int* value) { return __atomic_load_n(value, __ATOMIC_SEQ_CST); });
}

// Makes calls of the plug-in that hang keep the thread that makes them, or lets them return.
inline void holdFakeNet(int version, bool holds) {
  useFakeNetCounter(version, "fakeNetHolds", [holds](int* value) {
    return __atomic_exchange_n(value, holds ? 1 : 0, __ATOMIC_SEQ_CST);
  });
}

}  // namespace unisono::testing
