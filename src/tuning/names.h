// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "device/algorithm.h"
#include "device/work.h"

// The names of operations, algorithms and protocols, as NCCL spells them. Case does not matter.
namespace unisono::tuning {

using device::Algorithm;
using device::Operation;
using device::Protocol;

// The operations that have a choice: those of device::Operation before `local`.
inline constexpr int kCollectives = 5;

// Calls that are messages. They have no choice of algorithm, but paths.
enum class MessageOperation : uint8_t { sendReceive, allToAll, gather, scatter };
inline constexpr int kMessageOperations = 4;

// What can carry a message, in the order in which it is tried.
enum class MessagePath : uint8_t {
  copyEngines,  // between the windows of all ranks
  directLl,     // kernels of the direct family, over LL
  directLl128,  // and over LL128
  fifoLl,       // FIFOs of channels, over LL
  fifoSimple,   // and over Simple
};
inline constexpr int kMessagePaths = 5;

std::string_view nameOf(Operation operation);         // "AllReduce"
std::string_view nameOf(MessageOperation operation);  // "SendReceive"
std::string_view nameOf(MessagePath path);            // "CopyEngines", "Direct LL"
using device::nameOf;                                 // "CollNetDirect", "LL128"

// The index of the operation, algorithm or protocol with this name; -1 if there is none.
int findOperation(std::string_view name);
int findAlgorithm(std::string_view name);
int findProtocol(std::string_view name);
int findMessageOperation(std::string_view name);
int findMessagePath(std::string_view name);

// All names, separated by commas.
std::string operationNames();
std::string algorithmNames();
std::string protocolNames();
std::string messageOperationNames();
std::string messagePathNames();  // without copy engines, which have no protocol

}  // namespace unisono::tuning
