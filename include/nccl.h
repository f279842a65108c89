// SPDX-License-Identifier: Apache-2.0
// The C API of Unisono: collective communication between GPUs.
//
// Source- and binary-compatible with NCCL 2.28.9: a program compiled against either header runs
// on either library. Every function ncclX is also exported as pncclX, so that a profiler can define
// ncclX itself and call the library through pncclX.
//
// Rules for every function, unless its own comment says otherwise:
// - It returns ncclSuccess or the class of the error. ncclGetLastError then returns a message that
//   says what happened, where, and what to do. Output parameters are written only on success.
// - It may be called from any thread. Calls on one communicator must not overlap in time, except
//   ncclCommAbort, ncclCommGetAsyncError and ncclGetLastError.
// - A communication call returns once the work is queued on `stream`, not once it has completed.
//   Buffers must stay valid until the stream has executed the work.
// - Counts are in elements of `datatype` and sizes in bytes. Ranks are numbered from 0 to the
// number
//   of ranks minus 1.
//
// CUDA's headers are included where the compiler finds them. Without them, or with
// UNISONO_NO_CUDA_HEADERS defined, only cudaStream_t is declared.
#ifndef NCCL_H_
#define NCCL_H_

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#if !defined(UNISONO_NO_CUDA_HEADERS) && defined(__has_include)
#if __has_include(<cuda_runtime.h>)
#define UNISONO_WITH_CUDA_HEADERS 1
#endif
#endif

#if defined(UNISONO_WITH_CUDA_HEADERS)
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#if CUDART_VERSION >= 11000
#include <cuda_bf16.h>
#endif
#if defined(__cplusplus) && CUDART_VERSION >= 11080
#include <cuda_fp8.h>
#endif
#elif !defined(__DRIVER_TYPES_H__)
typedef struct CUstream_st* cudaStream_t;
#endif

// The NCCL version whose API and ABI this header implements; ncclGetVersion returns the same
// number.
#define NCCL_MAJOR 2
#define NCCL_MINOR 28
#define NCCL_PATCH 9
#define NCCL_SUFFIX ""
#define NCCL_VERSION_CODE 22809

// Version X.Y.Z as one number: two digits each for Y and Z after 2.8, one digit for Y before.
#define NCCL_VERSION(X, Y, Z) \
  ((X) > 2 || (Y) > 8 ? (X)*10000 + (Y)*100 + (Z) : (X)*1000 + (Y)*100 + (Z))

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

// ---- Handles ----

// One rank's communicator. A handle is valid only in the process that created it.
typedef struct ncclComm* ncclComm_t;
#define NCCL_COMM_NULL NULL

// A buffer that all ranks of a communicator registered together.
typedef struct ncclWindow_vidmem* ncclWindow_t;

// Identifies a communicator while its ranks find each other. One process creates it and passes the
// bytes to the others by its own means.
#define NCCL_UNIQUE_ID_BYTES 128
typedef struct {
  char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

// ---- Results ----

typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,  // a CUDA call failed
  ncclSystemError = 2,         // a call to the operating system or to another library failed
  ncclInternalError = 3,       // a fault in the library itself, or memory overwritten
  ncclInvalidArgument = 4,     // an argument is invalid in itself
  ncclInvalidUsage = 5,        // the call does not match earlier calls or the other ranks
  ncclRemoteError = 6,         // another rank failed or exited
  ncclInProgress = 7,          // an operation on a nonblocking communicator has not completed
  ncclNumResults = 8
} ncclResult_t;

// ---- Settings of a communicator ----

// Values of the fields of ncclConfig_t and ncclSimInfo_t that are not set.
#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_UNDEF_PTR NULL
#define NCCL_UNDEF_FLOAT -1.0f

// The color of a rank that is in no new communicator of ncclCommSplit.
#define NCCL_SPLIT_NOCOLOR -1

