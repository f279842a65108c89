// SPDX-License-Identifier: Apache-2.0
#pragma once

// The few primitives that differ between a GPU and a CPU. Device code above this folder uses
// nothing else of either target, and lives in `namespace unisono::device::UNISONO_TARGET` so that
// one library can hold both.
//
//   UNISONO_DEVICE           qualifier of every device function; UNISONO_DEVICE_CALL: never inlined
//   ThreadGroup              threads that work on one role: rank() and size() of the workers, and
//                            the duties of waiting for and posting to peers
//   ThreadGroup::setWord     words that the waiter leaves to the other roles
//   load/store with order    loadRelaxed, loadAcquire, storeRelaxed, storeRelease,
//                            exchange, fetchAddAcquire, addRelease (system scope)
//   noteRead, noteWrite      announce the plain accesses that follow, a call for a range, so that
//                            the host target can check them for data races; nothing on a GPU
//   storeForCpu, addForCpu   for words that only the CPU reads
//   kLoadsMayHang            whether a load may never return, as on a CPU whose page is not there
//   Vector16                 16 bytes moved by one instruction: loadVector, loadVectorCached,
//                            storeVector; at any address: loadWindow with vectorOf, storeAnywhere
//   Line                     8 bytes of data and 8 of flag that arrive together: storeLine,
//                            loadLine
//   storeLine128, loadLine128
//                            a line of 16 words that arrives as one, kLineLanes lanes with
//                            kLaneWords words each
//   MulticastView            a multicast address: loads combine, stores reach the memory of all
//                            members; fenceAliases orders them with accesses to one member
//                            (buffer_view.h)
//   waitUntil                a wait loop that looks at the abort flag and, on the host, lets
//                            others run; waitWhileAlive: until the peer has ended;
//                            waitUntilAll: until the condition holds for all lanes of a warp
#if defined(__CUDACC__)
#include "device/simt/cuda.h"
#else
#include "device/simt/host.h"
#endif
