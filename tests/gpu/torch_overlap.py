#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What an all-reduce and a matrix product that run at the same time cost each other, what all-reduces that wait for
kernels cost these kernels, and the latency of small eager calls. LD_PRELOAD chooses the NCCL library; run once with
each and compare. With one rank nothing is communicated: then only what waiting streams cost is of interest.
"""
import argparse
import time

import torch
import torch.distributed as dist

import torch_support

REPEATS, CALLS = 7, 200
# Clock cycles for which the GPU sleeps while the CPU issues what follows.
SLEEP_CYCLES = 30_000_000
WAITS = 8
STREAMS = 8


def milliseconds(start, *work):
    """From `start()` on until all streams have done `work`; the median of several runs on this rank."""
    results = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        dist.barrier(device_ids=[torch.cuda.current_device()])
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        start(begin)
        for function, stream in work:
            with torch.cuda.stream(stream):
                function()
        for _, stream in work:
            torch.cuda.current_stream().wait_stream(stream)
        end.record()
        end.synchronize()
        results.append(begin.elapsed_time(end))
    return sorted(results)[REPEATS // 2]


def kernel_microseconds(enqueue_more):
    """The time of a small kernel, and of the gap after it, in a chain of CALLS kernels. What `enqueue_more` issues is
    enqueued before the first of them runs."""
    data = torch.ones(1 << 22, device="cuda", dtype=torch.bfloat16)
    results = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        begin.record()
        for _ in range(CALLS):
            data.mul_(1)
        end.record()
        enqueue_more(data)
        torch.cuda.synchronize()
        results.append(begin.elapsed_time(end) / CALLS * 1e3)
    return sorted(results)[REPEATS // 2]


def wait_on(stream):
    """Returns a function that makes `stream` wait for kernels of the current one, again and again."""
    other = torch.ones(512, device="cuda")

    def enqueue(data):
        for _ in range(WAITS):
            data.mul_(1)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                other.mul_(1)
    return enqueue


def used_streams(count):
    """Streams that have executed a kernel one after the other: that is when the driver gives each the next hardware
    channel, out of CUDA_DEVICE_MAX_CONNECTIONS."""
    streams = [torch.cuda.Stream() for _ in range(count)]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.ones(512, device="cuda").mul_(1)
        stream.synchronize()
    return streams


def reduce_behind_kernels(data):
    """All-reduces that start when kernels of the current stream end, as those of DistributedDataParallel."""
    other = torch.ones(512, device="cuda")
    works = []
    for _ in range(WAITS):
        data.mul_(1)
        works.append(dist.all_reduce(other, op=dist.ReduceOp.MAX, async_op=True))
    for work in works:
        work.wait()


def measure(rank, _world, _device, options):
    torch.manual_seed(1)
    side = options["side"]
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    data = torch.randn(options["bytes"] // 2, device="cuda", dtype=torch.bfloat16)
    compute, communicate = torch.cuda.Stream(), torch.cuda.Stream()

    def multiply():
        for _ in range(options["products"]):
            torch.mm(a, b, out=product)

    def reduce():
        for _ in range(options["reductions"]):
            dist.all_reduce(data, op=dist.ReduceOp.MAX)

    def let_go(begin):
        for stream in (compute, communicate):
            stream.wait_event(begin)

    for work in (multiply, reduce):
        work()
    alone = {"products": milliseconds(let_go, (multiply, compute)),
             "all-reduces": milliseconds(let_go, (reduce, communicate))}
    both = milliseconds(let_go, (reduce, communicate), (multiply, compute))
    small = torch.ones(256, device="cuda")
    latencies = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        dist.barrier(device_ids=[rank])
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            dist.all_reduce(small, op=dist.ReduceOp.MAX)
        torch.cuda.synchronize()
        latencies.append((time.perf_counter() - begin) / CALLS * 1e6)
    kernels = [kernel_microseconds(enqueue) for enqueue in
               (lambda data: None, reduce_behind_kernels, *map(wait_on, used_streams(STREAMS)))]
    if rank == 0:
        print(f"{options['products']} products of {side} x {side}: {alone['products']:.3f} ms")
        print(f"{options['reductions']} all-reduces of {options['bytes']} bytes: "
              f"{alone['all-reduces']:.3f} ms")
        print(f"both at once: {both:.3f} ms, {both / sum(alone.values()):.3f} of the sum")
        print(f"a small kernel while nothing waits: {kernels[0]:.2f} us; all-reduces: {kernels[1]:.2f}; one of "
              f"{STREAMS} streams: {', '.join(f'{time:.2f}' for time in kernels[2:])}")
        print(f"eager all-reduce of 1 KB: {sorted(latencies)[REPEATS // 2]:.2f} us", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=8192, help="of the matrices (default: 8192)")
    parser.add_argument("--products", type=int, default=4)
    parser.add_argument("--bytes", type=int, default=64 << 20,
                        help="of an all-reduce (default: 64 MiB)")
    parser.add_argument("--reductions", type=int, default=10)
    torch_support.add_rank_options(parser)
    options = parser.parse_args()
    torch_support.check_rank_options(parser, options, least=1)
    torch_support.say_library()
    torch_support.run_ranks(options.ranks, options.device, options.eager, measure,
                            {name: getattr(options, name)
                             for name in ("side", "products", "bytes", "reductions")})


if __name__ == "__main__":
    main()
