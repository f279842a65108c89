// Every function of the API up to NCCL 2.30.7 that this version of the library lacks. A program
// linked against a newer NCCL thus loads, and learns at the call what is missing.

#include <nccl.h>

#include "api/boundary.h"
#include "api/twins.h"

using unisono::api::notImplemented;

// ---- Declared in nccl.h ----

extern "C" {

ncclResult_t ncclCommRevoke(ncclComm_t, int) {
  return notImplemented("ncclCommRevoke");
}

ncclResult_t ncclCommShrink(ncclComm_t, int*, int, ncclComm_t*, ncclConfig_t*, int) {
  return notImplemented("ncclCommShrink");
}

ncclResult_t ncclCommWindowRegister(ncclComm_t, void*, size_t, ncclWindow_t*, int) {
  return notImplemented("ncclCommWindowRegister");
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) {
  return notImplemented("ncclCommWindowDeregister");
}

}  // extern "C"

UNISONO_TWIN(ncclCommRevoke);
UNISONO_TWIN(ncclCommShrink);
UNISONO_TWIN(ncclCommWindowRegister);
UNISONO_TWIN(ncclCommWindowDeregister);

// ---- Declared in the header of the device API, or only since 2.29 ----
//
// None of these looks at its arguments, so they are defined without any. In the calling conventions
// of x86-64 and AArch64 the caller makes and removes the arguments: the call is safe whatever a
// program passes, and whatever a later version adds.

// The functions that return a status.
#define UNISONO_NOT_IMPLEMENTED(name)                                     \
  extern "C" __attribute__((visibility("default"))) ncclResult_t name() { \
    return notImplemented(#name);                                         \
  }                                                                       \
  UNISONO_TWIN(name)

// Device communicators and what they are asked for.
UNISONO_NOT_IMPLEMENTED(ncclDevCommCreate);
UNISONO_NOT_IMPLEMENTED(ncclDevCommDestroy);
UNISONO_NOT_IMPLEMENTED(ncclGinBarrierCreateRequirement);
UNISONO_NOT_IMPLEMENTED(ncclGinInboxA2ACreateRequirement);
UNISONO_NOT_IMPLEMENTED(ncclGinOutboxCreateRequirement);
UNISONO_NOT_IMPLEMENTED(ncclLLA2ACreateRequirement);
UNISONO_NOT_IMPLEMENTED(ncclLsaBarrierCreateRequirement);

// A communicator's life and properties.
UNISONO_NOT_IMPLEMENTED(ncclCommGetUniqueId);
UNISONO_NOT_IMPLEMENTED(ncclCommGrow);
UNISONO_NOT_IMPLEMENTED(ncclCommMemStats);
UNISONO_NOT_IMPLEMENTED(ncclCommQueryProperties);
UNISONO_NOT_IMPLEMENTED(ncclCommResume);
UNISONO_NOT_IMPLEMENTED(ncclCommSuspend);

// Addresses inside a window.
UNISONO_NOT_IMPLEMENTED(ncclGetLsaDevicePointer);
UNISONO_NOT_IMPLEMENTED(ncclGetLsaMultimemDevicePointer);
UNISONO_NOT_IMPLEMENTED(ncclGetMultimemDevicePointer);
UNISONO_NOT_IMPLEMENTED(ncclGetPeerDevicePointer);
UNISONO_NOT_IMPLEMENTED(ncclWinGetUserPtr);

// One-sided communication.
UNISONO_NOT_IMPLEMENTED(ncclPutSignal);
UNISONO_NOT_IMPLEMENTED(ncclSignal);
UNISONO_NOT_IMPLEMENTED(ncclWaitSignal);

// Settings by name.
UNISONO_NOT_IMPLEMENTED(ncclParamBind);
UNISONO_NOT_IMPLEMENTED(ncclParamGet);
UNISONO_NOT_IMPLEMENTED(ncclParamGetAllParameterKeys);
UNISONO_NOT_IMPLEMENTED(ncclParamGetI16);
UNISONO_NOT_IMPLEMENTED(ncclParamGetI32);
UNISONO_NOT_IMPLEMENTED(ncclParamGetI64);
UNISONO_NOT_IMPLEMENTED(ncclParamGetI8);
UNISONO_NOT_IMPLEMENTED(ncclParamGetParameter);
UNISONO_NOT_IMPLEMENTED(ncclParamGetStr);
UNISONO_NOT_IMPLEMENTED(ncclParamGetU16);
UNISONO_NOT_IMPLEMENTED(ncclParamGetU32);
UNISONO_NOT_IMPLEMENTED(ncclParamGetU64);
UNISONO_NOT_IMPLEMENTED(ncclParamGetU8);

#undef UNISONO_NOT_IMPLEMENTED

// What returns no status says so through ncclGetLastError alone, and gives a result that no
// working call gives.

// The layout and the size decide in which registers it is returned: three ints, 12 bytes.
struct ncclTeam {
  int nRanks, rank, stride;
};
static_assert(sizeof(ncclTeam) == 12, "two registers in both calling conventions");

namespace {

// No ranks, so that a loop over the team does nothing.
ncclTeam emptyTeam(const char* function) {
  notImplemented(function);
  return ncclTeam{0, 0, 0};
}

// A rank of no team.
int noRank(const char* function) {
  notImplemented(function);
  return -1;
}

}  // namespace

extern "C" {
#pragma GCC visibility push(default)

ncclTeam ncclTeamLsa() {
  return emptyTeam("ncclTeamLsa");
}
ncclTeam ncclTeamRail() {
  return emptyTeam("ncclTeamRail");
}
ncclTeam ncclTeamWorld() {
  return emptyTeam("ncclTeamWorld");
}

int ncclTeamRankToLsa() {
  return noRank("ncclTeamRankToLsa");
}
int ncclTeamRankToWorld() {
  return noRank("ncclTeamRankToWorld");
}

int ncclLLA2ACalcSlots() {
  notImplemented("ncclLLA2ACalcSlots");
  return 0;
}

void ncclParamDumpAll() {
  notImplemented("ncclParamDumpAll");
}

#pragma GCC visibility pop
}  // extern "C"

UNISONO_TWIN(ncclTeamLsa);
UNISONO_TWIN(ncclTeamRail);
UNISONO_TWIN(ncclTeamWorld);
UNISONO_TWIN(ncclTeamRankToLsa);
UNISONO_TWIN(ncclTeamRankToWorld);
UNISONO_TWIN(ncclLLA2ACalcSlots);
UNISONO_TWIN(ncclParamDumpAll);
