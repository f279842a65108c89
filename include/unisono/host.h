// SPDX-License-Identifier: Apache-2.0
// Simulated devices: together with nccl.h, all that a program needs to run on Unisono's host
// backend, without a GPU. Each function does what the function of the CUDA runtime with the same
// name after the prefix does.
//
// Rules for every function:
// - It returns ncclSuccess or the class of the error; unisonoHostGetLastError then returns the
//   message. Output parameters are written only on success.
// - It may be called from any thread. The current device is per thread and initially 0.
// - It returns ncclInvalidUsage if the CUDA backend is in use (UNISONO_BACKEND=cuda, or unset on a
//   machine with a GPU).
// - Streams can be passed to the functions of nccl.h. NULL is the default stream of the current
//   device. Unlike CUDA's, it does not synchronize with other streams.
//
// The devices are the GPUs of the topology file in UNISONO_HOST_TOPOLOGY, or else
// UNISONO_HOST_DEVICES (8) identical ones.
#ifndef UNISONO_HOST_H_
#define UNISONO_HOST_H_

#include <stddef.h>

#include "nccl.h"

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

// Returns the number of devices. ncclInvalidArgument: the topology file or a setting is invalid.
ncclResult_t unisonoHostGetDeviceCount(int* count);

// Sets the current device of the calling thread, from 0 to the number of devices minus 1.
ncclResult_t unisonoHostSetDevice(int device);
ncclResult_t unisonoHostGetDevice(int* device);

// Allocates zero-filled memory of the current device, aligned to 512 bytes. Any thread of this
// process may also access it directly. `bytes` may be 0. ncclSystemError: out of memory.
ncclResult_t unisonoHostMalloc(void** address, size_t bytes);
// Frees memory from unisonoHostMalloc; NULL is allowed. Does not wait, so queued work must not use
// the memory any more. ncclInvalidArgument: not an address from unisonoHostMalloc, or freed
// already.
ncclResult_t unisonoHostFree(void* address);

// Copies between device memory and host memory, in any direction. The first returns when the copy
// is complete, ordered with the default stream; the second when the copy is queued.
ncclResult_t unisonoHostMemcpy(void* destination, const void* source, size_t bytes);
ncclResult_t unisonoHostMemcpyAsync(void* destination, const void* source, size_t bytes,
                                    cudaStream_t stream);

// Sets every byte to the low 8 bits of `value`.
ncclResult_t unisonoHostMemset(void* destination, int value, size_t bytes);
ncclResult_t unisonoHostMemsetAsync(void* destination, int value, size_t bytes,
                                    cudaStream_t stream);

// Creates a stream of the current device.
ncclResult_t unisonoHostStreamCreate(cudaStream_t* stream);
// Destroys a stream. Does not wait: work that is already queued is still executed.
ncclResult_t unisonoHostStreamDestroy(cudaStream_t stream);
// Waits until all queued work has completed. An error in that work is returned here, once; the
// stream remains usable.
ncclResult_t unisonoHostStreamSynchronize(cudaStream_t stream);
// Returns ncclSuccess if all work has completed and ncclInProgress if not; errors as
// unisonoHostStreamSynchronize.
ncclResult_t unisonoHostStreamQuery(cudaStream_t stream);
// Waits for all streams of the current device and returns the first error among them.
ncclResult_t unisonoHostDeviceSynchronize(void);

// Graphs, which here are executable as soon as they are captured. Between the first two functions
// what is queued on `stream`, not the default stream, is put into a graph and does not run; calls
// of a group must be on that stream alone. The third queues all of the graph's work; memory that it
// uses must live until it has run for the last time.
typedef struct unisonoHostGraph* unisonoHostGraph_t;  // NOLINT(modernize-use-using): C
ncclResult_t unisonoHostStreamBeginCapture(cudaStream_t stream);
ncclResult_t unisonoHostStreamEndCapture(cudaStream_t stream, unisonoHostGraph_t* graph);
ncclResult_t unisonoHostGraphLaunch(unisonoHostGraph_t graph, cudaStream_t stream);
// Launches that are queued still run.
ncclResult_t unisonoHostGraphDestroy(unisonoHostGraph_t graph);

// Returns the message of the calling thread's last error in a function of this header, or an empty
// string. Valid until the thread's next call of such a function.
const char* unisonoHostGetLastError(void);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif

#endif  // UNISONO_HOST_H_
