#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times of an all-reduce by the loaded NCCL library and by PyTorch's symmetric memory, which needs buffers that
all ranks have registered, in turns in one run: CUDA graphs of calls, bfloat16, results checked. NVLink
multicast is off. LD_PRELOAD chooses the library. Exit status 1 if a result is wrong.
"""
import argparse
import os

os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ["NCCL_NVLS_ENABLE"] = "0"

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import torch_support

CALLS, REPLAYS, WARM_UP = 10, 20, 5
KIND = torch.bfloat16


def numbers(rank, count):
    """Whole numbers whose sums bfloat16 holds exactly."""
    return ((torch.arange(count) * 7 + rank * 5) % 3 + 1).to(KIND).cuda()


class Candidate:
    """A function that reduces `data`, with a graph of CALLS of them."""

    def __init__(self, call, data, rank):
        self.call, self.data, self.rank = call, data, rank
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.call(data)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(CALLS):
                self.call(data)

    def is_right(self, world, count):
        self.data.copy_(numbers(self.rank, count))
        torch.cuda.synchronize()
        dist.barrier(device_ids=[self.rank])
        result = self.call(self.data)
        torch.cuda.synchronize()
        dist.barrier(device_ids=[self.rank])
        return torch.equal(result, sum(numbers(r, count) for r in range(world)))

    def time(self):
        """Microseconds of a call."""
        self.data.zero_()
        for _ in range(WARM_UP):
            self.graph.replay()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(REPLAYS):
            self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1000 / (REPLAYS * CALLS)


def reduce_in_place(data):
    dist.all_reduce(data)
    return data


def measure(rank, world, _device, options):
    group = dist.group.WORLD.group_name
    calls = {
        "library": reduce_in_place,
        "one-shot": lambda data: torch.ops.symm_mem.one_shot_all_reduce(data, "sum", group),
        "two-shot": lambda data: torch.ops.symm_mem.two_shot_all_reduce_(data, "sum", group)}
    if rank == 0:
        print(f"{'bytes':>12}" + "".join(f"{name:>12}" for name in calls), "us", flush=True)
    wrong = 0
    size = 1024
    while size <= options["most"]:
        count = size // KIND.itemsize
        row = []
        candidates = {}
        for name, call in calls.items():
            if name == "one-shot" and size > options["one_shot"]:
                continue
            data = torch.empty(count, dtype=KIND, device="cuda")
            if name != "library":
                data = symm_mem.empty(count, dtype=KIND, device=f"cuda:{rank}")
                symm_mem.rendezvous(data, group)
            candidates[name] = Candidate(call, data, rank)
            if not candidates[name].is_right(world, count):
                wrong += 1
                print(f"rank {rank}: {name} of {size} bytes is WRONG", flush=True)
        times = {name: [] for name in candidates}
        for _ in range(3):
            for name, candidate in candidates.items():
                torch.cuda.synchronize()
                dist.barrier(device_ids=[rank])
                times[name].append(candidate.time())
        for name in calls:
            row.append(f"{sorted(times[name])[1]:12.2f}" if name in times else f"{'-':>12}")
        if rank == 0:
            print(f"{size:>12}" + "".join(row), flush=True)
        size *= 4
    if wrong > 0:
        raise RuntimeError(f"{wrong} results are wrong")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=256 << 20, help="bytes (default: 256 MiB)")
    parser.add_argument("--one-shot", type=int, default=16 << 20,
                        help="bytes up to which one-shot runs (default: 16 MiB)")
    torch_support.add_rank_options(parser)
    options = parser.parse_args()
    torch_support.check_rank_options(parser, options)
    torch_support.say_library()
    torch_support.run_ranks(options.ranks, options.device, options.eager, measure,
                            {"most": options.most, "one_shot": options.one_shot})


if __name__ == "__main__":
    main()
