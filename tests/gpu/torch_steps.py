#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the steps that users of PyTorch wait for, in bfloat16: decode steps of a transformer with
tensor parallelism, in CUDA graphs, and training steps with DistributedDataParallel and FSDP2.

  torch_steps.py run --output A.json        LD_PRELOAD chooses the library
  torch_steps.py compare --ours A.json C.json --theirs B.json D.json
                                            medians and ratios; exit status 1 if losses differ
  torch_steps.py trace                      what the GPUs do in a DDP step
"""
import argparse
import collections
import json
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import torch_support

REPEATS = 7
TRACED = 3  # steps
SEED = 20261127
TYPE = torch.bfloat16
# The losses are sums of bfloat16 in an order that differs between libraries from 3 ranks on.
TOLERANCE = 1e-2
# Of a model like Llama 3 8B with half of its layers. On the CPU only the script itself is checked.
DECODE = {"cuda": {"width": 4096, "feed": 14336, "layers": 16, "batches": (1, 8, 32, 64, 256)},
          "cpu": {"width": 64, "feed": 96, "layers": 2, "batches": (1, 8)}}
# With a quarter of the sequences Python takes longer to issue a step than 2 H200 to execute it.
TRAIN = {"cuda": {"width": 2048, "heads": 16, "feed": 8192, "layers": 6, "batch": 16, "length": 512},
         "cpu": {"width": 32, "heads": 2, "feed": 64, "layers": 2, "batch": 2, "length": 8}}


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(step, calls, rank, device):
    """Of a step: the median of several runs of `calls` steps on this rank."""
    times = []
    for _ in range(REPEATS):
        synchronize(device)
        torch_support.barrier(rank, device)
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(calls):
            step()
        synchronize(device)
        times.append((time.perf_counter() - begin) / calls * 1e3)
    return statistics.median(times)


class DecodeLayers:
    """The matrix products and all-reduces of a decode step. Attention to earlier tokens, which
    communicates nothing, is left out."""

    def __init__(self, world, device, width, feed, layers):
        def weights(rows, columns):
            return torch.randn(rows, columns, device=device, dtype=TYPE) * 0.01

        self.part = width // world
        self.layers = [(weights(width, 3 * self.part), weights(self.part, width),
                        weights(width, feed // world), weights(feed // world, width))
                       for _ in range(layers)]

    def step(self, x):
        for queries_keys_values, project, up, down in self.layers:
            mixed = (x @ queries_keys_values)[:, :self.part] @ project
            dist.all_reduce(mixed)
            x = x + mixed
            fed = nn.functional.silu(x @ up) @ down
            dist.all_reduce(fed)
            x = x + fed
        return x


def capture(step):
    """Returns what replays `step` from a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


def time_decode(rank, world, device):
    sizes = DECODE[device]
    torch.manual_seed(SEED + rank)
    layers = DecodeLayers(world, device, sizes["width"], sizes["feed"], sizes["layers"])
    times = {}
    for batch in sizes["batches"]:
        x = torch.randn(batch, sizes["width"], device=device, dtype=TYPE)

        def step(x=x):
            return layers.step(x)

        run = capture(step) if device == "cuda" else step
        for _ in range(5):
            run()
        times[f"decode, batch {batch}"] = milliseconds(run, 10, rank, device)
    return times


