#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Faults on two GPUs, one process each: a rank that is late, stopped, killed, gone or makes another
call, outside and inside CUDA graphs and in a training with DistributedDataParallel, and
communicators that grow, shrink, are suspended or revoked. Prints one line per run, with the messages
in case of --verbose, and a table of how long it took until the surviving rank knew and its streams
had ended. Exit status 1 if a run failed.

  faults.py                                       every scenario once
  faults.py --repeats 5 --limit 240 stopped mismatch killed_small ...

Ranks are forks of this script, which loads PyTorch once but no CUDA, with the library preloaded.
They and the parent communicate through files of one folder.
"""
import argparse
import copy
import ctypes
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import traceback

INT32, SUM = 2, 0
PATIENCE = 15.0  # seconds until a run counts as hanging
LONGEST = 2.0  # seconds in which the error comes and streams end
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
    def __init__(self, number, folder, options):
        import torch
        self.torch, self.number = torch, number
        self.folder = folder
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


def measured(**seconds):
    """For the table at the end."""
    print("measured " + json.dumps(seconds))


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
    print(f"rank {rank.number}: {text}")
    measured(error=at - begin, streams=time.time() - begin)
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
    print(text)
    measured(error=at - killed, streams=synchronized - killed)
    expect(text, "Rank 1 (process ")


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


def captured(rank):
    """A graph of two calls, which was replayed twice."""
    rank.check(rank.join())
    rank.checked_sum()
    graph = rank.torch.cuda.CUDAGraph()
    with rank.torch.cuda.graph(graph):
        for _ in range(2):
            rank.check(rank.sum(rank.few))
    for _ in range(2):
        graph.replay()
    rank.torch.cuda.synchronize()
    return graph


def rank_graph_late(rank):
    """Rank 1 makes its third replay when a report has said that it is missing."""
    graph = captured(rank)
    if rank.number == 1:
        rank.folder.get("go")
    graph.replay()
    # Not by a copy to pageable memory: while a thread is in one, the device cannot be asked.
    while not rank.torch.cuda.current_stream().query():
        time.sleep(0.01)
    rank.checked_sum()
    rank.leave()


def rank_graph_left(rank):
    """Rank 1 has destroyed its communicator, and rank 0 replays a graph that needs it."""
    graph = captured(rank)
    if rank.number == 1:
        rank.leave()
        rank.folder.put("left")
        return
    rank.folder.get("left")
    begin = time.time()
    graph.replay()
    at, text = rank.wait_for_error()
    rank.torch.cuda.synchronize()
    print(text)
    measured(error=at - begin, streams=time.time() - begin)
    expect(text, "was destroyed before it took part in collective call 6")
    rank.check(rank.nccl.ncclCommAbort(rank.comm))


class Training:
    """A small model under DistributedDataParallel, whose last good state is kept."""

    def __init__(self, rank, group):
        self.torch, self.number = rank.torch, rank.number
        self.torch.manual_seed(1)
        nn = self.torch.nn
        self.model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).cuda()
        self.kept = copy.deepcopy(self.model.state_dict())
        # One batch, so that the loss decreases in every step.
        self.data = self.torch.randn(256, 512, device="cuda")
        self.join(rank.folder.path / group, 2)

    def join(self, rendezvous, ranks):
        self.torch.distributed.init_process_group(
            "nccl", init_method=f"file://{rendezvous}", rank=self.number if ranks == 2 else 0,
            world_size=ranks)
        self.model.load_state_dict(self.kept)
        self.parallel = self.torch.nn.parallel.DistributedDataParallel(
            self.model, device_ids=[self.number])
        self.optimizer = self.torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self):
        """The mean loss of all ranks. Reading it is where a failure becomes an exception."""
        self.optimizer.zero_grad()
        loss = (self.parallel(self.data) - self.data).square().mean()
        loss.backward()
        mean = loss.detach().clone()
        self.torch.distributed.all_reduce(mean)
        self.optimizer.step()
        value = mean.item() / self.torch.distributed.get_world_size()
        self.kept = copy.deepcopy(self.model.state_dict())
        return value


def rank_killed_ddp(rank):
    """Rank 0 is told who died by an exception of PyTorch, and trains on alone."""
    training = Training(rank, "first")
    for _ in range(5):
        training.step()
    rank.folder.put(f"ready{rank.number}")
    text = ""
    try:
        begin = time.time()
        while time.time() - begin < PATIENCE:
            training.step()
    except Exception as error:  # of torch.distributed, whose class depends on its version
        text = str(error)
    at = time.time()
    killed = float(rank.folder.get("killed"))
    print(text)
    measured(error=at - killed)
    expect(text, "Rank 1 (process ")
    # destroy_process_group() would throw the error of the communicator once more.
    rank.torch.distributed.distributed_c10d._abort_process_group()
    training.join(rank.folder.path / "second", 1)
    losses = [training.step() for _ in range(20)]
    measured(trains_again=time.time() - killed)
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
    if not losses[-1] < losses[0]:
        raise RuntimeError("the loss does not decrease after the failure")
    rank.torch.distributed.destroy_process_group()


def rank_killed_init(rank):
    """A third rank never comes; rank 1 dies while both wait for it."""
    rank.shared_id("not_used")
    rank.folder.put(f"ready{rank.number}")
    result = rank.join(ranks=3)
    at = time.time()
    killed = float(rank.folder.get("killed"))
    print(f"init returned {result}: {rank.last_error()}")
    measured(error=at - killed)
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


def parent_graph_late(folder, _processes, _options):
    folder.wait_for_log(0, "unisono_hang")
    folder.put("go")
    expect(folder.log(0), "not arrived: rank 1")
    expect(folder.log(0), "replay 3 of captured call 1")


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
    "killed_ddp": (rank_killed_ddp, parent_killed),
    "graph_late": (rank_graph_late, parent_graph_late),
    "graph_left": (rank_graph_left, parent_waits),
    "grow": (rank_grow, parent_waits),
    "suspend": (rank_suspend, parent_waits),
    "revoke": (rank_revoke, parent_waits),
}


class Process:
    """A rank, forked from this process, in which CUDA was not used."""

    def __init__(self, name, number, folder, options):
        self.status = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._main(name, number, folder, options)

    @staticmethod
    def _main(name, number, folder, options):
        status = 1
        try:
            output = os.open(folder.path / f"out{number}", os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ.update(
                UNISONO_HANG_SECONDS="2", NCCL_DEBUG=os.environ.get("NCCL_DEBUG", "WARN"),
                NCCL_DEBUG_FILE=f"{folder.path}/log{number}",
                # A collective that fails is an exception where it is waited for.
                TORCH_NCCL_BLOCKING_WAIT="1", TORCH_NCCL_ASYNC_ERROR_HANDLING="0")
            SCENARIOS[name][0](Rank(number, folder, options))
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def wait(self, patience):
        deadline = time.monotonic() + patience
        while self.status is None and time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid != 0:
                self.status = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.005)
        return self.status

    def end(self):
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(60)


def run(name, options):
    """Runs a scenario once: (what went wrong, what the ranks printed, their logs, the times)."""
    with tempfile.TemporaryDirectory() as path:
        folder, problem, processes = Folder(path), "", []
        for rank in range(2):
            for file in (f"log{rank}", f"out{rank}"):
                (folder.path / file).touch()
            processes.append(Process(name, rank, folder, options))
        try:
            SCENARIOS[name][1](folder, processes, options)
            killed = name.startswith("killed")
            for rank, process in enumerate(processes):
                status = process.wait(2 * PATIENCE)
                if status != (-signal.SIGKILL if killed and rank == 1 else 0):
                    problem += f"rank {rank} ended with status {status}. "
        except RuntimeError as error:
            problem += str(error)
        for process in processes:
            process.end()
        lines = "".join((folder.path / f"out{rank}").read_text() for rank in range(2)).splitlines()
        times = {}
        for line in lines:
            if line.startswith("measured "):
                for what, seconds in json.loads(line[len("measured "):]).items():
                    times[what] = max(seconds, times.get(what, 0))
        late = [f"{what} after {times[what]:.1f} s" for what in ("error", "streams")
                if times.get(what, 0) > LONGEST]
        if late:
            problem += ", ".join(late)
        printed = [line for line in lines if not line.startswith("measured ")]
        return problem, printed, folder.log(0) + folder.log(1), times


def print_table(results):
    print(f"{'scenario':<14}{'passed':>8}{'error, s':>18}{'streams end, s':>18}"
          f"{'trains again, s':>18}")
    for name, runs in results.items():
        passed = sum(not problem for problem, _ in runs)
        cells = []
        for what in ("error", "streams", "trains_again"):
            values = [times[what] for _, times in runs if what in times]
            cells.append(f"{min(values):.3f} to {max(values):.3f}" if values else "-")
        print(f"{name:<14}{f'{passed} of {len(runs)}':>8}"
              + "".join(f"{cell:>18}" for cell in cells))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO",
                        help=f"of {', '.join(SCENARIOS)} (default: all)")
    parser.add_argument("--library", default="build/cuda/lib/libnccl.so.2")
    parser.add_argument("--program", default="build/cuda/bin/unisono")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--limit", type=float, default=3600,
                        help="start no run after this many seconds (default: 3600)")
    parser.add_argument("--verbose", action="store_true", help="print the logs of the ranks")
    options = parser.parse_args()
    unknown = [name for name in options.scenarios if name not in SCENARIOS]
    if unknown:
        parser.error(f"unknown scenario '{unknown[0]}'; there are {', '.join(SCENARIOS)}")
    if not os.path.exists(options.library):
        parser.error(f"no library {options.library}")
    options.library = os.path.realpath(options.library)
    if os.environ.get("LD_PRELOAD") != options.library:
        # PyTorch loads its own copy of NCCL otherwise.
        os.environ["LD_PRELOAD"] = options.library
        os.execv(sys.executable, [sys.executable, *sys.argv])
    import torch  # before the ranks are forked: it takes seconds
    import torch.distributed
    begin, failed, results = time.monotonic(), 0, {}
    # A round of all scenarios after another, so that a limit leaves out no scenario.
    rounds = [name for _ in range(options.repeats) for name in options.scenarios or SCENARIOS]
    for done, name in enumerate(rounds):
        if time.monotonic() - begin > options.limit:
            print(f"the limit leaves out {len(rounds) - done} runs")
            break
        started = time.monotonic()
        problem, printed, logs, times = run(name, options)
        failed += bool(problem)
        results.setdefault(name, []).append((problem, times))
        print(f"{name:<14}{'FAILED' if problem else 'passed'} {time.monotonic() - started:5.1f} s "
              f"{problem}", flush=True)
        for line in printed:
            print(f"    {line}", flush=True)
        if options.verbose or problem:
            print("".join(f"    | {line}\n" for line in logs.splitlines()), flush=True)
    print_table(results)
    print(f"{failed} runs failed" if failed else "all runs passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
