#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs two ranks on GPU 0 with the test profiler plug-in: checks the events that it is told, and
that a communicator whose calls were captured is not suspended.

With --network each rank imitates a host of its own, and data pass through sockets of the loopback
interface. Uses the CUDA driver alone.
"""
import argparse
import collections
import ctypes
import os
import pathlib
import threading

COUNT, CALLS, MESSAGE = 100003, 5, 70001
INT8, INT32, SUM, SUSPEND_MEMORY = 0, 2, 0, 1
# Types of events and states of ncclProfiler_v6_t.
COLLECTIVE, P2P, PROXY_OP, PROXY_STEP, KERNEL_CHANNEL = 2, 4, 8, 16, 64
SEND_GPU_WAIT, SEND_WAIT, RECEIVE_WAIT, RECEIVE_GPU_WAIT, CHANNEL_STOP = 8, 9, 10, 12, 22


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * 128)]


class Job:
    def __init__(self, options):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.nccl = ctypes.CDLL(str(options.library.resolve()))
        self.nccl.ncclGetLastError.restype = ctypes.c_char_p
        self.plugin = ctypes.CDLL(str(options.plugin.resolve()))
        self.barrier = threading.Barrier(2, timeout=60)
        self.context = ctypes.c_void_p()
        self.check(self.cuda.cuInit(0))
        self.check(self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), 0))
        self.check(self.cuda.cuCtxSetCurrent(self.context))
        self.communicators = [ctypes.c_void_p(), ctypes.c_void_p()]
        identity = UniqueId()
        self.call(self.nccl.ncclGetUniqueId(ctypes.byref(identity)))
        self.call(self.nccl.ncclGroupStart())
        for rank, communicator in enumerate(self.communicators):
            if options.network:
                os.environ["NCCL_HOSTID"] = f"host {rank}"
            self.call(self.nccl.ncclCommInitRank(ctypes.byref(communicator), 2, identity, rank))
        self.call(self.nccl.ncclGroupEnd())

    @staticmethod
    def check(result):
        if result != 0:
            raise RuntimeError(f"CUDA driver error {result}")

    def call(self, result):
        if result != 0:
            raise RuntimeError(f"NCCL error {result}: {self.nccl.ncclGetLastError(None).decode()}")

    def synchronize(self, stream):
        self.check(self.cuda.cuStreamSynchronize(stream))
        self.barrier.wait()

    def run(self, rank):
        cuda, nccl, communicator = self.cuda, self.nccl, self.communicators[rank]
        self.check(cuda.cuCtxSetCurrent(self.context))
        stream, buffer, spare = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.check(cuda.cuStreamCreate(ctypes.byref(stream), 1))
        self.check(cuda.cuMemAlloc_v2(ctypes.byref(buffer), ctypes.c_size_t(4 * COUNT)))
        self.check(cuda.cuMemAlloc_v2(ctypes.byref(spare), ctypes.c_size_t(MESSAGE)))
        self.check(cuda.cuMemsetD32_v2(buffer, rank + 1, ctypes.c_size_t(COUNT)))
        self.check(cuda.cuCtxSynchronize())
        self.barrier.wait()  # the ranks share a context: nothing synchronizes it while kernels wait

        def reduce():
            self.call(nccl.ncclAllReduce(buffer, buffer, ctypes.c_size_t(COUNT), INT32, SUM,
                                         communicator, stream))

        for _ in range(CALLS):
            reduce()
        self.synchronize(stream)
        found = (ctypes.c_int * COUNT)()
        self.check(cuda.cuMemcpyDtoH_v2(found, buffer, ctypes.c_size_t(4 * COUNT)))
        assert set(found) == {3 << (CALLS - 1)}, "wrong sums"
        self.call(nccl.ncclGroupStart())
        size = ctypes.c_size_t(MESSAGE)
        self.call(nccl.ncclSend(buffer, size, INT8, 1 - rank, communicator, stream))
        self.call(nccl.ncclRecv(spare, size, INT8, 1 - rank, communicator, stream))
        self.call(nccl.ncclGroupEnd())
        self.synchronize(stream)

        self.call(nccl.ncclCommSuspend(communicator, SUSPEND_MEMORY))
        self.call(nccl.ncclCommResume(communicator))
        reduce()
        self.synchronize(stream)
        graph, replayed = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(cuda.cuStreamBeginCapture_v2(stream, 1))
        reduce()
        self.check(cuda.cuStreamEndCapture(stream, ctypes.byref(graph)))
        self.check(cuda.cuGraphInstantiateWithFlags(ctypes.byref(replayed), graph,
                                                    ctypes.c_ulonglong(0)))
        for _ in range(3):
            self.check(cuda.cuGraphLaunch(replayed, stream))
        self.synchronize(stream)
        assert nccl.ncclCommSuspend(communicator, SUSPEND_MEMORY) != 0, "not refused"
        assert b"captured" in nccl.ncclGetLastError(communicator)
        reduce()
        self.synchronize(stream)
        self.check(cuda.cuGraphExecDestroy(replayed))
        self.check(cuda.cuGraphDestroy(graph))
        self.call(nccl.ncclCommDestroy(communicator))

    def notes(self):
        notes = ctypes.c_char.in_dll(self.plugin, "fakeProfilerNotes")
        return [line.split() for line in
                ctypes.string_at(ctypes.addressof(notes)).decode().splitlines()]


def values_of(words):
    """The words of a note in pairs of name and value."""
    return dict(zip(words[0::2], words[1::2]))


def check_events(notes, network):
    types, times, running = {}, {}, set()
    kinds, states = collections.Counter(), collections.Counter()
    for words in notes:
        values = values_of(words if words[0] != "stop" else words[1:])
        if words[0] == "start":
            event, kind = values["event"], int(values["start"])
            types[event] = kind
            running.add(event)
            kinds[kind] += 1
            times[event] = int(values.get("time", 0))
            if kind == PROXY_OP:
                assert types[values["parent"]] in (COLLECTIVE, P2P), words
        elif words[0] == "stop":
            running.remove(values["event"])
        elif words[0] == "state":
            states[int(values["state"])] += 1
            if int(values["state"]) == CHANNEL_STOP:
                assert int(values["time"]) >= times[values["event"]] > 0, words
    print("events by type:", dict(sorted(kinds.items())))
    print("states:", dict(sorted(states.items())))
    assert not running, f"{len(running)} events are never stopped"
    assert kinds[COLLECTIVE] >= 2 * CALLS and kinds[P2P] == 4
    assert states[CHANNEL_STOP] == kinds[KERNEL_CHANNEL] > 0
    assert (kinds[PROXY_OP] > 0) == (kinds[PROXY_STEP] > 0) == network
    assert states[SEND_GPU_WAIT] == states[SEND_WAIT]
    assert states[RECEIVE_WAIT] == states[RECEIVE_GPU_WAIT]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=pathlib.Path, required=True, help="libnccl.so.2")
    parser.add_argument("--plugin", type=pathlib.Path, required=True,
                        help="libnccl-profiler-fake6.so of build/cuda/tests/profiler")
    parser.add_argument("--network", action="store_true", help="two imitated hosts")
    options = parser.parse_args()
    os.environ.update(NCCL_MULTI_RANK_GPU_ENABLE="1", FAKE_PROFILER_EVENTS="4095",
                      NCCL_PROFILER_PLUGIN=str(options.plugin.resolve()), NCCL_NVLS_ENABLE="0")
    if options.network:
        os.environ.update(NCCL_ALGO="ring", NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo")
    job = Job(options)
    failures = []

    def guarded(rank):
        try:
            job.run(rank)
        except BaseException as error:
            failures.append(f"rank {rank}: {error!r}")
            job.barrier.abort()

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    assert not failures, failures
    check_events(job.notes(), options.network)
    print("passed")


if __name__ == "__main__":
    main()