// winFlags of ncclCommWindowRegister, and the required alignment of the address in bytes.
#define NCCL_WIN_DEFAULT 0x00
#define NCCL_WIN_COLL_SYMMETRIC 0x01  // every rank passes the same offset in its own window
#define NCCL_WIN_REQUIRED_ALIGNMENT 4096

// CTAPolicy of ncclConfig_t: the library's default; fewer thread blocks at a small loss of speed;
// no thread blocks where copy engines can do the work.
#define NCCL_CTA_POLICY_DEFAULT 0x00
#define NCCL_CTA_POLICY_EFFICIENCY 0x01
#define NCCL_CTA_POLICY_ZERO 0x02

// shrinkFlags of ncclCommShrink: the parent is idle; or abort the parent's running work first.
#define NCCL_SHRINK_DEFAULT 0x00
#define NCCL_SHRINK_ABORT 0x01

// revokeFlags of ncclCommRevoke. There is no other value.
#define NCCL_REVOKE_DEFAULT 0x00

// Settings of one communicator. Start from NCCL_CONFIG_INITIALIZER and assign the fields to change;
// the first three tell which version of the structure the program was compiled with.
typedef struct ncclConfig_v22800 {
  size_t size;  // bytes
  unsigned int magic;
  unsigned int version;
  int blocking;             // 1: calls return when done; 0: they may return ncclInProgress
  int cgaClusterSize;       // thread blocks in a cluster
  int minCTAs;              // minimum number of thread blocks of a kernel
  int maxCTAs;              // maximum number of thread blocks of a kernel
  const char* netName;      // the network to use: "Socket", "IB", or the name of a plug-in
  int splitShare;           // 1: communicators split from this one share its resources
  int trafficClass;         // the network's traffic class of this communicator's data
  const char* commName;     // a name for logs and reports
  int collnetEnable;        // 1: use reductions in the network's switches
  int CTAPolicy;            // NCCL_CTA_POLICY_*, combined by |
  int shrinkShare;          // 1: communicators shrunk from this one share its resources
  int nvlsCTAs;             // thread blocks of kernels that use NVLink multicast
  int nChannelsPerNetPeer;  // channels to each peer that is reached over the network
  int nvlinkCentricSched;   // 1: schedule sends and receives for NVLink first
} ncclConfig_t;

// clang-format off
#define NCCL_CONFIG_INITIALIZER                       \
  {                                                   \
    sizeof(ncclConfig_t),                             \
    0xcafebeef,                                       \
    NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH), \
    NCCL_CONFIG_UNDEF_INT, /* blocking */             \
    NCCL_CONFIG_UNDEF_INT, /* cgaClusterSize */       \
    NCCL_CONFIG_UNDEF_INT, /* minCTAs */              \
    NCCL_CONFIG_UNDEF_INT, /* maxCTAs */              \
    NCCL_CONFIG_UNDEF_PTR, /* netName */              \
    NCCL_CONFIG_UNDEF_INT, /* splitShare */           \
    NCCL_CONFIG_UNDEF_INT, /* trafficClass */         \
    NCCL_CONFIG_UNDEF_PTR, /* commName */             \
    NCCL_CONFIG_UNDEF_INT, /* collnetEnable */        \
    NCCL_CONFIG_UNDEF_INT, /* CTAPolicy */            \
    NCCL_CONFIG_UNDEF_INT, /* shrinkShare */          \
    NCCL_CONFIG_UNDEF_INT, /* nvlsCTAs */             \
    NCCL_CONFIG_UNDEF_INT, /* nChannelsPerNetPeer */  \
    NCCL_CONFIG_UNDEF_INT  /* nvlinkCentricSched */   \
  }
// clang-format on

// What ncclGroupSimulateEnd reports. Start from NCCL_SIM_INFO_INITIALIZER.
typedef struct ncclSimInfo_v22200 {
  size_t size;  // bytes
  unsigned int magic;
  unsigned int version;
  float estimatedTime;  // microseconds
} ncclSimInfo_t;

