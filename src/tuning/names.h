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

std::string_view nameOf(Operation operation);  // "AllReduce"
using device::nameOf;                          // "CollNetDirect", "LL128"

// The index of the operation, algorithm or protocol with this name; -1 if there is none.
int findOperation(std::string_view name);
int findAlgorithm(std::string_view name);
int findProtocol(std::string_view name);

// All names, separated by commas.
std::string operationNames();
std::string algorithmNames();
std::string protocolNames();

}  // namespace unisono::tuning
