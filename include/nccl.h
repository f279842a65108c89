// The C API of Unisono: collective communication between GPUs.
//
// Source- and binary-compatible with NCCL 2.28.9: a program compiled against either header runs
// on either library. Every function ncclX has a twin pncclX that does the same; a profiler may
// define ncclX itself and reach the library through pncclX.
//
// What holds for every function unless its own text says otherwise:
// - It returns ncclSuccess, or the class of the error. ncclGetLastError then gives a text that
//   says what happened, where, and what to do. Results are written only on success.
// - It may be called from any thread. Calls on one communicator must not overlap in time, except
//   ncclCommAbort, ncclCommGetAsyncError and ncclGetLastError.
// - A communication call returns once the work is queued on `stream`, not once it is done. Buffers
//   must stay valid until the stream has passed the work.
// - Counts are in elements of `datatype`, sizes in bytes, and a rank is a number from 0 to one
//   less than the communicator's size.
//
// CUDA's headers are included where the compiler finds them. Without them, or with
// UNISONO_NO_CUDA_HEADERS defined, only cudaStream_t is declared.
#ifndef NCCL_H_
#define NCCL_H_

#include <limits.h>
#include <stddef.h>

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

// The version whose API and ABI this header has; ncclGetVersion gives the same number.
#define NCCL_MAJOR 2
#define NCCL_MINOR 28
#define NCCL_PATCH 9
#define NCCL_SUFFIX ""
#define NCCL_VERSION_CODE 22809

// Version X.Y.Z as one number: two digits for Y and Z after 2.8, one digit for Y up to then.
#define NCCL_VERSION(X, Y, Z) \
  ((X) > 2 || (Y) > 8 ? (X)*10000 + (Y)*100 + (Z) : (X)*1000 + (Y)*100 + (Z))

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

// ---- Handles ----

// A communicator as one rank holds it. A handle belongs to the process that made it.
typedef struct ncclComm* ncclComm_t;
#define NCCL_COMM_NULL NULL

// A buffer that all ranks of a communicator registered together.
typedef struct ncclWindow_vidmem* ncclWindow_t;

// What the ranks of a communicator find each other by. One process makes it and gives the bytes to
// the others by any means of its own.
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
  ncclInvalidArgument = 4,     // one argument is wrong by itself
  ncclInvalidUsage = 5,        // the call does not fit the calls before it or the other ranks
  ncclRemoteError = 6,         // another rank failed or went away
  ncclInProgress = 7,          // a nonblocking communicator is still at work
  ncclNumResults = 8
} ncclResult_t;

// ---- Settings of a communicator ----

// Values of a field of ncclConfig_t or ncclSimInfo_t that nobody set.
#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_UNDEF_PTR NULL
#define NCCL_UNDEF_FLOAT -1.0f

// The color of a rank that joins no new communicator in ncclCommSplit.
#define NCCL_SPLIT_NOCOLOR -1

// winFlags of ncclCommWindowRegister, and the alignment in bytes that a window's address needs.
#define NCCL_WIN_DEFAULT 0x00
#define NCCL_WIN_COLL_SYMMETRIC 0x01  // every rank passes the same offset in its own window
#define NCCL_WIN_REQUIRED_ALIGNMENT 4096

// CTAPolicy of ncclConfig_t: the library's own balance; fewer thread blocks at a small loss of
// speed; none at all where copy engines can do the work.
#define NCCL_CTA_POLICY_DEFAULT 0x00
#define NCCL_CTA_POLICY_EFFICIENCY 0x01
#define NCCL_CTA_POLICY_ZERO 0x02

// shrinkFlags of ncclCommShrink: the parent is idle; or its running work is to be ended first.
#define NCCL_SHRINK_DEFAULT 0x00
#define NCCL_SHRINK_ABORT 0x01

// revokeFlags of ncclCommRevoke: the only value there is.
#define NCCL_REVOKE_DEFAULT 0x00