// clang-format off
#define NCCL_SIM_INFO_INITIALIZER                     \
  {                                                   \
    sizeof(ncclSimInfo_t),                            \
    0x74685283,                                       \
    NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH), \
    NCCL_UNDEF_FLOAT /* estimatedTime */              \
  }
// clang-format on

// ---- Data types and operators ----

typedef enum {
  ncclInt8 = 0,
  ncclChar = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclInt = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclHalf = 6,
  ncclFloat32 = 7,
  ncclFloat = 7,
  ncclFloat64 = 8,
  ncclDouble = 8,
  ncclBfloat16 = 9,
  ncclFloat8e4m3 = 10,
  ncclFloat8e5m2 = 11,
  ncclNumTypes = 12
} ncclDataType_t;

// As wide as ncclRedOp_t, which cannot name its own size while it is being defined.
typedef enum { ncclNumOps_dummy = 5 } ncclRedOp_dummy_t;

// Values from ncclNumOps on are operators created by ncclRedOpCreatePreMulSum; ncclMaxRedOp is the
// largest value of the type.
typedef enum {
  ncclSum = 0,
  ncclProd = 1,
  ncclMax = 2,
  ncclMin = 3,
  ncclAvg = 4,  // the sum divided by the number of ranks
  ncclNumOps = 5,
  ncclMaxRedOp = 0x7fffffff >> (32 - 8 * (int)sizeof(ncclRedOp_dummy_t))
} ncclRedOp_t;

// Where a scalar argument resides: in memory that the device reads while the collective runs, or in
// host memory that is read before the call returns.
typedef enum { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 } ncclScalarResidence_t;

// ---- The library ----

// Returns NCCL_VERSION_CODE of the loaded library, which may differ from that of the header.
ncclResult_t ncclGetVersion(int* version);
ncclResult_t pncclGetVersion(int* version);

// Returns a fixed description of the result; never NULL, even for values out of range.
const char* ncclGetErrorString(ncclResult_t result);
const char* pncclGetErrorString(ncclResult_t result);

// Returns the message of the last error of `comm`, or of the calling thread if `comm` is NULL.
// Never NULL. The message is valid until the thread's next call.
const char* ncclGetLastError(ncclComm_t comm);
const char* pncclGetLastError(ncclComm_t comm);

// Re-reads the logging settings.
__attribute__((deprecated("set NCCL_DEBUG before the first call instead"))) void ncclResetDebugInit(
    void);
__attribute__((deprecated("set NCCL_DEBUG before the first call instead"))) void
pncclResetDebugInit(void);

// ---- Creating communicators ----

// Creates the id of one new communicator. Its ranks connect to the calling process, or to the
// address in NCCL_COMM_ID if that is set. The process must not exit before every rank has joined.
ncclResult_t ncclGetUniqueId(ncclUniqueId* uniqueId);
ncclResult_t pncclGetUniqueId(ncclUniqueId* uniqueId);

// Joins the communicator `commId` as `rank` of `nranks` with the thread's current device. Returns
// when all ranks have joined: a thread that creates several ranks must call it within one group.
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank);
ncclResult_t pncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank);

// Like ncclCommInitRank, with settings; NULL for `config` means the defaults.
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank,
                                    ncclConfig_t* config);
ncclResult_t pncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank,
                                     ncclConfig_t* config);

// Like ncclCommInitRankConfig with `nId` ids, so that the ranks connect to several processes
// instead of one. Every rank passes the same ids in the same order, and `nId` is at most `nranks`.
ncclResult_t ncclCommInitRankScalable(ncclComm_t* newcomm, int nranks, int myrank, int nId,
                                      ncclUniqueId* commIds, ncclConfig_t* config);
ncclResult_t pncclCommInitRankScalable(ncclComm_t* newcomm, int nranks, int myrank, int nId,
                                       ncclUniqueId* commIds, ncclConfig_t* config);

