#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Collectives of CuPy or JAX, one process for each rank, compared with expected results. LD_PRELOAD chooses the NCCL
library; with --expect, the log must say that it was loaded. Ranks share GPUs where there are fewer of them, which
needs NCCL_MULTI_RANK_GPU_ENABLE=1 and a library that allows it.

  clients.py cupy
  clients.py jax --ranks 4 --expect build/cuda/lib/libnccl.so.2
"""
import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time

COUNT = 100_003
SECONDS = 120


def run_cupy(rank, world, folder):
    import cupy
    from cupy.cuda import nccl

    cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()).use()
    path = os.path.join(folder, "id")
    if rank == 0:
        with open(path + ".new", "wb") as file:
            file.write(nccl.get_unique_id())
        os.rename(path + ".new", path)
    while not os.path.exists(path):
        time.sleep(0.01)
    with open(path, "rb") as file:
        unique_id = file.read()
    comm = nccl.NcclCommunicator(world, unique_id, rank)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        mine = cupy.full(COUNT, rank + 1, dtype=cupy.float32)
        total = cupy.full(COUNT, cupy.nan, dtype=cupy.float32)
        gathered = cupy.full((world, COUNT), cupy.nan, dtype=cupy.float32)
        received = cupy.full(COUNT, cupy.nan, dtype=cupy.float32)
        comm.allReduce(mine.data.ptr, total.data.ptr, COUNT, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)
        comm.allGather(mine.data.ptr, gathered.data.ptr, COUNT, nccl.NCCL_FLOAT32, stream.ptr)
        nccl.groupStart()
        comm.send(mine.data.ptr, COUNT, nccl.NCCL_FLOAT32, (rank + 1) % world, stream.ptr)
        comm.recv(received.data.ptr, COUNT, nccl.NCCL_FLOAT32, (rank - 1) % world, stream.ptr)
        nccl.groupEnd()
    stream.synchronize()
    check("all-reduce", total.get(), world * (world + 1) / 2)
    for peer in range(world):
        check(f"all-gather of rank {peer}", gathered[peer].get(), peer + 1)
    check("message", received.get(), (rank - 1) % world + 1)
    comm.destroy()


def run_jax(rank, world, folder):
    import jax
    import numpy
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    with open(os.path.join(folder, "port"), encoding="ascii") as file:
        port = file.read()
    gpus = len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=True).stdout.splitlines())
    jax.distributed.initialize(f"127.0.0.1:{port}", world, rank, local_device_ids=[rank % gpus])
    mesh = Mesh(numpy.array(jax.devices()), ("ranks",))
    split, whole = NamedSharding(mesh, PartitionSpec("ranks")), NamedSharding(mesh, PartitionSpec())
    mine = numpy.full((1, COUNT), rank + 1, dtype=numpy.float32)
    values = jax.make_array_from_process_local_data(split, mine)
    total = jax.jit(lambda a: a.sum(axis=0), out_shardings=whole)(values)
    gathered = jax.jit(lambda a: a * 2, out_shardings=whole)(values)
    check("all-reduce", numpy.asarray(total.addressable_data(0)), world * (world + 1) / 2)
    rows = numpy.asarray(gathered.addressable_data(0))
    for peer in range(world):
        check(f"all-gather of rank {peer}", rows[peer], 2 * (peer + 1))
    jax.distributed.shutdown()


def check(what, values, expected):
    wrong = int((values != expected).sum())  # also where a value is not a number
    if values.size != COUNT or wrong:
        raise SystemExit(f"{what}: {wrong} of {values.size} values differ from {expected}")


CLIENTS = {"cupy": run_cupy, "jax": run_jax}


def start(options, folder):
    """Starts the ranks. Returns the exit status."""
    with socket.socket() as probe, open(os.path.join(folder, "port"), "w", encoding="ascii") as file:
        probe.bind(("127.0.0.1", 0))
        file.write(str(probe.getsockname()[1]))
    environment = dict(os.environ, NCCL_DEBUG="VERSION", XLA_PYTHON_CLIENT_PREALLOCATE="false")
    processes = []
    for rank in range(options.ranks):
        command = [sys.executable, __file__, options.client, "--ranks", str(options.ranks), "--rank", str(rank),
                   "--folder", folder]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE,
                                          stderr=subprocess.STDOUT, text=True))
    status, end, log = 0, time.monotonic() + SECONDS, ""
    for rank, process in enumerate(processes):
        try:
            text = process.communicate(timeout=max(end - time.monotonic(), 1))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            text = process.communicate()[0] + f"no end after {SECONDS} s\n"
        log += text
        if process.returncode != 0:
            print(f"FAILED: rank {rank} ended with status {process.returncode}:\n{text[-3000:]}")
            status = 1
    loaded = sorted({os.path.realpath(line.split("loaded from ", 1)[1]) for line in log.splitlines() if "loaded from " in line})
    print(f"{options.client} with {options.ranks} ranks: {'failed' if status else 'passed'}, "
          f"library: {', '.join(loaded) or 'another one'}")
    if options.expect and loaded != [os.path.realpath(options.expect)]:
        print(f"FAILED: it did not run on {os.path.realpath(options.expect)}")
        status = 1
    return status


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--expect", metavar="LIBRARY", help="the library that must have been loaded")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        CLIENTS[options.client](options.rank, options.ranks, options.folder)
        return 0
    if options.ranks < 1:
        parser.error("--ranks must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        return start(options, folder)


if __name__ == "__main__":
    sys.exit(main())
