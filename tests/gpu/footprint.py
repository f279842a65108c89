#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints init time and device memory of a communicator for each given libnccl.so.2, one process per
GPU: after init, and after one 64 MB call of every collective.

The libraries are measured in turns, several rounds, each round in fresh processes; the table has the
median over the rounds of the slowest rank (time) and of the largest rank (memory).
"""
import argparse
import ctypes
import multiprocessing
import statistics
import sys
import time
import traceback

FLOAT32, SUM = 7, 0


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * 128)]


def check(library, result):
    if result != 0:
        library.ncclGetLastError.restype = ctypes.c_char_p
        raise RuntimeError(f"NCCL error {result}: {library.ncclGetLastError(None).decode()}")


def used_bytes(torch):
    free, total = torch.cuda.mem_get_info()
    return total - free


def call_every_collective(library, communicator, rank, ranks, count, send, receive, stream):
    def address(tensor):
        return ctypes.c_void_p(tensor.data_ptr())

    def run(function, *arguments):
        check(library, function(*arguments, communicator, stream))

    n, part = ctypes.c_size_t(count), ctypes.c_size_t(count // ranks)
    run(library.ncclAllReduce, address(send), address(receive), n, FLOAT32, SUM)
    run(library.ncclAllGather, address(send), address(receive), part, FLOAT32)
    run(library.ncclReduceScatter, address(send), address(receive), part, FLOAT32, SUM)
    run(library.ncclBroadcast, address(send), address(receive), n, FLOAT32, 0)
    run(library.ncclReduce, address(send), address(receive), n, FLOAT32, SUM, 0)
    check(library, library.ncclGroupStart())
    for peer in range(ranks):
        offset = ctypes.c_size_t(send.element_size() * (count // ranks) * peer)
        run(library.ncclSend, ctypes.c_void_p(send.data_ptr() + offset.value), part, FLOAT32, peer)
        run(library.ncclRecv, ctypes.c_void_p(receive.data_ptr() + offset.value), part, FLOAT32,
            peer)
    check(library, library.ncclGroupEnd())


def run_rank(path, rank, ranks, count, unique_id, barrier, results):
    try:
        import torch
        torch.cuda.set_device(rank)
        send = torch.randn(count, device="cuda")
        receive = torch.full((count,), float("nan"), device="cuda")
        torch.cuda.synchronize()
        library = ctypes.CDLL(path)
        identity = UniqueId()
        if rank == 0:
            check(library, library.ncclGetUniqueId(ctypes.byref(identity)))
            unique_id[:] = bytes(identity)
        barrier.wait()
        ctypes.memmove(ctypes.byref(identity), bytes(unique_id[:]), 128)
        before = used_bytes(torch)
        start = time.perf_counter()
        communicator = ctypes.c_void_p()
        check(library, library.ncclCommInitRank(ctypes.byref(communicator), ranks, identity, rank))
        seconds = time.perf_counter() - start
        after_init = used_bytes(torch) - before
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        call_every_collective(library, communicator, rank, ranks, count, send, receive, stream)
        torch.cuda.synchronize()
        after_calls = used_bytes(torch) - before
        barrier.wait()
        check(library, library.ncclCommDestroy(communicator))
        results.put((rank, seconds, after_init, after_calls, None))
    except Exception:
        results.put((rank, 0, 0, 0, traceback.format_exc()))


def measure(path, ranks, count):
    context = multiprocessing.get_context("spawn")
    unique_id = context.Array(ctypes.c_ubyte, 128, lock=False)
    barrier, results = context.Barrier(ranks), context.Queue()
    processes = [context.Process(target=run_rank,
                                 args=(path, rank, ranks, count, unique_id, barrier, results))
                 for rank in range(ranks)]
    for process in processes:
        process.start()
    rows = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    for row in rows:
        if row[4]:
            raise RuntimeError(f"{path}, rank {row[0]}: {row[4]}")
    return [max(row[column] for row in rows) for column in (1, 2, 3)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("libraries", nargs="+", metavar="NAME=PATH")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bytes", type=int, default=64 << 20)
    options = parser.parse_args()
    libraries = [entry.split("=", 1) for entry in options.libraries]
    if any(len(entry) != 2 for entry in libraries):
        parser.error("name every library: NAME=PATH")
    measured = {name: [] for name, _ in libraries}
    for _ in range(options.rounds):
        for name, path in libraries:
            measured[name].append(measure(path, options.ranks, options.bytes // 4))
    print(f"{'library':<12} {'init ms':>9} {'MiB at init':>12} {'MiB after calls':>16}")
    for name, rows in measured.items():
        seconds, init, calls = (statistics.median(column) for column in zip(*rows))
        print(f"{name:<12} {seconds * 1e3:9.1f} {init / 2**20:12.1f} {calls / 2**20:16.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