// Creates a communicator of `ndev` ranks inside the process. `comm` is an array of `ndev` handles,
// and rank i runs on devlist[i], or on device i if `devlist` is NULL.
ncclResult_t ncclCommInitAll(ncclComm_t* comm, int ndev, const int* devlist);
ncclResult_t pncclCommInitAll(ncclComm_t* comm, int ndev, const int* devlist);

// Called by every rank. The ranks of each color form a new communicator, ordered by `key` and then
// by their old rank. A rank with NCCL_SPLIT_NOCOLOR gets NULL. NULL for `config` means the
// parent's; fields that a given one leaves undefined have their defaults, not the parent's values.
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm,
                           ncclConfig_t* config);
ncclResult_t pncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm,
                            ncclConfig_t* config);

// Called by the remaining ranks. Creates a communicator without the `excludeRanksCount` ranks in
// `excludeRanksList`; the others keep their order. shrinkFlags: one of NCCL_SHRINK_*.
ncclResult_t ncclCommShrink(ncclComm_t comm, int* excludeRanksList, int excludeRanksCount,
                            ncclComm_t* newcomm, ncclConfig_t* config, int shrinkFlags);
ncclResult_t pncclCommShrink(ncclComm_t comm, int* excludeRanksList, int excludeRanksCount,
                             ncclComm_t* newcomm, ncclConfig_t* config, int shrinkFlags);

// ---- Destroying communicators ----

// Called by every rank. Waits until queued work has completed and releases what other ranks use.
// ncclCommDestroy does not wait for other ranks afterwards.
ncclResult_t ncclCommFinalize(ncclComm_t comm);
ncclResult_t pncclCommFinalize(ncclComm_t comm);

// Frees this rank's communicator, and finalizes it first if necessary. Gives up an initialization
// or a call that is still in progress.
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t pncclCommDestroy(ncclComm_t comm);

// Aborts running work and frees the communicator. Waits neither for other ranks nor for the streams
// that the communicator was used on, and may be called while another thread is inside a call of the
// communicator. Queued work that starts later does not touch the memory that was passed to it.
// Running work ends within milliseconds: synchronize its stream before you free or reuse the
// memory. The memory of the communicator is released when the device has finished with it. A CUDA
// graph that holds calls of the communicator must not be launched any more.
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t pncclCommAbort(ncclComm_t comm);

// Makes an id with which new ranks join the ranks of this communicator in ncclCommGrow. One rank
// calls it, once for each growth, and passes the id to the new ranks. Since NCCL 2.29.
ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId* uniqueId);
ncclResult_t pncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId* uniqueId);

// Creates a communicator of the ranks of an existing one, with the same numbers, and of new ranks
// after them, nRanks together. An existing rank passes its communicator, rank -1 and, as uniqueId,
// NULL or the id; a new rank passes no communicator, the id and its rank. Without a configuration
// existing ranks use their communicator's. The existing communicator stays. Since NCCL 2.29.
ncclResult_t ncclCommGrow(ncclComm_t comm, int nRanks, const ncclUniqueId* uniqueId, int rank,
                          ncclComm_t* newcomm, ncclConfig_t* config);
ncclResult_t pncclCommGrow(ncclComm_t comm, int nRanks, const ncclUniqueId* uniqueId, int rank,
                           ncclComm_t* newcomm, ncclConfig_t* config);

// Aborts running work but keeps the communicator, which can then be split, shrunk or destroyed.
// revokeFlags: NCCL_REVOKE_DEFAULT.
ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags);
ncclResult_t pncclCommRevoke(ncclComm_t comm, int revokeFlags);