// Settings of one communicator. Start from NCCL_CONFIG_INITIALIZER and assign the fields to change;
// the first three say which version of the structure the program was compiled with.
typedef struct ncclConfig_v22800 {
  size_t size;  // bytes
  unsigned int magic;
  unsigned int version;
  int blocking;             // 1: calls return when done; 0: they may return ncclInProgress
  int cgaClusterSize;       // thread blocks in a cluster, 0 to 8
  int minCTAs;              // least number of thread blocks of a kernel
  int maxCTAs;              // greatest number of thread blocks of a kernel
  const char* netName;      // the network to use, by its name ("Socket", "IB", a plug-in's)
  int splitShare;           // 1: communicators split from this one share its resources
  int trafficClass;         // the network's traffic class of this communicator's data
  const char* commName;     // a name for logs and reports
  int collnetEnable;        // 1: let switches reduce in the network
  int CTAPolicy;            // NCCL_CTA_POLICY_*, or-ed
  int shrinkShare;          // 1: communicators shrunk from this one share its resources
  int nvlsCTAs;             // thread blocks of kernels that use NVLink multicast
  int nChannelsPerNetPeer;  // channels to each peer that is reached over the network
  int nvlinkCentricSched;   // 1: order sends and receives for NVLink first
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

// Values from ncclNumOps up are operators that ncclRedOpCreatePreMulSum made; ncclMaxRedOp is the
// greatest that the type can hold.
typedef enum {
  ncclSum = 0,
  ncclProd = 1,
  ncclMax = 2,
  ncclMin = 3,
  ncclAvg = 4,  // the sum divided by the number of ranks
  ncclNumOps = 5,
  ncclMaxRedOp = 0x7fffffff >> (32 - 8 * (int)sizeof(ncclRedOp_dummy_t))
} ncclRedOp_t;

// Where a scalar argument lies: in memory that the device reads while the collective runs, or in
// host memory that is read before the call returns.
typedef enum { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 } ncclScalarResidence_t;

// ---- The library ----

// Gives NCCL_VERSION_CODE of the library that is loaded, which may differ from the header's.
ncclResult_t ncclGetVersion(int* version);
ncclResult_t pncclGetVersion(int* version);

// A fixed text for each result; never NULL, for values out of range either.
const char* ncclGetErrorString(ncclResult_t result);
const char* pncclGetErrorString(ncclResult_t result);

// The text of the last error: of `comm`, or of the calling thread where `comm` is NULL. Never NULL.
// The text stays valid until the next call of the same thread.
const char* ncclGetLastError(ncclComm_t comm);
const char* pncclGetLastError(ncclComm_t comm);

// Reads the settings of the log anew.
__attribute__((deprecated("set NCCL_DEBUG before the first call instead"))) void ncclResetDebugInit(
    void);
__attribute__((deprecated("set NCCL_DEBUG before the first call instead"))) void
pncclResetDebugInit(void);

// ---- Making a communicator ----

// Makes the id of one new communicator, whose ranks meet at the calling process, or at NCCL_COMM_ID
// where that is set. The process has to live until every rank has joined.
ncclResult_t ncclGetUniqueId(ncclUniqueId* uniqueId);
ncclResult_t pncclGetUniqueId(ncclUniqueId* uniqueId);

// Joins the communicator `commId` as `rank` of `nranks` with the thread's current device. Returns
// when all ranks have joined: one thread that makes several ranks puts the calls into one group.
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank);
ncclResult_t pncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank);

// As ncclCommInitRank, with settings; `config` NULL means the defaults.
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank,
                                    ncclConfig_t* config);
ncclResult_t pncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank,
                                     ncclConfig_t* config);

// As ncclCommInitRankConfig with `nId` ids, so that the ranks meet at several processes. Every rank
// passes the same ids in the same order, at most one for each rank.
ncclResult_t ncclCommInitRankScalable(ncclComm_t* newcomm, int nranks, int myrank, int nId,
                                      ncclUniqueId* commIds, ncclConfig_t* config);
