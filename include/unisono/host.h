// Devices without a GPU: what a program needs beside nccl.h to run on Unisono's host backend, where
// the devices are simulated in this process. Each function does what the function of the CUDA
// runtime with the same last name does.
//
// What holds for every function:
// - It returns ncclSuccess or the class of the error; unisonoHostGetLastError then has the text.
//   Results are written only on success.
// - It may be called from any thread. The current device is each thread's own and starts as 0.
// - With the CUDA backend in use (UNISONO_BACKEND=cuda, or empty and a GPU is there) it returns
//   ncclInvalidUsage.
// - A stream is given to nccl.h's functions as it is. NULL is the default stream of the current
//   device. Unlike CUDA's it does not wait for other streams, nor they for it.
//
// The devices are those of the topology file that UNISONO_HOST_TOPOLOGY names, else
// UNISONO_HOST_DEVICES (8) like ones.
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

// How many devices there are. ncclInvalidArgument: the topology file or a setting is wrong.
ncclResult_t unisonoHostGetDeviceCount(int* count);

// Makes `device`, from 0 to the count less one, current for the calling thread.
ncclResult_t unisonoHostSetDevice(int device);
ncclResult_t unisonoHostGetDevice(int* device);

// Zero-filled memory of the current device, aligned to 512 bytes. Any thread of this process may
// also use it as ordinary memory. `bytes` may be 0. ncclSystemError: the system has none left.
ncclResult_t unisonoHostMalloc(void** address, size_t bytes);
// Frees what unisonoHostMalloc gave; NULL is nothing to do. Does not wait: no queued work may still
// use it. ncclInvalidArgument: not such an address, or freed already.
ncclResult_t unisonoHostFree(void* address);

// Copies between any two of: device memory, ordinary memory. The first returns when the copy is
// done, in order with the default stream; the second when it is queued.
ncclResult_t unisonoHostMemcpy(void* destination, const void* source, size_t bytes);
ncclResult_t unisonoHostMemcpyAsync(void* destination, const void* source, size_t bytes,
                                    cudaStream_t stream);

// Sets each byte to the low 8 bits of `value`.
ncclResult_t unisonoHostMemset(void* destination, int value, size_t bytes);
ncclResult_t unisonoHostMemsetAsync(void* destination, int value, size_t bytes,
                                    cudaStream_t stream);

// A stream of the current device.
ncclResult_t unisonoHostStreamCreate(cudaStream_t* stream);
// Ends the use of a stream. Does not wait: work that it has is still done.
ncclResult_t unisonoHostStreamDestroy(cudaStream_t stream);
// Waits for all work that was queued. An error in that work is returned here, once; the stream can
// be used on.
ncclResult_t unisonoHostStreamSynchronize(cudaStream_t stream);
// ncclSuccess: all is done; ncclInProgress: not yet; else as unisonoHostStreamSynchronize.
ncclResult_t unisonoHostStreamQuery(cudaStream_t stream);
// Waits for all streams of the current device; returns the first error among them.
ncclResult_t unisonoHostDeviceSynchronize(void);

// The calling thread's last error of a function of this header: what happened and what to do.
// Empty if there was none. Valid until the thread's next call of such a function.
const char* unisonoHostGetLastError(void);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif

#endif  // UNISONO_HOST_H_
