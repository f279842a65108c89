#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every collective of torch.distributed against the same computed on the CPU: one line a check,
exit status 1 if one is wrong. LD_PRELOAD chooses the NCCL library.

Values are small whole numbers, so that sums are exact in every type and order, and results must be
equal to the last bit (averages too, if the number of ranks is a power of two).
"""
import argparse
import os
import sys

import torch
import torch.distributed as dist

import torch_support

# Odd, small, and larger than the buffers of a connection.
COUNTS = (1, 7, 1025, 262144, 6000001)
TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64,
         torch.uint8, torch.int8)


class Checks:
    """Runs checks on every rank; a check fails if it fails on one."""

    def __init__(self, rank, world, device):
        self.rank, self.world, self.device = rank, world, device
        self.place = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
        self.failed = 0
        self.passed = 0
        # Verdicts travel by another way than what is being judged.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.verdicts = dist.new_group(backend="gloo")

    def values(self, rank, count, dtype=torch.float32, salt=0):
        """What `rank` contributes: whole numbers 1 to 3, known to all ranks, on the CPU."""
        index = torch.arange(count, dtype=torch.int64)
        return ((index * 7 + rank * 5 + salt) % 3 + 1).to(dtype)

    def mine(self, count, dtype=torch.float32, salt=0):
        return self.values(self.rank, count, dtype, salt).to(self.place)

    def empty(self, count, dtype=torch.float32):
        return torch.full((count,), 99, dtype=dtype, device=self.place)

    def stacked(self, count, dtype=torch.float32, salt=0):
        return torch.stack([self.values(r, count, dtype, salt) for r in range(self.world)])

    def barrier(self):
        torch_support.barrier(self.rank, self.device)

    def check(self, name, function):
        """`function` returns pairs (got, expected); raising or a difference is a failure."""
        problem = ""
        try:
            for got, expected in function():
                got = got.detach().cpu()
                if got.dtype != expected.dtype:
                    problem = f"type {got.dtype}, expected {expected.dtype}"
                elif got.shape != expected.shape:
                    problem = f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
                elif not torch.equal(got, expected):
                    wrong = (got != expected).reshape(-1).nonzero().reshape(-1)
                    at = int(wrong[0])
                    problem = (f"{len(wrong)} of {got.numel()} wrong, first at {at}: "
                               f"{got.reshape(-1)[at].item()}, "
                               f"expected {expected.reshape(-1)[at].item()}")
                if problem:
                    break
        except Exception as error:  # reported as this check's failure
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        problems = [None] * self.world
        dist.all_gather_object(problems, problem, group=self.verdicts)
        bad = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
        if bad:
            self.failed += 1
        else:
            self.passed += 1
        if self.rank == 0:
            print("FAILED" if bad else "ok    ", name, "; ".join(bad), flush=True)


def collectives(c):
    world, rank = c.world, c.rank
    nccl = c.device == "cuda"

    def all_reduce(op, dtype, count, expected):
        def run():
            data = c.mine(count, dtype)
            dist.all_reduce(data, op=op)
            yield data, expected(c.stacked(count, dtype))
        return run

    def total(stack):
        return stack.sum(dim=0, dtype=stack.dtype)

    types = [t for t in TYPES if nccl or t != torch.bfloat16]
    for dtype in types:
        c.check(f"all_reduce sum {dtype}", all_reduce(dist.ReduceOp.SUM, dtype, 1025, total))
    for count in COUNTS:
        c.check(f"all_reduce sum of {count}",
                all_reduce(dist.ReduceOp.SUM, torch.float32, count, total))
    for dtype in [t for t in types if t in (torch.float32, torch.bfloat16, torch.int64)]:
        c.check(f"all_reduce min {dtype}",
                all_reduce(dist.ReduceOp.MIN, dtype, 1025, lambda s: s.min(dim=0).values))
        c.check(f"all_reduce max {dtype}",
                all_reduce(dist.ReduceOp.MAX, dtype, 1025, lambda s: s.max(dim=0).values))
        if dtype != torch.bfloat16 or world <= 4:  # 3^4 still has an exact bfloat16
            c.check(f"all_reduce product {dtype}",
                    all_reduce(dist.ReduceOp.PRODUCT, dtype, 1025, lambda s: s.prod(dim=0)))

    if nccl:
        def average():
            # Multiples of the number of ranks, so that the mean is exact.
            data = c.mine(1025) * world
            dist.all_reduce(data, op=dist.ReduceOp.AVG)
            yield data, total(c.stacked(1025))
        c.check("all_reduce average", average)

        def premultiplied(factor):
            def run():
                data = c.mine(1025)
                dist.all_reduce(data, op=dist._make_nccl_premul_sum(factor))
                yield data, total(c.stacked(1025)) * 0.5
            return run
        c.check("all_reduce premultiplied sum, number", premultiplied(0.5))
        c.check("all_reduce premultiplied sum, device scalar",
                premultiplied(torch.tensor([0.5], device=c.place)))

    def unaligned():
        whole = c.mine(4099)
        part = whole[1:4098]
        dist.all_reduce(part)
        expected = c.values(rank, 4099)
        expected[1:4098] = total(torch.stack([c.values(r, 4099) for r in range(world)]))[1:4098]
        yield whole, expected
    c.check("all_reduce of a slice", unaligned)

    def several_at_once():
        data = [c.mine(1000 + i, salt=i) for i in range(16)]
        for work in [dist.all_reduce(d, async_op=True) for d in data]:
            work.wait()
        for i, d in enumerate(data):
            yield d, total(c.stacked(1000 + i, salt=i))
    c.check("all_reduce, 16 in flight", several_at_once)

    if nccl:
        def coalesced():
            data = [c.mine(1000 + i, salt=i) for i in range(4)]
            with dist._coalescing_manager(device=c.place):
                for d in data:
                    dist.all_reduce(d)
            for i, d in enumerate(data):
                yield d, total(c.stacked(1000 + i, salt=i))
        c.check("all_reduce, 4 in one group", coalesced)

    for count in COUNTS:
        def all_gather_tensor(count=count):
            out = c.empty(count * world)
            dist.all_gather_into_tensor(out, c.mine(count))
            yield out, c.stacked(count).reshape(-1)

        def reduce_scatter_tensor(count=count):
            out = c.empty(count)
            dist.reduce_scatter_tensor(out, c.mine(count * world))
            yield out, total(c.stacked(count * world))[rank * count:(rank + 1) * count]
        if nccl:
            c.check(f"all_gather_into_tensor of {count}", all_gather_tensor)
            c.check(f"reduce_scatter_tensor of {count}", reduce_scatter_tensor)

        def all_to_all(count=count):
            out = c.empty(count * world)
            dist.all_to_all_single(out, c.mine(count * world))
            yield out, torch.cat([c.values(r, count * world)[rank * count:(rank + 1) * count]
                                  for r in range(world)])
        if nccl:
            c.check(f"all_to_all_single of {count}", all_to_all)

        def broadcast(count=count):
            for root in range(world):
                data = c.mine(count)
                dist.broadcast(data, src=root)
                yield data, c.values(root, count)
        c.check(f"broadcast of {count}, every root", broadcast)

        def reduce(count=count):
            for root in range(world):
                data = c.mine(count)
                dist.reduce(data, dst=root)
                if rank == root:
                    yield data, total(c.stacked(count))
        c.check(f"reduce of {count}, every root", reduce)

        def around(count=count):
            # Even ranks send first, so that nobody waits in a circle.
            out = c.empty(count)
            following, before = (rank + 1) % world, (rank - 1) % world
            if rank % 2 == 0:
                dist.send(c.mine(count), dst=following)
                dist.recv(out, src=before)
            else:
                dist.recv(out, src=before)
                dist.send(c.mine(count), dst=following)
            yield out, c.values(before, count)
        if world % 2 == 0:
            c.check(f"send and recv of {count}", around)

        def batch(count=count):
            outs = {r: c.empty(count) for r in range(world) if r != rank}
            ins = {r: c.mine(count, salt=r) for r in outs}
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, ins[r], r) for r in outs] +
                [dist.P2POp(dist.irecv, outs[r], r) for r in outs])
            for work in works:
                work.wait()
            for r, out in outs.items():
                yield out, c.values(r, count, salt=rank)
        c.check(f"batch_isend_irecv of {count}, all pairs", batch)

    def lists():
        outs = [c.empty(1025) for _ in range(world)]
        dist.all_gather(outs, c.mine(1025))
        for r in range(world):
            yield outs[r], c.values(r, 1025)
    c.check("all_gather to a list", lists)

    if nccl:
        def uneven_gather():
            outs = [c.empty(100 + r) for r in range(world)]
            dist.all_gather(outs, c.mine(100 + rank))
            for r in range(world):
                yield outs[r], c.values(r, 100 + r)
        c.check("all_gather of different sizes", uneven_gather)

        def uneven_exchange():
            # Rank r sends 10 * (r + 1) + s elements to rank s.
            def size(source, destination):
                return 10 * (source + 1) + destination
            sent = [size(rank, s) for s in range(world)]
            received = [size(r, rank) for r in range(world)]
            out = c.empty(sum(received))
            dist.all_to_all_single(out, c.mine(sum(sent)), received, sent)
            pieces = []
            for r in range(world):
                skip = sum(size(r, s) for s in range(rank))
                whole = c.values(r, sum(size(r, s) for s in range(world)))
                pieces.append(whole[skip:skip + size(r, rank)])
            yield out, torch.cat(pieces)
        c.check("all_to_all_single of different sizes", uneven_exchange)

        def list_reduce_scatter():
            out = c.empty(333)
            dist.reduce_scatter(out, [c.mine(333, salt=r) for r in range(world)])
            yield out, total(c.stacked(333, salt=rank))
        c.check("reduce_scatter from a list", list_reduce_scatter)

    def gather():
        for root in range(world):
            outs = [c.empty(1025) for _ in range(world)] if rank == root else None
            dist.gather(c.mine(1025), outs, dst=root)
            if rank == root:
                for r in range(world):
                    yield outs[r], c.values(r, 1025)
    c.check("gather, every root", gather)

    def scatter():
        for root in range(world):
            out = c.empty(1025)
            ins = [c.mine(1025, salt=r) for r in range(world)] if rank == root else None
            dist.scatter(out, ins, src=root)
            yield out, c.values(root, 1025, salt=rank)
    c.check("scatter, every root", scatter)


def groups_and_graphs(c):
    world, rank = c.world, c.rank
    nccl = c.device == "cuda"

    def subgroups():
        # Every rank takes part in making each group, as torch asks for; then uses its own.
        alone = [dist.new_group([r]) for r in range(world)]
        pairs = [(r, (r + 1) % world) for r in range(0, world - world % 2, 2)]
        made = [(pair, dist.new_group(list(pair))) for pair in pairs]
        everyone = dist.new_group(list(range(world)))
        data = c.mine(1025)
        dist.all_reduce(data, group=alone[rank])
        yield data, c.values(rank, 1025)
        for pair, group in made:
            if rank in pair:
                data = c.mine(1025)
                dist.all_reduce(data, group=group)
                yield data, sum(c.values(r, 1025) for r in pair)
        data = c.mine(1025)
        dist.all_reduce(data, group=everyone)
        yield data, c.stacked(1025).sum(dim=0)
        for group in [alone[rank], everyone] + [g for pair, g in made if rank in pair]:
            dist.destroy_process_group(group)
    c.check("new_group: alone, pairs, everyone", subgroups)

    def barriers():
        for _ in range(10):
            c.barrier()
        return []
    c.check("barrier, 10 times", barriers)

    if not nccl:
        return

    def two_streams():
        streams = [torch.cuda.Stream() for _ in range(2)]
        group = dist.new_group(list(range(world)))
        data = [c.mine(100003, salt=i) for i in range(2)]
        torch.cuda.synchronize()
        for i, owner in enumerate((None, group)):
            with torch.cuda.stream(streams[i]):
                for _ in range(2):
                    dist.all_reduce(data[i], group=owner)
        torch.cuda.synchronize()
        dist.destroy_process_group(group)
        for i in range(2):
            yield data[i], c.stacked(100003, salt=i).sum(dim=0) * world
    # Communicators that run at once can each wait for the other on a full GPU; these are small.
    c.check("all_reduce on two streams and groups", two_streams)

    def graph(count):
        def run():
            data, out = c.mine(count), c.empty(count)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # communicators are made before the capture
                for _ in range(2):
                    out.copy_(data)
                    dist.all_reduce(out)
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                out.copy_(data)
                dist.all_reduce(out)
                dist.all_reduce(out)
            for replay in range(5):
                data.copy_(c.values(rank, count, salt=replay))
                out.fill_(99)
                captured.replay()
                torch.cuda.synchronize()
                yield out, c.stacked(count, salt=replay).sum(dim=0) * world
                plain = c.mine(count)  # between replays, outside the graph
                dist.all_reduce(plain)
                yield plain, c.stacked(count).sum(dim=0)
            del captured
        return run
    # Even ranks send 40 small messages and then 4 large ones, odd ranks the large ones first.
    def sizes_from(sender):
        small, large = [50_000] * 40, [250_001] * 4
        return small + large if sender % 2 == 0 else large + small

    def long_batch(replays):
        def run():
            peer = rank ^ 1
            if peer >= world:
                return
            ins = [c.mine(count, salt=i) for i, count in enumerate(sizes_from(rank))]
            outs = [c.empty(count) for count in sizes_from(peer)]

            def exchange():
                works = dist.batch_isend_irecv(
                    [dist.P2POp(dist.isend, data, peer) for data in ins] +
                    [dist.P2POp(dist.irecv, data, peer) for data in outs])
                for work in works:
                    work.wait()
            exchange()
            captured = torch.cuda.CUDAGraph()
            if replays > 0:
                torch.cuda.synchronize()
                with torch.cuda.graph(captured):
                    exchange()
            for _ in range(max(replays, 1)):
                if replays > 0:
                    for out in outs:
                        out.fill_(99)
                    captured.replay()
                torch.cuda.synchronize()
                for i, out in enumerate(outs):
                    yield out, c.values(peer, out.numel(), salt=i)
            del captured
        return run
    c.check("batch of 44 messages each way, small and large", long_batch(0))
    c.check("CUDA graph of 44 messages each way, 3 replays", long_batch(3))

    for count in (8, 16384, 6000001):
        c.check(f"CUDA graph of 2 all_reduce of {count}, 5 replays", graph(count))


def main_of_rank(rank, world, device, options):
    if rank == 0:
        torch_support.say_library()
        print(f"torch {torch.__version__}, {world} ranks on {device}", flush=True)
    c = Checks(rank, world, device)
    collectives(c)
    groups_and_graphs(c)
    if rank == 0:
        print(f"{c.passed} passed, {c.failed} failed", flush=True)
    if c.failed:
        raise SystemExit(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    torch_support.add_rank_options(parser)
    options = parser.parse_args()
    torch_support.check_rank_options(parser, options)
    try:
        torch_support.run_ranks(options.ranks, options.device, options.eager, main_of_rank, options)
    except Exception as error:
        print(f"FAILED: {type(error).__name__}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
