// SPDX-License-Identifier: Apache-2.0
// nccl.h as the first header of a C++ program.
#include <nccl.h>

#include <type_traits>

#include "api_header_facts.h"

template <typename Result, typename... Arguments>
using Function = Result(Arguments...);

// The function has this signature, and its alias the same. Top-level const is not part of a type:
// `const ncclComm_t comm` counts as ncclComm_t.
#define SIGNATURE(name, ...)                                                        \
  static_assert(std::is_same<decltype(name), Function<__VA_ARGS__>>::value, #name); \
  static_assert(std::is_same<decltype(p##name), Function<__VA_ARGS__>>::value, "p" #name)

// ncclResetDebugInit is deprecated, also for naming its type.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

SIGNATURE(ncclGetVersion, ncclResult_t, int*);
SIGNATURE(ncclGetErrorString, const char*, ncclResult_t);
SIGNATURE(ncclGetLastError, const char*, ncclComm_t);
SIGNATURE(ncclGetUniqueId, ncclResult_t, ncclUniqueId*);
SIGNATURE(ncclCommInitRank, ncclResult_t, ncclComm_t*, int, ncclUniqueId, int);
SIGNATURE(ncclCommInitRankConfig, ncclResult_t, ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*);
SIGNATURE(ncclCommInitRankScalable, ncclResult_t, ncclComm_t*, int, int, int, ncclUniqueId*,
          ncclConfig_t*);
SIGNATURE(ncclCommInitAll, ncclResult_t, ncclComm_t*, int, const int*);
SIGNATURE(ncclCommSplit, ncclResult_t, ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*);
SIGNATURE(ncclCommShrink, ncclResult_t, ncclComm_t, int*, int, ncclComm_t*, ncclConfig_t*, int);
SIGNATURE(ncclCommFinalize, ncclResult_t, ncclComm_t);
SIGNATURE(ncclCommDestroy, ncclResult_t, ncclComm_t);
SIGNATURE(ncclCommAbort, ncclResult_t, ncclComm_t);
SIGNATURE(ncclCommRevoke, ncclResult_t, ncclComm_t, int);
SIGNATURE(ncclCommGetAsyncError, ncclResult_t, ncclComm_t, ncclResult_t*);
SIGNATURE(ncclCommCount, ncclResult_t, ncclComm_t, int*);
SIGNATURE(ncclCommCuDevice, ncclResult_t, ncclComm_t, int*);
SIGNATURE(ncclCommUserRank, ncclResult_t, ncclComm_t, int*);
SIGNATURE(ncclMemAlloc, ncclResult_t, void**, size_t);
SIGNATURE(ncclMemFree, ncclResult_t, void*);
SIGNATURE(ncclCommRegister, ncclResult_t, ncclComm_t, void*, size_t, void**);
SIGNATURE(ncclCommDeregister, ncclResult_t, ncclComm_t, void*);
SIGNATURE(ncclCommWindowRegister, ncclResult_t, ncclComm_t, void*, size_t, ncclWindow_t*, int);
SIGNATURE(ncclCommWindowDeregister, ncclResult_t, ncclComm_t, ncclWindow_t);
SIGNATURE(ncclRedOpCreatePreMulSum, ncclResult_t, ncclRedOp_t*, void*, ncclDataType_t,
          ncclScalarResidence_t, ncclComm_t);
SIGNATURE(ncclRedOpDestroy, ncclResult_t, ncclRedOp_t, ncclComm_t);
SIGNATURE(ncclAllReduce, ncclResult_t, const void*, void*, size_t, ncclDataType_t, ncclRedOp_t,
          ncclComm_t, cudaStream_t);
SIGNATURE(ncclReduce, ncclResult_t, const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, int,
          ncclComm_t, cudaStream_t);
SIGNATURE(ncclBroadcast, ncclResult_t, const void*, void*, size_t, ncclDataType_t, int, ncclComm_t,
          cudaStream_t);
SIGNATURE(ncclBcast, ncclResult_t, void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
SIGNATURE(ncclReduceScatter, ncclResult_t, const void*, void*, size_t, ncclDataType_t, ncclRedOp_t,
          ncclComm_t, cudaStream_t);
SIGNATURE(ncclAllGather, ncclResult_t, const void*, void*, size_t, ncclDataType_t, ncclComm_t,
          cudaStream_t);
SIGNATURE(ncclAlltoAll, ncclResult_t, const void*, void*, size_t, ncclDataType_t, ncclComm_t,
          cudaStream_t);
SIGNATURE(ncclGather, ncclResult_t, const void*, void*, size_t, ncclDataType_t, int, ncclComm_t,
          cudaStream_t);
SIGNATURE(ncclScatter, ncclResult_t, const void*, void*, size_t, ncclDataType_t, int, ncclComm_t,
          cudaStream_t);
SIGNATURE(ncclSend, ncclResult_t, const void*, size_t, ncclDataType_t, int, ncclComm_t,
          cudaStream_t);
SIGNATURE(ncclRecv, ncclResult_t, void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
SIGNATURE(ncclGroupStart, ncclResult_t);
SIGNATURE(ncclGroupEnd, ncclResult_t);
SIGNATURE(ncclGroupSimulateEnd, ncclResult_t, ncclSimInfo_t*);
SIGNATURE(ncclResetDebugInit, void);