ncclResult_t pncclCommInitRankScalable(ncclComm_t* newcomm, int nranks, int myrank, int nId,
                                       ncclUniqueId* commIds, ncclConfig_t* config);

// Makes a communicator of `ndev` ranks inside the process: `comm` has room for `ndev` handles, and
// rank i runs on devlist[i], or on device i where `devlist` is NULL.
ncclResult_t ncclCommInitAll(ncclComm_t* comm, int ndev, const int* devlist);
ncclResult_t pncclCommInitAll(ncclComm_t* comm, int ndev, const int* devlist);

// Every rank calls it. Ranks of one color become one new communicator, in the order of `key` and
// then of their old rank. A rank with NCCL_SPLIT_NOCOLOR gets NULL. `config` NULL: as the parent.
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm,
                           ncclConfig_t* config);
ncclResult_t pncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm,
                            ncclConfig_t* config);

// Called by the ranks that stay: makes a communicator without the `excludeRanksCount` ranks of
// `excludeRanksList`, the others in their old order. shrinkFlags: one of NCCL_SHRINK_*.
ncclResult_t ncclCommShrink(ncclComm_t comm, int* excludeRanksList, int excludeRanksCount,
                            ncclComm_t* newcomm, ncclConfig_t* config, int shrinkFlags);
ncclResult_t pncclCommShrink(ncclComm_t comm, int* excludeRanksList, int excludeRanksCount,
                             ncclComm_t* newcomm, ncclConfig_t* config, int shrinkFlags);

// ---- Ending a communicator ----

// Every rank calls it: completes what was queued and says goodbye to the other ranks. After it,
// ncclCommDestroy waits for nobody.
ncclResult_t ncclCommFinalize(ncclComm_t comm);
ncclResult_t pncclCommFinalize(ncclComm_t comm);

// Frees this rank's communicator, after finalizing it where that was not done.
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t pncclCommDestroy(ncclComm_t comm);

// Ends what is running on the communicator without waiting for other ranks, and frees it.
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t pncclCommAbort(ncclComm_t comm);

// Ends what is running but keeps the communicator, so that it can be split, shrunk or destroyed.
// revokeFlags: NCCL_REVOKE_DEFAULT.
ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags);
ncclResult_t pncclCommRevoke(ncclComm_t comm, int revokeFlags);

// ---- Asking a communicator ----

// Gives the error that befell the communicator outside of a call, ncclInProgress while a
// nonblocking call is at work, or ncclSuccess.
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError);
ncclResult_t pncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError);

// Gives the number of ranks.
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count);
ncclResult_t pncclCommCount(const ncclComm_t comm, int* count);

// Gives the device of this rank, in CUDA's numbering for this process.
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device);
ncclResult_t pncclCommCuDevice(const ncclComm_t comm, int* device);

// Gives this rank's number.
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank);
ncclResult_t pncclCommUserRank(const ncclComm_t comm, int* rank);

// ---- Memory ----

// Allocates at least `size` bytes on the current device, such that other ranks can map them.
ncclResult_t ncclMemAlloc(void** ptr, size_t size);
ncclResult_t pncclMemAlloc(void** ptr, size_t size);

// Frees what ncclMemAlloc gave; NULL is allowed.
ncclResult_t ncclMemFree(void* ptr);
ncclResult_t pncclMemFree(void* ptr);

// Tells the communicator of a buffer that many calls will use, so that its data may move without a
// copy. Only this rank is concerned.
ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buff, size_t size, void** handle);
ncclResult_t pncclCommRegister(const ncclComm_t comm, void* buff, size_t size, void** handle);

// Takes back a registration, before the memory is freed.
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle);
ncclResult_t pncclCommDeregister(const ncclComm_t comm, void* handle);

// Every rank calls it: registers the buffers of all ranks as one window. The buffer comes from
// ncclMemAlloc and starts at a multiple of NCCL_WIN_REQUIRED_ALIGNMENT. winFlags: NCCL_WIN_*.
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win,
                                    int winFlags);
ncclResult_t pncclCommWindowRegister(ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win,
                                     int winFlags);

