#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Faults on two GPUs, one process each: a rank that is late, stopped, killed or makes another call,
and communicators that grow, shrink, are suspended or revoked. Prints one line per run with the time
that passed until the surviving rank knew, and the messages with --verbose. Exit status 1 if a run
failed.

A rank is this script again, with --rank. The ranks and the parent communicate through files of one
folder.
"""
import argparse
import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

INT32, SUM = 2, 0
PATIENCE = 20.0  # seconds until a run counts as hanging
FEW, MANY = 1000, 256 << 20  # elements of a one-shot and of a large call


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * 128)]


class Folder:
    """Messages between processes: a file appears whole or not at all."""

    def __init__(self, path):
        self.path = pathlib.Path(path)

    def put(self, name, data=b""):
        part = self.path / f"{name}.part"
        part.write_bytes(data)
        part.rename(self.path / name)

    def get(self, name, patience=PATIENCE):
        deadline = time.monotonic() + patience
        while not (self.path / name).exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not come within {patience} s")
            time.sleep(0.002)
        return (self.path / name).read_bytes()

    def log(self, rank):
        return (self.path / f"log{rank}").read_text(errors="replace")

    def wait_for_log(self, rank, text):
        deadline = time.monotonic() + PATIENCE
        while text not in self.log(rank):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the log of rank {rank} has no '{text}'")
            time.sleep(0.02)


class Rank:
    def __init__(self, options):
        import torch
        self.torch, self.number = torch, options.rank
        self.folder = Folder(options.folder)
        torch.cuda.set_device(self.number)
        self.nccl = ctypes.CDLL(options.library)
        self.nccl.ncclGetLastError.restype = ctypes.c_char_p
        self.comm = ctypes.c_void_p()
        self.few = torch.ones(FEW, dtype=torch.int32, device="cuda")

    def check(self, result):
        if result != 0:
            raise RuntimeError(f"NCCL error {result}: {self.last_error()}")

    def last_error(self):
        return self.nccl.ncclGetLastError(self.comm).decode()

    def shared_id(self, name="id", make=None):
        identity = UniqueId()
        if self.number == 0:
            self.check(make(identity) if make else
                       self.nccl.ncclGetUniqueId(ctypes.byref(identity)))
            self.folder.put(name, bytes(identity))
        ctypes.memmove(ctypes.byref(identity), self.folder.get(name), 128)
        return identity

    def join(self, ranks=2):
        identity = self.shared_id()
        return self.nccl.ncclCommInitRank(ctypes.byref(self.comm), ranks, identity, self.number)

    def sum(self, buffer, count=None):
        stream = ctypes.c_void_p(self.torch.cuda.current_stream().cuda_stream)
        pointer = ctypes.c_void_p(buffer.data_ptr())
        return self.nccl.ncclAllReduce(pointer, pointer, ctypes.c_size_t(count or buffer.numel()),
                                       INT32, SUM, self.comm, stream)

    def checked_sum(self, ranks=2):
        buffer = self.torch.arange(FEW, dtype=self.torch.int32, device="cuda") + self.number
        expected = self.torch.arange(FEW, dtype=self.torch.int32) * ranks + sum(range(ranks))
        self.check(self.sum(buffer))
        if not self.torch.equal(buffer.cpu(), expected):
            raise RuntimeError("a sum is wrong")

    def wait_for_error(self):
        """Time at which the asynchronous error came, and its text."""
        deadline, state = time.monotonic() + PATIENCE, ctypes.c_int(0)
        while state.value == 0:
            if time.monotonic() > deadline:
                raise RuntimeError("no asynchronous error came")
            self.check(self.nccl.ncclCommGetAsyncError(self.comm, ctypes.byref(state)))
            time.sleep(0.001)
        return time.time(), f"{state.value}: {self.last_error()}"

    def leave(self):
        self.check(self.nccl.ncclCommDestroy(self.comm))


# What the ranks do. A line that a rank prints is part of the result.

def rank_late(rank):
    rank.check(rank.join())
    rank.checked_sum()
    if rank.number == 1:
        rank.folder.get("go")
    rank.folder.put(f"second{rank.number}")
    rank.checked_sum()
    rank.leave()


def rank_stopped(rank):
    rank.check(rank.join())
    rank.checked_sum()
    if rank.number == 1:
        time.sleep(1)  # its watchdog sees that the call is done
        os.kill(os.getpid(), signal.SIGSTOP)
    rank.checked_sum()
    rank.leave()


def rank_mismatch(rank):
    rank.check(rank.join())
    rank.checked_sum()
    begin = time.time()
    rank.sum(rank.few, FEW // (1 + rank.number))
    at, text = rank.wait_for_error()
    rank.torch.cuda.synchronize()
    print(f"rank {rank.number} after {at - begin:.2f} s: {text}")
    rank.check(rank.nccl.ncclCommAbort(rank.comm))


def survive(rank):
    """Rank 0 learns of the death, ends what is queued, and works on alone."""
    at, text = rank.wait_for_error()
    killed = float(rank.folder.get("killed"))
    rank.torch.cuda.synchronize()
    synchronized = time.time()
    rank.check(rank.nccl.ncclCommAbort(rank.comm))
    rank.comm = ctypes.c_void_p()
    identity = UniqueId()
    rank.check(rank.nccl.ncclGetUniqueId(ctypes.byref(identity)))
    rank.check(rank.nccl.ncclCommInitRank(ctypes.byref(rank.comm), 1, identity, 0))
    rank.checked_sum(ranks=1)
    rank.leave()
    print(f"error after {at - killed:.3f} s, streams ended after {synchronized - killed:.3f} s: "
          f"{text}")


def rank_killed_small(rank):
    rank.check(rank.join())
    rank.checked_sum()
    rank.folder.put(f"ready{rank.number}")
    for _ in range(20000 if rank.number == 0 else 1 << 30):
        if rank.sum(rank.few) != 0:
            break
    survive(rank)


def rank_killed_large(rank):
    large = rank.torch.ones(MANY, dtype=rank.torch.int32, device="cuda")
    rank.check(rank.join())
    rank.checked_sum()
    rank.folder.put(f"ready{rank.number}")
    for _ in range(400 if rank.number == 0 else 1 << 30):
        if rank.sum(large) != 0:
            break
    survive(rank)


def rank_killed_graph(rank):
    rank.check(rank.join())
    rank.checked_sum()
    graph = rank.torch.cuda.CUDAGraph()
    with rank.torch.cuda.graph(graph):
        for _ in range(10):
            rank.check(rank.sum(rank.few))
    rank.folder.put(f"ready{rank.number}")
    for _ in range(2000 if rank.number == 0 else 1 << 30):
        graph.replay()
    survive(rank)


def rank_killed_init(rank):
    """A third rank never comes; rank 1 dies while both wait for it."""
    rank.shared_id("not_used")
    rank.folder.put(f"ready{rank.number}")
    result = rank.join(ranks=3)
    at = time.time()
    killed = float(rank.folder.get("killed"))
    print(f"init returned {result} after {at - killed:.3f} s: {rank.last_error()}")
    if result == 0:
        raise RuntimeError("a communicator was made without rank 1")


def memory_statistic(rank, statistic):
    value = ctypes.c_uint64(0)
    rank.check(rank.nccl.ncclCommMemStats(rank.comm, statistic, ctypes.byref(value)))
    return value.value


def rank_grow(rank):
    if rank.number == 0:
        rank.check(rank.join(ranks=1))
        rank.checked_sum(ranks=1)
    identity = rank.shared_id("grow", lambda made: rank.nccl.ncclCommGetUniqueId(
        rank.comm, ctypes.byref(made)))
    grown = ctypes.c_void_p()
    rank.check(rank.nccl.ncclCommGrow(
        rank.comm if rank.number == 0 else None, 2, ctypes.byref(identity),
        -1 if rank.number == 0 else 1, ctypes.byref(grown), None))
    old, rank.comm = rank.comm, grown
    if rank.number == 0:
        rank.check(rank.nccl.ncclCommDestroy(old))
    rank.checked_sum()
    values = [memory_statistic(rank, statistic) for statistic in range(4)]
    if rank.number == 0:
        shrunk = ctypes.c_void_p()
        excluded = (ctypes.c_int * 1)(1)
        rank.check(rank.nccl.ncclCommShrink(rank.comm, excluded, 1, ctypes.byref(shrunk), None, 0))
        old, rank.comm = rank.comm, shrunk
        rank.checked_sum(ranks=1)
        rank.folder.put("shrunk")
        rank.check(rank.nccl.ncclCommDestroy(old))
        print(f"memory statistics {values}")
    else:
        rank.folder.get("shrunk")
    rank.leave()


def rank_suspend(rank):
    rank.check(rank.join())
    rank.checked_sum()
    rank.torch.cuda.synchronize()
    free_before = rank.torch.cuda.mem_get_info()[0]
    rank.check(rank.nccl.ncclCommSuspend(rank.comm, 1))
    freed = rank.torch.cuda.mem_get_info()[0] - free_before
    if memory_statistic(rank, 1) != 1:
        raise RuntimeError("the communicator is not suspended")
    rank.check(rank.nccl.ncclCommResume(rank.comm))
    if memory_statistic(rank, 1) != 0:
        raise RuntimeError("the communicator is still suspended")
    rank.checked_sum()
    print(f"rank {rank.number}: {freed >> 20} MiB came back")
    rank.leave()


def rank_revoke(rank):
    rank.check(rank.join())
    rank.checked_sum()
    if rank.number == 0:
        rank.check(rank.sum(rank.few))  # rank 1 never makes this call
    time.sleep(0.5)
    begin = time.time()
    rank.check(rank.nccl.ncclCommRevoke(rank.comm, 0))
    rank.torch.cuda.synchronize()
    print(f"rank {rank.number}: streams ended {time.time() - begin:.3f} s after the revocation")
    rank.leave()


# What the parent does at the same time, and what it expects in the logs.

def parent_late(folder, processes, options):
    folder.get("second0", 60)
    report = subprocess.run([options.program, "doctor", str(processes[0].pid)], text=True,
                            capture_output=True)
    folder.wait_for_log(0, "unisono_hang")
    folder.put("go")
    expect(folder.log(0), "not arrived: rank 1")
    expect(report.stdout + report.stderr, "has loaded")


def parent_stopped(folder, processes, _options):
    folder.wait_for_log(0, "unisono_hang")
    os.kill(processes[1].pid, signal.SIGCONT)
    expect(folder.log(0), "its process is stopped")


def parent_killed(folder, processes, _options):
    folder.get("ready0", 60)
    folder.get("ready1", 60)
    time.sleep(0.3)
    killed = time.time()
    os.kill(processes[1].pid, signal.SIGKILL)
    folder.put("killed", str(killed).encode())


def parent_waits(_folder, _processes, _options):
    pass


def expect(text, part):
    if part not in text:
        raise RuntimeError(f"'{part}' is missing in: {text}")


SCENARIOS = {
    "late": (rank_late, parent_late),
    "stopped": (rank_stopped, parent_stopped),
    "mismatch": (rank_mismatch, parent_waits),
    "killed_small": (rank_killed_small, parent_killed),
    "killed_large": (rank_killed_large, parent_killed),
    "killed_graph": (rank_killed_graph, parent_killed),
    "killed_init": (rank_killed_init, parent_killed),
    "grow": (rank_grow, parent_waits),
    "suspend": (rank_suspend, parent_waits),
    "revoke": (rank_revoke, parent_waits),
}


def run(name, options):
    """Runs a scenario once: (passed, what the ranks printed, their logs)."""
    with tempfile.TemporaryDirectory() as path:
        folder, processes = Folder(path), []
        problem = ""
        for rank in range(2):
            environment = dict(os.environ, UNISONO_HANG_SECONDS="2",
                               NCCL_DEBUG=os.environ.get("NCCL_DEBUG", "WARN"),
                               NCCL_DEBUG_FILE=f"{path}/log{rank}")
            (folder.path / f"log{rank}").touch()
            output = open(f"{path}/out{rank}", "w", encoding="utf-8")
            processes.append(subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), "--folder", path, "--library",
                 options.library, name], stdout=output, stderr=subprocess.STDOUT, env=environment))
        try:
            SCENARIOS[name][1](folder, processes, options)
            killed = name.startswith("killed")
            for rank, process in enumerate(processes):
                status = process.wait(timeout=60)
                if status != (-signal.SIGKILL if killed and rank == 1 else 0):
                    problem += f"rank {rank} ended with status {status}. "
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            problem += str(error)
        for process in processes:
            process.kill()
            process.wait()
        printed = "".join((folder.path / f"out{rank}").read_text() for rank in range(2))
        return problem, printed, folder.log(0) + folder.log(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO",
                        help=f"of {', '.join(SCENARIOS)} (default: all)")
    parser.add_argument("--library", default="build/cuda/lib/libnccl.so.2")
    parser.add_argument("--program", default="build/cuda/bin/unisono")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="print the logs of the ranks")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [name for name in options.scenarios if name not in SCENARIOS]
    if unknown:
        parser.error(f"unknown scenario '{unknown[0]}'; there are {', '.join(SCENARIOS)}")
    if not os.path.exists(options.library):
        parser.error(f"no library {options.library}")
    if options.rank is not None:
        SCENARIOS[options.scenarios[0]][0](Rank(options))
        return 0
    failed = 0
    for name in options.scenarios or SCENARIOS:
        for _ in range(options.repeats):
            begin = time.monotonic()
            problem, printed, logs = run(name, options)
            failed += bool(problem)
            print(f"{name:<14}{'FAILED' if problem else 'passed'} {time.monotonic() - begin:5.1f} s "
                  f"{problem}", flush=True)
            for line in printed.splitlines():
                print(f"    {line}", flush=True)
            if options.verbose or problem:
                print("".join(f"    | {line}\n" for line in logs.splitlines()), flush=True)
    print(f"{failed} runs failed" if failed else "all runs passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
