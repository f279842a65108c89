// SPDX-License-Identifier: Apache-2.0
// The exported functions that report that they are not implemented: src/api/unimplemented.cpp is
// linked into this program, which stands in for the error boundary and notes what is reported.
#include "api/boundary.h"

#include <gtest/gtest.h>
#include <nccl.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace {

std::vector<std::string> reported;

}  // namespace

ncclResult_t unisono::api::notImplemented(const char* function) noexcept {
  reported.emplace_back(function);
  return ncclInvalidUsage;
}

// The signatures that programs use, as NCCL 2.28 to 2.32 declare them. Of the structures only the
// size is NCCL's.
struct Team {
  int nRanks, rank, stride;
};
struct MultimemHandle {
  void* base;
};
struct SignalDescriptor {
  int count, peer, signal, context;
};

#define WITH_TWIN(result, name, ...) \
  result name(__VA_ARGS__);          \
  result p##name(__VA_ARGS__)

extern "C" {
WITH_TWIN(ncclResult_t, ncclDevCommCreate, ncclComm_t, const void*, void*);
WITH_TWIN(ncclResult_t, ncclDevCommDestroy, ncclComm_t, const void*);
WITH_TWIN(ncclResult_t, ncclGinBarrierCreateRequirement, ncclComm_t, Team, int, void*, void*);
WITH_TWIN(ncclResult_t, ncclGinInboxA2ACreateRequirement, Team, int, int, void*, void*);
WITH_TWIN(ncclResult_t, ncclGinOutboxCreateRequirement, int, int, void*, void*);
WITH_TWIN(ncclResult_t, ncclLLA2ACreateRequirement, int, int, void*, void*);
WITH_TWIN(ncclResult_t, ncclLsaBarrierCreateRequirement, Team, int, void*, void*);
WITH_TWIN(int, ncclLLA2ACalcSlots, int, int);
WITH_TWIN(ncclResult_t, ncclGetMultimemDevicePointer, ncclWindow_t, size_t, MultimemHandle, void**);
WITH_TWIN(ncclResult_t, ncclPutSignal, const void*, size_t, ncclDataType_t, int, ncclWindow_t,
          size_t, int, int, unsigned, ncclComm_t, cudaStream_t);
WITH_TWIN(ncclResult_t, ncclSignal, int, int, int, unsigned, ncclComm_t, cudaStream_t);
WITH_TWIN(ncclResult_t, ncclWaitSignal, int, SignalDescriptor*, ncclComm_t, cudaStream_t);
WITH_TWIN(ncclResult_t, ncclGetCftDeviceLeInfo, ncclWindow_t, size_t, int, Team, void*, size_t*);
WITH_TWIN(ncclResult_t, ncclGetMultimemDeviceLeInfo, ncclWindow_t, size_t, void*, size_t*);
WITH_TWIN(ncclResult_t, ncclGetPeerDeviceLeInfo, ncclWindow_t, size_t, int, void*, size_t*);
WITH_TWIN(Team, ncclTeamCft, ncclComm_t, int);
WITH_TWIN(Team, ncclTeamCftMultimem, ncclComm_t);
WITH_TWIN(ncclResult_t, ncclSetEncryption, const void*);
WITH_TWIN(ncclResult_t, ncclAllGatherConfig, const void*, void*, size_t, ncclDataType_t, ncclComm_t,
          cudaStream_t, const void*);
WITH_TWIN(ncclResult_t, ncclAllReduceConfig, const void*, void*, size_t, ncclDataType_t,
          ncclRedOp_t, ncclComm_t, cudaStream_t, const void*);
WITH_TWIN(ncclResult_t, ncclAlltoAllConfig, const void*, void*, size_t, ncclDataType_t, ncclComm_t,
          cudaStream_t, const void*);
WITH_TWIN(ncclResult_t, ncclBroadcastConfig, const void*, void*, size_t, ncclDataType_t, int,
          ncclComm_t, cudaStream_t, const void*);
WITH_TWIN(ncclResult_t, ncclGatherConfig, const void*, void*, size_t, ncclDataType_t, int,
          ncclComm_t, cudaStream_t, const void*);
WITH_TWIN(ncclResult_t, ncclReduceConfig, const void*, void*, size_t, ncclDataType_t, ncclRedOp_t,
          int, ncclComm_t, cudaStream_t, const void*);
WITH_TWIN(ncclResult_t, ncclReduceScatterConfig, const void*, void*, size_t, ncclDataType_t,
          ncclRedOp_t, ncclComm_t, cudaStream_t, const void*);
WITH_TWIN(ncclResult_t, ncclScatterConfig, const void*, void*, size_t, ncclDataType_t, int,
          ncclComm_t, cudaStream_t, const void*);
WITH_TWIN(ncclResult_t, ncclParamBind, void**, const char*);
WITH_TWIN(ncclResult_t, ncclParamGet, void*, void*, int, int*);
WITH_TWIN(ncclResult_t, ncclParamGetAllParameterKeys, const char***, int*);
WITH_TWIN(ncclResult_t, ncclParamGetParameter, const char*, const char**, int*);
WITH_TWIN(ncclResult_t, ncclParamGetStr, void*, const char**);
WITH_TWIN(ncclResult_t, ncclParamGetI8, void*, int8_t*);
WITH_TWIN(ncclResult_t, ncclParamGetI16, void*, int16_t*);
WITH_TWIN(ncclResult_t, ncclParamGetI32, void*, int32_t*);
WITH_TWIN(ncclResult_t, ncclParamGetI64, void*, int64_t*);
WITH_TWIN(ncclResult_t, ncclParamGetU8, void*, uint8_t*);
WITH_TWIN(ncclResult_t, ncclParamGetU16, void*, uint16_t*);
WITH_TWIN(ncclResult_t, ncclParamGetU32, void*, uint32_t*);
WITH_TWIN(ncclResult_t, ncclParamGetU64, void*, uint64_t*);
WITH_TWIN(void, ncclParamDumpAll, void);
}