// Takes a window back.
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win);
ncclResult_t pncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win);

// ---- Operators of one's own ----

// Makes the operator that multiplies this rank's values by *scalar, of type `datatype`, and then
// sums over the ranks. It serves calls on `comm` with that type.
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t datatype,
                                      ncclScalarResidence_t residence, ncclComm_t comm);
ncclResult_t pncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t datatype,
                                       ncclScalarResidence_t residence, ncclComm_t comm);

// Ends such an operator. Calls that already returned keep it as long as they need it.
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);
ncclResult_t pncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);

// ---- Collectives: every rank of the communicator makes the same call ----

// recvbuff of every rank: `count` elements, reduced over all ranks. In place: the same buffer.
ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count,
                           ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream);
ncclResult_t pncclAllReduce(const void* sendbuff, void* recvbuff, size_t count,
                            ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                            cudaStream_t stream);

// recvbuff of `root`: `count` elements, reduced over all ranks; others may pass NULL.
// In place: the same buffer.
ncclResult_t ncclReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream);
ncclResult_t pncclReduce(const void* sendbuff, void* recvbuff, size_t count,
                         ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm,
                         cudaStream_t stream);

// recvbuff of every rank: `count` elements of root's sendbuff; others may pass NULL for that.
// In place: the same buffer.
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

// sendbuff: a block of `recvcount` elements for each rank; recvbuff of rank i: block i, reduced
// over all ranks. In place: recvbuff is block i of sendbuff.
ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount,
                               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream);
ncclResult_t pncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount,
                                ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                                cudaStream_t stream);

// recvbuff of every rank: block i is the `sendcount` elements of rank i. In place: sendbuff is this
// rank's block of recvbuff.
ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount,
                           ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream);
ncclResult_t pncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount,
                            ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream);

// Blocks of `count` elements: block j of rank i's sendbuff becomes block i of rank j's recvbuff.
ncclResult_t ncclAlltoAll(const void* sendbuff, void* recvbuff, size_t count,
                          ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream);
ncclResult_t pncclAlltoAll(const void* sendbuff, void* recvbuff, size_t count,
                           ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream);

// recvbuff of `root`: block i is the `count` elements of rank i; others may pass NULL. In place:
// root's sendbuff is its block of recvbuff.
ncclResult_t ncclGather(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                        int root, ncclComm_t comm, cudaStream_t stream);
ncclResult_t pncclGather(const void* sendbuff, void* recvbuff, size_t count,
                         ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream);

// recvbuff of rank i: block i of root's sendbuff, `count` elements; others may pass NULL for that.
// In place: root's recvbuff is its block of sendbuff.
ncclResult_t ncclScatter(const void* sendbuff, void* recvbuff, size_t count,
                         ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream);
ncclResult_t pncclScatter(const void* sendbuff, void* recvbuff, size_t count,
                          ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream);

// ---- Between two ranks ----

// Sends `count` elements to rank `peer`, which receives the same count and type. The stream waits
// for the peer: sends and receives that depend on each other go into one group.
ncclResult_t ncclSend(const void* sendbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream);
ncclResult_t pncclSend(const void* sendbuff, size_t count, ncclDataType_t datatype, int peer,
                       ncclComm_t comm, cudaStream_t stream);

// Receives what rank `peer` sends to this rank.
ncclResult_t ncclRecv(void* recvbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream);
ncclResult_t pncclRecv(void* recvbuff, size_t count, ncclDataType_t datatype, int peer,
                       ncclComm_t comm, cudaStream_t stream);

// ---- Groups ----

// Opens a group for the calling thread: calls are kept until the matching ncclGroupEnd and then
// start together. Groups nest; only the outermost end starts the work.
ncclResult_t ncclGroupStart(void);
ncclResult_t pncclGroupStart(void);

// Closes the group. Gives the first error of the calls in it.
ncclResult_t ncclGroupEnd(void);
ncclResult_t pncclGroupEnd(void);

// Closes the group without starting its calls and estimates how long they would have taken.
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
