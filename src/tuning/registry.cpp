// SPDX-License-Identifier: Apache-2.0
#include "tuning/registry.h"

#include <algorithm>
#include <iterator>

namespace unisono::tuning {
namespace {

constexpr Operation kOperations[kCollectives] = {Operation::allReduce, Operation::allGather,
                                                 Operation::reduceScatter, Operation::broadcast,
                                                 Operation::reduce};

struct Implemented {
  Algorithm algorithm;
  Protocol protocol;
  bool of[kCollectives];  // by device::Operation
};
// clang-format off
constexpr Implemented kImplemented[] = {
    //                                    AllReduce AllGather ReduceScatter Broadcast Reduce
    {Algorithm::ring,    Protocol::ll,     {true,    true,     true,         true,     true}},
    {Algorithm::ring,    Protocol::ll128,  {true,    true,     true,         true,     true}},
    {Algorithm::ring,    Protocol::simple, {true,    true,     true,         true,     true}},
    {Algorithm::tree,    Protocol::ll,     {true,    false,    false,        false,    false}},
    {Algorithm::tree,    Protocol::ll128,  {true,    false,    false,        false,    false}},
    {Algorithm::tree,    Protocol::simple, {true,    false,    false,        false,    false}},
    {Algorithm::direct,  Protocol::ll,     {true,    true,     true,         true,     true}},
    {Algorithm::direct,  Protocol::ll128,  {true,    true,     true,         true,     true}},
    {Algorithm::twoShot, Protocol::ll128,  {true,    false,    false,        false,    false}},
};
// What runs only where the user's lists leave none of the above.
constexpr Implemented kOnlyForced[] = {
    {Algorithm::nvls, Protocol::simple, {true,      true,     true,         false,    false}},
    {Algorithm::nvlsTree, Protocol::simple, {true,  false,    false,        false,    false}},
    {Algorithm::collNetChain, Protocol::simple, {true, false, false,        false,    false}},
    {Algorithm::collNetDirect, Protocol::simple, {true, true, true,         false,    false}},
    {Algorithm::directTree, Protocol::ll,     {true, false,   false,        false,    false}},
    {Algorithm::directTree, Protocol::ll128,  {true, false,   false,        false,    false}},
    {Algorithm::directTree, Protocol::simple, {true, false,   false,        false,    false}},
};
// clang-format on

// Whether there is a row for each algorithm and protocol that the kernel for collectives has.
constexpr bool isEntered(Algorithm algorithm, Protocol protocol) {
  const auto isIt = [&](const Implemented& row) {
    return row.algorithm == algorithm && row.protocol == protocol;
  };
  return std::any_of(std::begin(kImplemented), std::end(kImplemented), isIt) ||
         std::any_of(std::begin(kOnlyForced), std::end(kOnlyForced), isIt);
}
template <Algorithm kAlgorithm, Protocol... kList>
constexpr bool areEntered(device::ProtocolList<kList...>) {
  return (isEntered(kAlgorithm, kList) && ...);
}
template <Algorithm... kList>
constexpr bool areEntered(device::AlgorithmList<kList...>) {
  return (areEntered<kList>(device::CollectiveProtocols()) && ...);
}
static_assert(areEntered(device::CollectiveAlgorithms()), "an algorithm or protocol has no row");

}  // namespace

std::string_view reasonOf(Exclusion exclusion) {
  switch (exclusion) {
    case Exclusion::none:
      return "";
    case Exclusion::operation:
      return "does not do this operation";
    case Exclusion::protocol:
      return "does not use this protocol";
    case Exclusion::notImplemented:
      return "not implemented yet";
    case Exclusion::onlyForced:
      return "runs only where NCCL_ALGO and NCCL_PROTO leave nothing else";
    case Exclusion::oneRank:
      return "one rank has nothing to transfer";
    case Exclusion::oneNode:
      return "only for several nodes";
    case Exclusion::severalNodes:
      return "only inside one node";
    case Exclusion::ranksPerNode:
      return "only with one rank per node";
    case Exclusion::unequalNodes:
      return "only with the same number of ranks on each node, two or more";
    case Exclusion::patDisabled:
      return "disabled by NCCL_PAT_ENABLE=0";
    case Exclusion::noMulticast:
      return "no NVLink multicast";
    case Exclusion::noCollnet:
      return "the network does not reduce (CollNet)";
    case Exclusion::networkOperation:
      return "the network (CollNet) does not do this operation, or not with this type and operator";
    case Exclusion::noSwitch:
      return "no NVSwitch";
    case Exclusion::tooManyRanks:
      return "too many ranks on a node";
    case Exclusion::noChannels:
      return "the search found too few channels";
    case Exclusion::unreachable:
      return "some ranks cannot access each other's memory";
    case Exclusion::farPorts:
      return "between nodes it is for adapters that reach memory of the GPU, as with NCCL";
    case Exclusion::splitLines:
      return "stores of 128 bytes may be split on this path";
    case Exclusion::tooLarge:
      return "more bytes than its buffers hold";
    case Exclusion::type:
      return "multicast does not reduce this type";
    case Exclusion::reduction:
      return "does not apply this operator";
    case Exclusion::order:
      return "does not reduce in the order of the ranks (UNISONO_DETERMINISTIC)";
    case Exclusion::notMeasured:
      return "no measured time for this machine";
    case Exclusion::tuner:
      return "ruled out by the tuner plug-in";
  }
  return "";
}

Exclusion definitionOf(Operation operation, Algorithm algorithm, Protocol protocol) {
  const bool reduces = operation == Operation::allReduce;
  const bool scatters = operation == Operation::allGather || operation == Operation::reduceScatter;
  const bool simple = protocol == Protocol::simple;
  const auto verdict = [](bool operationFits, bool protocolFits) {
    return !operationFits  ? Exclusion::operation
           : !protocolFits ? Exclusion::protocol
                           : Exclusion::none;
  };
  switch (algorithm) {
    case Algorithm::ring:
      return Exclusion::none;
    case Algorithm::tree:
      return verdict(reduces, true);
    case Algorithm::collNetDirect:
    case Algorithm::nvls:
      return verdict(reduces || scatters, simple);
    case Algorithm::collNetChain:
    case Algorithm::nvlsTree:
      return verdict(reduces, simple);
    case Algorithm::pat:
      return verdict(scatters, simple);
    case Algorithm::direct:
      return Exclusion::none;
    case Algorithm::twoShot:
    case Algorithm::directTree:
      return verdict(reduces, true);
  }
  return Exclusion::operation;
}

const Registry& libraryRegistry() {
  static const Registry registry = [] {
    Registry result;
    const auto enter = [](const auto& entries, auto& table) {
      for (const Implemented& entry : entries) {
        for (size_t o = 0; o < kCollectives; o++) {
          table[o][static_cast<int>(entry.algorithm)][static_cast<int>(entry.protocol)] =
              entry.of[o];
        }
      }
    };
    enter(kImplemented, result.implemented);
    enter(kOnlyForced, result.onlyForced);
    return result;
  }();
  return registry;
}

const Registry& ncclRegistry() {
  static const Registry registry = [] {
    Registry result;
    result.formulasOnly = true;
    for (const Operation operation : kOperations) {
      for (int a = 0; a < device::kNcclAlgorithms; a++) {
        for (int p = 0; p < device::kProtocols; p++) {
          result.implemented[static_cast<int>(operation)][a][p] =
              definitionOf(operation, static_cast<Algorithm>(a), static_cast<Protocol>(p)) ==
              Exclusion::none;
        }
      }
    }
    return result;
  }();
  return registry;
}

}  // namespace unisono::tuning
