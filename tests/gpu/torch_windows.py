#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Messages between processes while buffers come and go: allocated, freed, allocated again at the same
address, emptied caches, CUDA graphs. One line a check, exit status 1 if one is wrong. LD_PRELOAD
chooses the NCCL library, --allocator how PyTorch allocates.
"""
import argparse
import os
import random
import sys
import time

ALLOCATORS = {"malloc": "", "expandable": "expandable_segments:True",
              "async": "backend:cudaMallocAsync"}


def pattern(source, target, call, count, torch, place):
    """What `source` sends to `target` in a call: different in every one."""
    start = (source * 7 + target * 13 + call * 1009) % 65521
    return (torch.arange(count, dtype=torch.int32, device=place) * 31 + start)


def exchange(torch, dist, rank, world, call, count, into=None):
    """All-to-all of `count` numbers a rank; returns the buffer that it received in."""
    place = torch.device("cuda", rank)
    out = torch.cat([pattern(rank, peer, call, count, torch, place) for peer in range(world)])
    if into is None:
        into = torch.empty(world * count, dtype=torch.int32, device=place)
    into.fill_(-1)
    if call % 2 == 0:
        dist.all_to_all_single(into, out)
    else:
        parts, sent = into.chunk(world), out.chunk(world)
        operations = []
        for peer in range(world):
            if peer == rank:
                parts[peer].copy_(sent[peer])
                continue
            operations.append(dist.P2POp(dist.irecv, parts[peer], peer))
            operations.append(dist.P2POp(dist.isend, sent[peer], peer))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return into


def expect(torch, rank, world, call, count, got):
    place = torch.device("cuda", rank)
    want = torch.cat([pattern(peer, rank, call, count, torch, place) for peer in range(world)])
    if not torch.equal(got, want):
        wrong = int((got != want).sum())
        raise RuntimeError(f"rank {rank}, call {call}: {wrong} of {want.numel()} numbers are wrong")


def run(rank, world, device, arguments):
    import torch
    import torch.distributed as dist
    shared = random.Random(arguments.seed)
    own = random.Random(arguments.seed * 100 + rank)
    buffers = {}
    end = time.monotonic() + arguments.seconds
    call = 0
    stop = torch.zeros(1, device=f"cuda:{rank}")
    while True:
        if call % 50 == 0:
            # The ranks stop together.
            stop.fill_(time.monotonic() > end)
            dist.all_reduce(stop)
            if stop.item() > 0:
                break
        count = shared.choice((1 << 10, 1 << 16, 300_001, 1 << 20, 3_000_001))
        kept = shared.random() < 0.6
        into = buffers.get(count) if kept else None
        got = exchange(torch, dist, rank, world, call, count, into)
        expect(torch, rank, world, call, count, got)
        buffers[count] = got
        if own.random() < 0.1:
            buffers.pop(own.choice(list(buffers)), None)
            if own.random() < 0.5:
                torch.cuda.empty_cache()
        if own.random() < 0.1:
            time.sleep(own.random() * 0.05)
        call += 1
    if rank == 0:
        print(f"ok {call} random calls, {arguments.allocator}", flush=True)

    # A graph that was captured before its buffers were mapped.
    count = 1 << 20
    place = torch.device("cuda", rank)
    into = torch.empty(world * count, dtype=torch.int32, device=place)
    out = torch.empty_like(into)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        dist.all_to_all_single(into, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        dist.all_to_all_single(into, out)
    for replay in range(30):
        out.copy_(torch.cat([pattern(rank, p, replay, count, torch, place) for p in range(world)]))
        into.fill_(-1)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        expect(torch, rank, world, replay, count, into)
        if replay % 10 == 0:
            time.sleep(0.2)
    if rank == 0:
        print(f"ok 30 replays, {arguments.allocator}", flush=True)
    del graph, into, out
    buffers.clear()

    # Freed memory comes back although a peer had mapped it. CUDA waits for running kernels before it
    # unmaps memory that cudaMalloc made, so the ranks must not wait for each other in one.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    host = dist.new_group(backend="gloo")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    dist.barrier(group=host)
    time.sleep(1.5)
    before = torch.cuda.mem_get_info()[0]
    for repeat in range(2):
        count = (512 << 20) // 4 // world
        big = exchange(torch, dist, rank, world, 2 * repeat, count)
        time.sleep(0.5)
        for _ in range(3):
            got = exchange(torch, dist, rank, world, 2 * repeat, count, big)
        expect(torch, rank, world, 2 * repeat, count, got)
        del big, got
        torch.cuda.synchronize()
        start = time.monotonic()
        torch.cuda.empty_cache()
        emptied = time.monotonic() - start
        while before - torch.cuda.mem_get_info()[0] > 100 << 20:
            if time.monotonic() - start > 5:
                raise RuntimeError(
                    f"rank {rank}: {before - torch.cuda.mem_get_info()[0] >> 20} MiB did not come back")
            time.sleep(0.01)
        print(f"ok rank {rank}: 1 GiB came back after {time.monotonic() - start:.2f} s "
              f"(empty_cache {emptied:.3f} s), {arguments.allocator}", flush=True)
        dist.barrier(group=host)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--allocator", choices=ALLOCATORS, default="malloc")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("UNISONO_TEST_SEED", 1)))
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = ALLOCATORS[arguments.allocator]
    import torch_support
    torch_support.run_ranks(arguments.ranks, "cuda", False, run, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