namespace {

// Every result that a caller offers points here; nothing may be written on failure.
class ApiUnimplemented : public testing::Test {
 protected:
  void SetUp() override {
    reported.clear();
    std::memset(untouched_, 0x5a, sizeof untouched_);
  }
  void TearDown() override {
    for (unsigned char byte : untouched_) ASSERT_EQ(byte, 0x5a);
  }

  template <typename T>
  T* out() {
    return reinterpret_cast<T*>(untouched_);
  }

  alignas(16) unsigned char untouched_[1024];
};

// Calls the function and its alias: both report under the function's name, and are one.
#define EXPECT_NOT_IMPLEMENTED(name, ...)                                                \
  do {                                                                                   \
    reported.clear();                                                                    \
    EXPECT_EQ(name(__VA_ARGS__), ncclInvalidUsage);                                      \
    EXPECT_EQ(p##name(__VA_ARGS__), ncclInvalidUsage);                                   \
    EXPECT_EQ(reported, (std::vector<std::string>{#name, #name}));                       \
    EXPECT_EQ(reinterpret_cast<void*>(name), reinterpret_cast<void*>(p##name)) << #name; \
  } while (false)

TEST_F(ApiUnimplemented, Windows) {
  const Team team = {8, 3, 1};
  EXPECT_NOT_IMPLEMENTED(ncclGetCftDeviceLeInfo, nullptr, 8, 1, team, out<void>(), out<size_t>());
  EXPECT_NOT_IMPLEMENTED(ncclGetMultimemDeviceLeInfo, nullptr, 8, out<void>(), out<size_t>());
  EXPECT_NOT_IMPLEMENTED(ncclGetPeerDeviceLeInfo, nullptr, 8, 1, out<void>(), out<size_t>());
  EXPECT_NOT_IMPLEMENTED(ncclGetMultimemDevicePointer, nullptr, 8, MultimemHandle{nullptr},
                         out<void*>());
}

TEST_F(ApiUnimplemented, CollectivesWithAConfiguration) {
  void* b = out<void>();
  EXPECT_NOT_IMPLEMENTED(ncclAllGatherConfig, b, b, 1, ncclFloat, nullptr, nullptr, nullptr);
  EXPECT_NOT_IMPLEMENTED(ncclAllReduceConfig, b, b, 1, ncclFloat, ncclSum, nullptr, nullptr,
                         nullptr);
  EXPECT_NOT_IMPLEMENTED(ncclAlltoAllConfig, b, b, 1, ncclFloat, nullptr, nullptr, nullptr);
  EXPECT_NOT_IMPLEMENTED(ncclBroadcastConfig, b, b, 1, ncclFloat, 0, nullptr, nullptr, nullptr);
  EXPECT_NOT_IMPLEMENTED(ncclGatherConfig, b, b, 1, ncclFloat, 0, nullptr, nullptr, nullptr);
  EXPECT_NOT_IMPLEMENTED(ncclReduceConfig, b, b, 1, ncclFloat, ncclSum, 0, nullptr, nullptr,
                         nullptr);
  EXPECT_NOT_IMPLEMENTED(ncclReduceScatterConfig, b, b, 1, ncclFloat, ncclSum, nullptr, nullptr,
                         nullptr);
  EXPECT_NOT_IMPLEMENTED(ncclScatterConfig, b, b, 1, ncclFloat, 0, nullptr, nullptr, nullptr);
}

TEST_F(ApiUnimplemented, Encryption) {
  EXPECT_NOT_IMPLEMENTED(ncclSetEncryption, out<void>());
}

TEST_F(ApiUnimplemented, OneSided) {
  EXPECT_NOT_IMPLEMENTED(ncclPutSignal, out<void>(), 8, ncclFloat, 1, nullptr, 16, 0, 0, 0u,
                         nullptr, nullptr);
  EXPECT_NOT_IMPLEMENTED(ncclSignal, 1, 0, 0, 0u, nullptr, nullptr);
  EXPECT_NOT_IMPLEMENTED(ncclWaitSignal, 1, out<SignalDescriptor>(), nullptr, nullptr);
}

TEST_F(ApiUnimplemented, DeviceCommunicators) {
  const Team team = {8, 3, 1};
  EXPECT_NOT_IMPLEMENTED(ncclDevCommCreate, nullptr, out<void>(), out<void>());
  EXPECT_NOT_IMPLEMENTED(ncclDevCommDestroy, nullptr, out<void>());
  EXPECT_NOT_IMPLEMENTED(ncclGinBarrierCreateRequirement, nullptr, team, 2, out<void>(),
                         out<void>());
  EXPECT_NOT_IMPLEMENTED(ncclGinInboxA2ACreateRequirement, team, 2, 10, out<void>(), out<void>());
  EXPECT_NOT_IMPLEMENTED(ncclGinOutboxCreateRequirement, 2, 10, out<void>(), out<void>());
  EXPECT_NOT_IMPLEMENTED(ncclLLA2ACreateRequirement, 2, 64, out<void>(), out<void>());
  EXPECT_NOT_IMPLEMENTED(ncclLsaBarrierCreateRequirement, team, 2, out<void>(), out<void>());
}

TEST_F(ApiUnimplemented, Parameters) {
  EXPECT_NOT_IMPLEMENTED(ncclParamBind, out<void*>(), "NCCL_DEBUG");
  EXPECT_NOT_IMPLEMENTED(ncclParamGet, nullptr, out<void>(), 64, out<int>());
  EXPECT_NOT_IMPLEMENTED(ncclParamGetAllParameterKeys, out<const char**>(), out<int>());
  EXPECT_NOT_IMPLEMENTED(ncclParamGetParameter, "NCCL_DEBUG", out<const char*>(), out<int>());
  EXPECT_NOT_IMPLEMENTED(ncclParamGetStr, nullptr, out<const char*>());
  EXPECT_NOT_IMPLEMENTED(ncclParamGetI8, nullptr, out<int8_t>());
  EXPECT_NOT_IMPLEMENTED(ncclParamGetI16, nullptr, out<int16_t>());
  EXPECT_NOT_IMPLEMENTED(ncclParamGetI32, nullptr, out<int32_t>());
  EXPECT_NOT_IMPLEMENTED(ncclParamGetI64, nullptr, out<int64_t>());
  EXPECT_NOT_IMPLEMENTED(ncclParamGetU8, nullptr, out<uint8_t>());
  EXPECT_NOT_IMPLEMENTED(ncclParamGetU16, nullptr, out<uint16_t>());
  EXPECT_NOT_IMPLEMENTED(ncclParamGetU32, nullptr, out<uint32_t>());
  EXPECT_NOT_IMPLEMENTED(ncclParamGetU64, nullptr, out<uint64_t>());
}

// The functions without a status report all the same, and give what no working call gives.
TEST_F(ApiUnimplemented, ThoseWithoutAStatus) {
  for (const Team empty : {ncclTeamCft(nullptr, 0), pncclTeamCft(nullptr, 0),
                           ncclTeamCftMultimem(nullptr), pncclTeamCftMultimem(nullptr)}) {
    EXPECT_EQ(empty.nRanks, 0);
    EXPECT_EQ(empty.rank, 0);
    EXPECT_EQ(empty.stride, 0);
  }
  EXPECT_EQ(ncclLLA2ACalcSlots(64, 8), 0);
  EXPECT_EQ(pncclLLA2ACalcSlots(64, 8), 0);
  ncclParamDumpAll();
  pncclParamDumpAll();
  EXPECT_EQ(reported, (std::vector<std::string>{"ncclTeamCft", "ncclTeamCft", "ncclTeamCftMultimem",
                                                "ncclTeamCftMultimem", "ncclLLA2ACalcSlots",
                                                "ncclLLA2ACalcSlots", "ncclParamDumpAll",
                                                "ncclParamDumpAll"}));
}

}  // namespace
