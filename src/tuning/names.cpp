// SPDX-License-Identifier: Apache-2.0
#include "tuning/names.h"

#include <fmt/ranges.h>
#include <strings.h>

#include <span>

namespace unisono::tuning {
namespace {

constexpr std::string_view kOperationNames[kCollectives] = {"AllReduce", "AllGather",
                                                            "ReduceScatter", "Broadcast", "Reduce"};
constexpr std::string_view kAlgorithmNames[device::kAlgorithms] = {
    "Tree",     "Ring", "CollNetDirect", "CollNetChain", "NVLS",
    "NVLSTree", "PAT",  "Direct",        "TwoShot"};
constexpr std::string_view kProtocolNames[device::kProtocols] = {"LL", "LL128", "Simple"};

using Names = std::span<const std::string_view>;

int find(Names names, std::string_view name) {
  for (size_t i = 0; i < names.size(); i++) {
    if (names[i].size() == name.size() &&
        ::strncasecmp(names[i].data(), name.data(), name.size()) == 0) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

}  // namespace

std::string_view nameOf(Operation operation) {
  return kOperationNames[static_cast<int>(operation)];
}
std::string_view nameOf(Algorithm algorithm) {
  return kAlgorithmNames[static_cast<int>(algorithm)];
}
std::string_view nameOf(Protocol protocol) {
  return kProtocolNames[static_cast<int>(protocol)];
}

int findOperation(std::string_view name) {
  return find(kOperationNames, name);
}
int findAlgorithm(std::string_view name) {
  return find(kAlgorithmNames, name);
}
int findProtocol(std::string_view name) {
  return find(kProtocolNames, name);
}

std::string operationNames() {
  return fmt::format("{}", fmt::join(kOperationNames, ", "));
}
std::string algorithmNames() {
  return fmt::format("{}", fmt::join(kAlgorithmNames, ", "));
}
std::string protocolNames() {
  return fmt::format("{}", fmt::join(kProtocolNames, ", "));
}

}  // namespace unisono::tuning