def make_training(kind, rank, device):
    """Returns a function that trains for one step, and the losses so far."""
    sizes = TRAIN[device]
    torch.manual_seed(SEED)
    model = nn.Sequential(*(nn.TransformerEncoderLayer(
        sizes["width"], sizes["heads"], sizes["feed"], dropout=0.0, batch_first=True,
        norm_first=True) for _ in range(sizes["layers"]))).to(device, TYPE)
    if kind == "DDP":
        parallel = DistributedDataParallel(
            model, device_ids=[rank] if device == "cuda" else None)
    else:
        for layer in model:
            fully_shard(layer)
        parallel = fully_shard(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
    torch.manual_seed(SEED + rank)
    x = torch.randn(sizes["batch"], sizes["length"], sizes["width"], device=device, dtype=TYPE)
    losses = []

    def step():
        loss = parallel(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    for _ in range(5):
        step()
    return step, losses


def time_training(kind, rank, device):
    """The time of a step, and the last loss."""
    step, losses = make_training(kind, rank, device)
    return milliseconds(step, 5, rank, device), losses[-1].item()


def trace(rank, world, device, _arguments):
    """Prints what the GPUs do in a DDP step, in the order of the ranks."""
    step, _ = make_training("DDP", rank, device)
    time_of_step = milliseconds(step, 5, rank, device)
    torch_support.barrier(rank, device)
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(TRACED):
            step()
        synchronize(device)
    streams = collections.defaultdict(list)
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0:
            streams[event.device_resource_id()].append(
                (event.start_ns(), event.start_ns() + event.duration_ns()))
    computes, *others = sorted(streams.values(), key=len, reverse=True)
    computes.sort()
    gaps = [after[0] - before[1] for before, after in zip(computes, computes[1:])]

    def busy(intervals):
        return sum(end - begin for begin, end in intervals) / TRACED / 1e6

    for turn in range(world):
        torch_support.barrier(rank, device)
        if turn == rank:
            print(f"rank {rank}: {time_of_step:.3f} ms without the profiler; with it kernels of the "
                  f"model {busy(computes):.3f} ms, collectives "
                  f"{sum(busy(stream) for stream in others):.3f} ms, gaps between kernels "
                  f"{sum(gaps) / TRACED / 1e6:.3f} ms, their median "
                  f"{statistics.median(gaps) / 1e3:.2f} us", flush=True)


def measure(rank, world, device, output):
    times, losses = time_decode(rank, world, device), {}
    for kind in ("DDP", "FSDP2"):
        times[kind], losses[kind] = time_training(kind, rank, device)
    if rank == 0:
        library, version = torch_support.loaded_nccl()
        for name, value in times.items():
            print(f"{name}: {value:.3f} ms", flush=True)
        with open(output, "w") as file:
            json.dump({"library": library, "version": version, "ranks": world, "times": times,
                       "losses": losses}, file)


def compare(options):
    def load(paths):
        runs = []
        for path in paths:
            with open(path) as file:
                runs.append(json.load(file))
        return runs

    ours, theirs = load(options.ours), load(options.theirs)
    if {run["library"] for run in ours} & {run["library"] for run in theirs}:
        print("FAILED: both sides ran on the same library")
        return 1
    if len({run["ranks"] for run in ours + theirs}) != 1:
        print("FAILED: the runs have different numbers of ranks")
        return 1
    print("ms of ours, ms of theirs, theirs over ours (above 1: ours is faster); medians of runs")
    for name in ours[0]["times"]:
        own, other = (statistics.median(run["times"][name] for run in runs)
                      for runs in (ours, theirs))
        print(f"  {name:<20} {own:8.3f} {other:8.3f} {other / own:6.2f}")
    status = 0
    for name in ours[0]["losses"]:
        expected = theirs[0]["losses"][name]
        losses = [run["losses"][name] for run in ours + theirs]
        # A loss that is not a number fails, too.
        if not all(abs(loss - expected) <= TOLERANCE * abs(expected) for loss in losses):
            print(f"FAILED: the losses of {name} differ: {losses}")
            status = 1
    return status


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    torch_support.add_rank_options(run)
    run.add_argument("--output", required=True, help="JSON file for the times of rank 0")
    watch = commands.add_parser("trace")
    torch_support.add_rank_options(watch)
    check = commands.add_parser("compare")
    check.add_argument("--ours", nargs="+", required=True)
    check.add_argument("--theirs", nargs="+", required=True)
    options = parser.parse_args()
    if options.command == "compare":
        try:
            return compare(options)
        except (OSError, ValueError, KeyError) as error:
            check.error(f"not the output of two complete runs: {error}")
    traces = options.command == "trace"
    torch_support.check_rank_options(watch if traces else run, options)
    if traces and options.device != "cuda":
        watch.error("only GPUs are traced: --device cuda")
    torch_support.say_library()
    torch_support.run_ranks(options.ranks, options.device, options.eager,
                            trace if traces else measure,
                            None if traces else options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
