// SPDX-License-Identifier: Apache-2.0
// Every function of the API up to NCCL 2.32.3 that this library does not implement. A program that
// was linked against a newer NCCL can thus be loaded, and gets an error when it calls one of them.

#include <nccl.h>

#include "api/aliases.h"
#include "api/boundary.h"

using unisono::api::notImplemented;

// nccl.h is that of 2.28.9 and does not declare these, which are in the header of the device API or
// newer. None of them uses its arguments, so they are
// defined without any: in the calling conventions of x86-64 and AArch64 the caller creates and
// removes the arguments, so that a call is safe whatever a program passes.

// The functions that return a status.
#define UNISONO_NOT_IMPLEMENTED(name)                                     \
  extern "C" __attribute__((visibility("default"))) ncclResult_t name() { \
    return notImplemented(#name);                                         \
  }                                                                       \
  UNISONO_ALIAS(name)

// Collectives with a configuration for the single call (2.31).
UNISONO_NOT_IMPLEMENTED(ncclAllGatherConfig);
UNISONO_NOT_IMPLEMENTED(ncclAllReduceConfig);
UNISONO_NOT_IMPLEMENTED(ncclAlltoAllConfig);
UNISONO_NOT_IMPLEMENTED(ncclBroadcastConfig);
UNISONO_NOT_IMPLEMENTED(ncclGatherConfig);
UNISONO_NOT_IMPLEMENTED(ncclReduceConfig);
UNISONO_NOT_IMPLEMENTED(ncclReduceScatterConfig);
UNISONO_NOT_IMPLEMENTED(ncclScatterConfig);

// Device communicators and their resources.
UNISONO_NOT_IMPLEMENTED(ncclDevCommCreate);
UNISONO_NOT_IMPLEMENTED(ncclDevCommDestroy);
UNISONO_NOT_IMPLEMENTED(ncclGinBarrierCreateRequirement);
UNISONO_NOT_IMPLEMENTED(ncclGinInboxA2ACreateRequirement);
UNISONO_NOT_IMPLEMENTED(ncclGinOutboxCreateRequirement);
UNISONO_NOT_IMPLEMENTED(ncclLLA2ACreateRequirement);
UNISONO_NOT_IMPLEMENTED(ncclLsaBarrierCreateRequirement);

// Addresses inside a window.
UNISONO_NOT_IMPLEMENTED(ncclGetCftDeviceLeInfo);
UNISONO_NOT_IMPLEMENTED(ncclGetMultimemDeviceLeInfo);
UNISONO_NOT_IMPLEMENTED(ncclGetMultimemDevicePointer);
UNISONO_NOT_IMPLEMENTED(ncclGetPeerDeviceLeInfo);

// One-sided communication.
UNISONO_NOT_IMPLEMENTED(ncclPutSignal);
UNISONO_NOT_IMPLEMENTED(ncclSignal);
UNISONO_NOT_IMPLEMENTED(ncclWaitSignal);

// Encryption of the library's own connections.
UNISONO_NOT_IMPLEMENTED(ncclSetEncryption);

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

// The functions that return no status report the error through ncclGetLastError alone, and return a
// value that none of them returns on success.

// ncclTeam is returned by value, so that its layout is part of the ABI: three ints, 12 bytes.
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

}  // namespace

extern "C" {
#pragma GCC visibility push(default)

ncclTeam ncclTeamCft() {
  return emptyTeam("ncclTeamCft");
}
ncclTeam ncclTeamCftMultimem() {
  return emptyTeam("ncclTeamCftMultimem");
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

UNISONO_ALIAS(ncclTeamCft);
UNISONO_ALIAS(ncclTeamCftMultimem);
UNISONO_ALIAS(ncclLLA2ACalcSlots);
UNISONO_ALIAS(ncclParamDumpAll);
