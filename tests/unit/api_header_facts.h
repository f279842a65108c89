// SPDX-License-Identifier: Apache-2.0
// Layouts and numbers of nccl.h that programs compiled against NCCL 2.28.9 on a 64-bit machine
// carry inside them: C++11 and C99, checked by the compiler. It expects nccl.h to be included.
#include <stddef.h>

#define FACT_NAME_(line) fact_at_line_##line
#define FACT_NAME(line) FACT_NAME_(line)
#ifdef __cplusplus
#define FACT(condition) static_assert(condition, #condition)
#define FIELD_SIZE(type, field) sizeof(type::field)
#else
// C99 has no static_assert; an array cannot have a negative size.
#define FACT(condition) typedef char FACT_NAME(__LINE__)[(condition) ? 1 : -1]
#define FIELD_SIZE(type, field) sizeof(((type*)0)->field)
#endif
#define FIELD(type, field, offset, size) \
  FACT(offsetof(type, field) == (offset) && FIELD_SIZE(type, field) == (size))

FACT(NCCL_MAJOR == 2);
FACT(NCCL_MINOR == 28);
FACT(NCCL_PATCH == 9);
FACT(sizeof(NCCL_SUFFIX) == 1);
FACT(NCCL_VERSION_CODE == 22809);
FACT(NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH) == NCCL_VERSION_CODE);
FACT(NCCL_VERSION(2, 8, 4) == 2804);
FACT(NCCL_VERSION(2, 9, 1) == 20901);
FACT(NCCL_VERSION(1, 9, 2) == 10902);
FACT(NCCL_VERSION(3, 1, 2) == 30102);

FACT(NCCL_UNIQUE_ID_BYTES == 128);
FACT(NCCL_CONFIG_UNDEF_INT == -2147483647 - 1);
FACT(NCCL_SPLIT_NOCOLOR == -1);
FACT(NCCL_WIN_DEFAULT == 0);
FACT(NCCL_WIN_COLL_SYMMETRIC == 1);
FACT(NCCL_WIN_REQUIRED_ALIGNMENT == 4096);
FACT(NCCL_CTA_POLICY_DEFAULT == 0);
FACT(NCCL_CTA_POLICY_EFFICIENCY == 1);
FACT(NCCL_CTA_POLICY_ZERO == 2);
FACT(NCCL_SHRINK_DEFAULT == 0);
FACT(NCCL_SHRINK_ABORT == 1);
FACT(NCCL_REVOKE_DEFAULT == 0);
FACT(NCCL_SUSPEND_MEM == 1);

FACT(sizeof(ncclComm_t) == 8);
FACT(sizeof(ncclWindow_t) == 8);
FACT(sizeof(cudaStream_t) == 8);
FACT(sizeof(ncclUniqueId) == 128);
FIELD(ncclUniqueId, internal, 0, 128);

FACT(sizeof(ncclConfig_t) == 80);
FIELD(ncclConfig_t, size, 0, 8);
FIELD(ncclConfig_t, magic, 8, 4);
FIELD(ncclConfig_t, version, 12, 4);
FIELD(ncclConfig_t, blocking, 16, 4);
FIELD(ncclConfig_t, cgaClusterSize, 20, 4);
FIELD(ncclConfig_t, minCTAs, 24, 4);
FIELD(ncclConfig_t, maxCTAs, 28, 4);
FIELD(ncclConfig_t, netName, 32, 8);
FIELD(ncclConfig_t, splitShare, 40, 4);
FIELD(ncclConfig_t, trafficClass, 44, 4);
FIELD(ncclConfig_t, commName, 48, 8);
FIELD(ncclConfig_t, collnetEnable, 56, 4);
FIELD(ncclConfig_t, CTAPolicy, 60, 4);
FIELD(ncclConfig_t, shrinkShare, 64, 4);
FIELD(ncclConfig_t, nvlsCTAs, 68, 4);
FIELD(ncclConfig_t, nChannelsPerNetPeer, 72, 4);
FIELD(ncclConfig_t, nvlinkCentricSched, 76, 4);

FACT(sizeof(ncclSimInfo_t) == 24);
FIELD(ncclSimInfo_t, size, 0, 8);
FIELD(ncclSimInfo_t, magic, 8, 4);
FIELD(ncclSimInfo_t, version, 12, 4);
FIELD(ncclSimInfo_t, estimatedTime, 16, 4);

FACT(sizeof(ncclResult_t) == 4);
FACT(ncclSuccess == 0);
FACT(ncclUnhandledCudaError == 1);
FACT(ncclSystemError == 2);
FACT(ncclInternalError == 3);
FACT(ncclInvalidArgument == 4);
FACT(ncclInvalidUsage == 5);
FACT(ncclRemoteError == 6);
FACT(ncclInProgress == 7);
FACT(ncclNumResults == 8);

FACT(sizeof(ncclDataType_t) == 4);
FACT(ncclInt8 == 0);
FACT(ncclChar == 0);
FACT(ncclUint8 == 1);
FACT(ncclInt32 == 2);
FACT(ncclInt == 2);
FACT(ncclUint32 == 3);
FACT(ncclInt64 == 4);
FACT(ncclUint64 == 5);
FACT(ncclFloat16 == 6);
FACT(ncclHalf == 6);
FACT(ncclFloat32 == 7);
FACT(ncclFloat == 7);
FACT(ncclFloat64 == 8);
FACT(ncclDouble == 8);
FACT(ncclBfloat16 == 9);
FACT(ncclFloat8e4m3 == 10);
FACT(ncclFloat8e5m2 == 11);
FACT(ncclNumTypes == 12);

FACT(sizeof(ncclRedOp_t) == 4);
FACT(sizeof(ncclRedOp_dummy_t) == 4);
FACT(ncclSum == 0);
FACT(ncclProd == 1);
FACT(ncclMax == 2);
FACT(ncclMin == 3);
FACT(ncclAvg == 4);
FACT(ncclNumOps == 5);
FACT(ncclNumOps_dummy == 5);
FACT(ncclMaxRedOp == 0x7fffffff);

FACT(sizeof(ncclScalarResidence_t) == 4);
FACT(ncclScalarDevice == 0);
FACT(ncclScalarHostImmediate == 1);
