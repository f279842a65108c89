// SPDX-License-Identifier: Apache-2.0
// What NCCL's headers since 2.29 ask of a communicator on the CPU. nccl.h is that of 2.28.9, so
// that what they declare is repeated here.
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "api/aliases.h"
#include "api/arguments.h"
#include "api/boundary.h"
#include "comm/node_machine.h"
#include "comm/registry.h"

using namespace unisono;

namespace {

constexpr unsigned kPropertiesMagic = 0xcafebeef;

// ncclCommProperties. 2.29.2 has nothing after the two bools but a byte, the kind of a network for
// one-sided operations; 0 is none in all versions.
struct Properties {
  size_t size;
  unsigned magic;
  unsigned version;
  int rank;
  int ranks;
  int device;
  int driverDevice;
  bool hasDeviceApi;
  bool hasMulticast;
  int networkKind;
  int loadStoreTeams;
  bool hasOneSided;
  int railNetworkKind;
};
static_assert(offsetof(Properties, hasDeviceApi) == 32 && sizeof(Properties) == 56);
constexpr size_t kSmallestProperties = 40;

// ncclTeam is returned by value, so that its layout is part of the ABI.
struct Team {
  int ranks, rank, stride;
};
static_assert(sizeof(Team) == 12, "two registers in both calling conventions");

int worldRankOf(const comm::Communicator& communicator, const Team& team, int rank) {
  return communicator.rank() + (rank - team.rank) * team.stride;
}

// For functions without a status: what `find` returns for a communicator, or after an error, which
// ncclGetLastError tells, `otherwise`.
template <typename Value, typename Find>
Value findFor(ncclComm_t comm, Value otherwise, Find find) {
  Value found = otherwise;
  static_cast<void>(api::guarded([&] { found = find(*comm::communicatorOf(comm)); }));
  return found;
}

}  // namespace

extern "C" {
#pragma GCC visibility push(default)

// Later versions append fields; 0 means that the capability is absent.
ncclResult_t ncclCommQueryProperties(ncclComm_t comm, Properties* props) {
  return api::guarded([&] {
    const auto communicator = comm::communicatorOf(comm);
    api::checkNotNull(props, "props");
    if (props->magic != kPropertiesMagic || props->size < kSmallestProperties) {
      throw invalidUsage("props was not initialized")
          .remedy("Initialize it with NCCL_COMM_PROPERTIES_INITIALIZER");
    }
    Properties known{};
    known.size = props->size;
    known.magic = props->magic;
    known.version = props->version;
    known.rank = communicator->rank();
    known.ranks = communicator->ranks();
    known.device = communicator->device();
    known.driverDevice =
        comm::driverDeviceOf(communicator->runtime().properties(known.device).busId, known.device);
    known.loadStoreTeams = known.ranks / communicator->loadStoreTeam().ranks;
    const size_t begin = offsetof(Properties, hasDeviceApi);
    std::memset(reinterpret_cast<std::byte*>(props) + begin, 0, props->size - begin);
    // Of the larger structure's fields, in the smaller one only padding is touched.
    std::memcpy(props, &known, std::min(props->size, sizeof(known)));
  });
}

Team ncclTeamWorld(ncclComm_t comm) {
  return findFor(comm, Team{}, [](const comm::Communicator& communicator) {
    return Team{communicator.ranks(), communicator.rank(), 1};
  });
}

// The ranks that reach each other's windows by ncclGetLsaDevicePointer.
Team ncclTeamLsa(ncclComm_t comm) {
  return findFor(comm, Team{}, [](const comm::Communicator& communicator) {
    const auto team = communicator.loadStoreTeam();
    return Team{team.ranks, communicator.rank() - team.first, 1};
  });
}

// The ranks that have the same place in their teams of ncclTeamLsa().
Team ncclTeamRail(ncclComm_t comm) {
  return findFor(comm, Team{}, [](const comm::Communicator& communicator) {
    const int each = communicator.loadStoreTeam().ranks;
    return Team{communicator.ranks() / each, communicator.rank() / each, each};
  });
}

// The rank in ncclTeamLsa() of rank `rank` of a team that this rank is in.
int ncclTeamRankToLsa(ncclComm_t comm, Team team, int rank) {
  return findFor(comm, -1, [&](const comm::Communicator& communicator) {
    return worldRankOf(communicator, team, rank) - communicator.loadStoreTeam().first;
  });
}

// The rank in the communicator of rank `rank` of a team that this rank is in.
int ncclTeamRankToWorld(ncclComm_t comm, Team team, int rank) {
  return findFor(comm, -1, [&](const comm::Communicator& communicator) {
    return worldRankOf(communicator, team, rank);
  });
}

#pragma GCC visibility pop
}  // extern "C"

UNISONO_ALIAS(ncclCommQueryProperties);
UNISONO_ALIAS(ncclTeamLsa);
UNISONO_ALIAS(ncclTeamRail);
UNISONO_ALIAS(ncclTeamRankToLsa);
UNISONO_ALIAS(ncclTeamWorld);
UNISONO_ALIAS(ncclTeamRankToWorld);
