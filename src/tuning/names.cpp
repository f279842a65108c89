// SPDX-License-Identifier: Apache-2.0
#include "tuning/names.h"

#include <fmt/ranges.h>
#include <strings.h>

#include <array>
#include <span>

namespace unisono::tuning {
namespace {

constexpr std::string_view kOperationNames[kCollectives] = {"AllReduce", "AllGather",
                                                            "ReduceScatter", "Broadcast", "Reduce"};
template <typename Kind, size_t kCount>
constexpr std::array<std::string_view, kCount> namesOf() {
  std::array<std::string_view, kCount> names;
  for (size_t i = 0; i < kCount; i++) names[i] = device::nameOf(static_cast<Kind>(i));
  return names;
}
constexpr auto kAlgorithmNames = namesOf<Algorithm, device::kAlgorithms>();
constexpr auto kProtocolNames = namesOf<Protocol, device::kProtocols>();
constexpr std::string_view kMessageOperationNames[kMessageOperations] = {"SendReceive", "AllToAll",
                                                                         "Gather", "Scatter"};
constexpr std::string_view kMessagePathNames[kMessagePaths] = {
    "CopyEngines", "Direct LL", "Direct LL128", "FIFO LL", "FIFO Simple"};

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
std::string_view nameOf(MessageOperation operation) {
  return kMessageOperationNames[static_cast<int>(operation)];
}
std::string_view nameOf(MessagePath path) {
  return kMessagePathNames[static_cast<int>(path)];
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
int findMessageOperation(std::string_view name) {
  return find(kMessageOperationNames, name);
}
int findMessagePath(std::string_view name) {
  return find(kMessagePathNames, name);
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
std::string messageOperationNames() {
  return fmt::format("{}", fmt::join(kMessageOperationNames, ", "));
}
std::string messagePathNames() {
  static_assert(static_cast<int>(MessagePath::copyEngines) == 0);
  return fmt::format("{}", fmt::join(Names(kMessagePathNames).subspan(1), ", "));
}

}  // namespace unisono::tuning