// Frees device memory of a communicator on which nothing is running, until ncclCommResume: on all
// ranks, like a collective. flags: NCCL_SUSPEND_MEM. ncclInvalidUsage: it is suspended, or calls on
// it were captured into a CUDA graph. While it is suspended it can be queried, aborted and
// destroyed. Since NCCL 2.30.
#define NCCL_SUSPEND_MEM 0x01
ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags);
ncclResult_t pncclCommSuspend(ncclComm_t comm, int flags);

// Makes a suspended communicator usable again, on all ranks. Since NCCL 2.30.
ncclResult_t ncclCommResume(ncclComm_t comm);
ncclResult_t pncclCommResume(ncclComm_t comm);

// ---- Queries ----

// Which statistic ncclCommMemStats returns. Since NCCL 2.30.
typedef enum {
  ncclStatGpuMemSuspend = 0,    // bytes of device memory that ncclCommSuspend would release
  ncclStatGpuMemSuspended = 1,  // 1 while they are released, else 0
  ncclStatGpuMemPersist = 2,    // bytes of device memory that stays
  ncclStatGpuMemTotal = 3       // both together
} ncclCommMemStat_t;

// Returns how much device memory the communicator has allocated on this rank. Since NCCL 2.30.
ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value);
ncclResult_t pncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value);

// Returns the error that occurred outside of a call, ncclInProgress while a nonblocking call has
// not completed, or ncclSuccess.
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError);
ncclResult_t pncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError);

// Returns the number of ranks.
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count);
ncclResult_t pncclCommCount(const ncclComm_t comm, int* count);

// Returns this rank's device, in CUDA's numbering for this process.
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device);
ncclResult_t pncclCommCuDevice(const ncclComm_t comm, int* device);

// Returns the rank of the caller.
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank);
ncclResult_t pncclCommUserRank(const ncclComm_t comm, int* rank);

// ---- Memory ----

// Allocates at least `size` bytes on the current device, in memory that other ranks can map.
ncclResult_t ncclMemAlloc(void** ptr, size_t size);
ncclResult_t pncclMemAlloc(void** ptr, size_t size);

// Frees memory from ncclMemAlloc; NULL is allowed.
ncclResult_t ncclMemFree(void* ptr);
ncclResult_t pncclMemFree(void* ptr);

// Registers a buffer that many calls will use, so that its data can be transferred without a copy.
// Affects only this rank.
ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buff, size_t size, void** handle);
ncclResult_t pncclCommRegister(const ncclComm_t comm, void* buff, size_t size, void** handle);

// Removes a registration. Must be called before the memory is freed.
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle);
ncclResult_t pncclCommDeregister(const ncclComm_t comm, void* handle);

// Called by every rank: registers the buffers of all ranks as one window. The buffer must come from
// ncclMemAlloc and be aligned to NCCL_WIN_REQUIRED_ALIGNMENT. winFlags: NCCL_WIN_*.
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win,
                                    int winFlags);
ncclResult_t pncclCommWindowRegister(ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win,
                                     int winFlags);

// Removes a window.
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win);
ncclResult_t pncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win);

// ---- User-defined operators ----

// Creates an operator that multiplies this rank's values by *scalar, of type `datatype`, and then
// sums over the ranks. It is valid for calls on `comm` with that type.
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t datatype,
                                      ncclScalarResidence_t residence, ncclComm_t comm);
ncclResult_t pncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t datatype,
                                       ncclScalarResidence_t residence, ncclComm_t comm);

// Destroys such an operator. Work that is already queued may still use it.
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);
ncclResult_t pncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);

// ---- Collectives: every rank of the communicator must make the same call ----

// Reduces `count` elements over all ranks into recvbuff of every rank. In place: sendbuff equals
// recvbuff.
ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count,
                           ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream);
ncclResult_t pncclAllReduce(const void* sendbuff, void* recvbuff, size_t count,
                            ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                            cudaStream_t stream);

// Reduces `count` elements over all ranks into recvbuff of `root`; other ranks may pass NULL for
// recvbuff. In place: sendbuff equals recvbuff.
ncclResult_t ncclReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream);
ncclResult_t pncclReduce(const void* sendbuff, void* recvbuff, size_t count,
                         ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm,
                         cudaStream_t stream);

