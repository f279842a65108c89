#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Messages and collectives between processes while buffers come and go: allocated, freed, allocated again at the same
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


KINDS = ("all-to-all", "send and receive", "all-gather", "all-reduce", "broadcast")


def kind_of(call):
    return KINDS[call % len(KINDS)]


def sent(torch, source, world, call, count):
    """What `source` has for every rank, `count` numbers each."""
    place = torch.device("cuda", torch.cuda.current_device())
    return torch.cat([pattern(source, peer, call, count, torch, place) for peer in range(world)])


def issue(dist, rank, world, call, count, into, out):
    """Makes one call with `count` numbers for each rank, from `out` to `into`."""
    kind = kind_of(call)
    if kind == "all-to-all":
        dist.all_to_all_single(into, out)
    elif kind == "all-gather":
        dist.all_gather_into_tensor(into, out[:count])
    elif kind == "all-reduce":
        into.copy_(out)
        dist.all_reduce(into)
    elif kind == "broadcast":
        if rank == call % world:
            into.copy_(out)
        dist.broadcast(into, call % world)
    else:
        parts, outgoing = into.chunk(world), out.chunk(world)
        operations = []
        for peer in range(world):
            if peer == rank:
                parts[peer].copy_(outgoing[peer])
                continue
            operations.append(dist.P2POp(dist.irecv, parts[peer], peer))
            operations.append(dist.P2POp(dist.isend, outgoing[peer], peer))
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def exchange(torch, dist, rank, world, call, count, into=None):
    """Makes a call; returns the buffer that it received in."""
    out = sent(torch, rank, world, call, count)
    if into is None:
        into = torch.empty_like(out)
    into.fill_(-1)
    issue(dist, rank, world, call, count, into, out)
    return into


def expected(torch, rank, world, call, count):
    place = torch.device("cuda", torch.cuda.current_device())
    kind = kind_of(call)
    if kind == "all-gather":
        return torch.cat([pattern(p, 0, call, count, torch, place) for p in range(world)])
    if kind == "all-reduce":
        return sum(sent(torch, p, world, call, count) for p in range(world))
    if kind == "broadcast":
        return sent(torch, call % world, world, call, count)
    return torch.cat([pattern(p, rank, call, count, torch, place) for p in range(world)])


def expect(torch, rank, world, call, count, got):
    want = expected(torch, rank, world, call, count)
    if not torch.equal(got, want):
        wrong = int((got != want).sum())
        raise RuntimeError(f"rank {rank}, call {call} ({kind_of(call)}): {wrong} of {want.numel()} "
                           "numbers are wrong")


def run(rank, world, device, arguments):
    import torch
    import torch.distributed as dist
    shared = random.Random(arguments.seed)
    own = random.Random(arguments.seed * 100 + rank)
    buffers = {}
    end = time.monotonic() + arguments.seconds
    call = 0
    stop = torch.zeros(1, device="cuda")
    while True:
        if call % 50 == 0:
            # The ranks stop together.
            stop.fill_(time.monotonic() > end)
            dist.all_reduce(stop)
            if stop.item() > 0:
                break
        count = shared.choice((1 << 10, 1 << 16, 300_001, 1 << 20, 3_000_001, 4 << 20, 17_000_000))
        kept = shared.random() < 0.6
        into = buffers.get(count) if kept else None
        got = exchange(torch, dist, rank, world, call, count, into)
        expect(torch, rank, world, call, count, got)
        buffers[count] = got
        if own.random() < arguments.frees:
            buffers.pop(own.choice(list(buffers)), None)
            if own.random() < 0.5:
                torch.cuda.empty_cache()
        if own.random() < 0.1:
            time.sleep(own.random() * 0.05)
        call += 1
    if rank == 0:
        print(f"ok {call} random calls, {arguments.allocator}", flush=True)

    # Graphs that were captured before their buffers were mapped.
    count = 1 << 20
    for call, kind in enumerate(KINDS):
        into = exchange(torch, dist, rank, world, call, count)
        out = sent(torch, rank, world, call, count)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            issue(dist, rank, world, call, count, into, out)
        for replay in range(12):
            into.fill_(-1)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            expect(torch, rank, world, call, count, into)
            if replay % 4 == 0:
                time.sleep(0.2)
    if rank == 0:
        print(f"ok 12 replays of every call, {arguments.allocator}", flush=True)
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
        big = exchange(torch, dist, rank, world, 5 * repeat, count)
        time.sleep(0.5)
        for _ in range(3):
            got = exchange(torch, dist, rank, world, 5 * repeat, count, big)
        expect(torch, rank, world, 5 * repeat, count, got)
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
    parser.add_argument("--frees", type=float, default=0.1, metavar="FRACTION",
                        help="of calls after which a rank frees a buffer, and the cache after half "
                             "of these (default: 0.1)")
    arguments = parser.parse_args()
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = ALLOCATORS[arguments.allocator]
    import torch_support
    torch_support.run_ranks(arguments.ranks, "cuda", False, run, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