// Copies `count` elements from root's sendbuff to recvbuff of every rank; other ranks may pass NULL
// for sendbuff. In place: sendbuff equals recvbuff.
ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count,
                           ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream);
ncclResult_t pncclBroadcast(const void* sendbuff, void* recvbuff, size_t count,
                            ncclDataType_t datatype, int root, ncclComm_t comm,
                            cudaStream_t stream);

// The older form of ncclBroadcast, always in place.
ncclResult_t ncclBcast(void* buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
                       cudaStream_t stream);
ncclResult_t pncclBcast(void* buff, size_t count, ncclDataType_t datatype, int root,
                        ncclComm_t comm, cudaStream_t stream);

// Reduces blocks of `recvcount` elements, one for each rank in sendbuff, over all ranks, and stores
// block i in recvbuff of rank i. In place: recvbuff of rank i is block i of its sendbuff.
ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount,
                               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream);
ncclResult_t pncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount,
                                ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                                cudaStream_t stream);

// Collects `sendcount` elements from each rank in recvbuff of every rank, where block i comes from
// rank i. In place: sendbuff of rank i is block i of its recvbuff.
ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount,
                           ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream);
ncclResult_t pncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount,
                            ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream);

// Copies blocks of `count` elements: block j of rank i's sendbuff to block i of rank j's recvbuff.
ncclResult_t ncclAlltoAll(const void* sendbuff, void* recvbuff, size_t count,
                          ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream);
ncclResult_t pncclAlltoAll(const void* sendbuff, void* recvbuff, size_t count,
                           ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream);

// Collects `count` elements from each rank in recvbuff of `root`, where block i comes from rank i;
// other ranks may pass NULL for recvbuff. In place: root's sendbuff is its own block of recvbuff.
ncclResult_t ncclGather(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                        int root, ncclComm_t comm, cudaStream_t stream);
ncclResult_t pncclGather(const void* sendbuff, void* recvbuff, size_t count,
                         ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream);

// Copies block i of root's sendbuff, of `count` elements, to recvbuff of rank i; other ranks may
// pass NULL for sendbuff. In place: root's recvbuff is its own block of sendbuff.
ncclResult_t ncclScatter(const void* sendbuff, void* recvbuff, size_t count,
                         ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream);
ncclResult_t pncclScatter(const void* sendbuff, void* recvbuff, size_t count,
                          ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream);

// ---- Point-to-point ----

// Sends `count` elements to rank `peer`, which must receive the same count and type. The stream
// waits for the peer, so sends and receives that depend on each other must be in one group.
ncclResult_t ncclSend(const void* sendbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream);
ncclResult_t pncclSend(const void* sendbuff, size_t count, ncclDataType_t datatype, int peer,
                       ncclComm_t comm, cudaStream_t stream);

// Receives `count` elements from rank `peer`, which must send the same count and type.
ncclResult_t ncclRecv(void* recvbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream);
ncclResult_t pncclRecv(void* recvbuff, size_t count, ncclDataType_t datatype, int peer,
                       ncclComm_t comm, cudaStream_t stream);

// ---- Groups ----

// Starts a group in the calling thread: calls are collected until the matching ncclGroupEnd and
// then started together. Groups can be nested; only the outermost end starts the work.
ncclResult_t ncclGroupStart(void);
ncclResult_t pncclGroupStart(void);

// Ends the group and returns the first error of its calls.
ncclResult_t ncclGroupEnd(void);
ncclResult_t pncclGroupEnd(void);

// Ends the group without starting its calls, and estimates how long they would have taken.
// `simInfo` may be NULL.
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* simInfo);
ncclResult_t pncclGroupSimulateEnd(ncclSimInfo_t* simInfo);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif

#endif
