#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""With UNISONO_DETERMINISTIC=1: compares the bits of reductions of the same numbers in one call with
those in several calls and at odd addresses, and between protocols, numbers of channels and sizes of
buffers. LD_PRELOAD chooses the library. Exit status 1 if bits differ.
"""
import argparse
import hashlib
import json
import os
import pathlib
import random
import sys
import tempfile

import torch
import torch.distributed as dist

import torch_support

COUNT = 300_007
TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# What may not change a bit. The first one is the measure.
VARIANTS = ({}, {"NCCL_PROTO": "Simple"}, {"NCCL_PROTO": "LL"}, {"NCCL_PROTO": "LL128"},
            {"NCCL_MAX_NCHANNELS": "1"}, {"NCCL_BUFFSIZE": "65536"}, {"NCCL_ALGO": "tree"})


def operators(kind):
    found = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
    if kind.is_floating_point:
        found["avg"] = dist.ReduceOp.AVG
        found["third"] = dist._make_nccl_premul_sum(1 / 3)
    return found


def contribution(kind, rank, count):
    """Numbers of magnitudes whose sums are rounded; the same in every run."""
    generator = torch.Generator().manual_seed(77 + rank)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    exponents = torch.randint(-4, 4, (count,), generator=generator, dtype=torch.float64)
    return (values * torch.exp2(exponents)).to(kind).cuda()


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def place(values, offset):
    """The same values `offset` elements after the beginning of an allocation."""
    buffer = torch.full((values.numel() + offset + 8,), 7, dtype=values.dtype, device="cuda")
    view = buffer[offset:offset + values.numel()]
    view.copy_(values)
    return view


def measure(rank, world, _device, options):
    chance = random.Random(options["seed"])  # the same on all ranks
    digests, problems = {}, []
    for kind in TYPES:
        mine = contribution(kind, rank, COUNT)
        shares = contribution(kind, rank + world, COUNT * world)
        for name, operator in operators(kind).items():
            case = f"{str(kind).removeprefix('torch.')} {name}"
            whole = place(mine, 0)
            dist.all_reduce(whole, op=operator)
            expected = bits(whole)
            # The order of ranks may be another one than in an all-reduce.
            to_one = place(mine, 0)
            dist.reduce(to_one, dst=0, op=operator)
            expected_of_one = bits(to_one) if rank == 0 else b""
            scattered = torch.empty_like(mine)
            dist.reduce_scatter_tensor(scattered, shares, op=operator)
            digests[f"{case} all-reduce"] = hashlib.sha256(expected).hexdigest()
            digests[f"{case} reduce"] = hashlib.sha256(expected_of_one).hexdigest()
            digests[f"{case} reduce-scatter"] = hashlib.sha256(bits(scattered)).hexdigest()
            for offset in (1, 2, 3, 5):
                view = place(mine, offset)
                dist.all_reduce(view, op=operator)
                if bits(view) != expected:
                    problems.append(f"{case} all-reduce at element {offset}")
                reduced = place(mine, offset)
                dist.reduce(reduced, dst=0, op=operator)
                if rank == 0 and bits(reduced) != expected_of_one:
                    problems.append(f"{case} reduce at element {offset}")
                output = place(torch.zeros_like(mine), offset)
                dist.reduce_scatter_tensor(output, place(shares, offset), op=operator)
                if bits(output) != bits(scattered):
                    problems.append(f"{case} reduce-scatter at element {offset}")
            cuts = sorted(chance.sample(range(1, COUNT), 6))
            parts = place(mine, 1)
            for begin, end in zip([0, *cuts], [*cuts, COUNT]):
                dist.all_reduce(parts[begin:end], op=operator)
            if bits(parts) != expected:
                problems.append(f"{case} all-reduce cut at {cuts}")
    pathlib.Path(options["folder"], f"rank{rank}.json").write_text(
        json.dumps({"digests": digests, "problems": problems}))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    torch_support.add_rank_options(parser)
    options = parser.parse_args()
    torch_support.check_rank_options(parser, options)
    os.environ["UNISONO_DETERMINISTIC"] = "1"
    torch_support.say_library()
    print(f"to repeat: --seed {options.seed}", flush=True)
    measures, failed = None, 0
    for variant in VARIANTS:
        os.environ.update(variant)
        with tempfile.TemporaryDirectory() as folder:
            torch_support.run_ranks(options.ranks, options.device, options.eager, measure,
                                    {"seed": options.seed, "folder": folder})
            results = [json.loads(pathlib.Path(folder, f"rank{rank}.json").read_text())
                       for rank in range(options.ranks)]
        for name in variant:
            del os.environ[name]
        problems = sorted({problem for result in results for problem in result["problems"]})
        digests = [result["digests"] for result in results]
        measures = measures or digests
        problems += [f"{case} differs from the first variant"
                     for case in digests[0] if any(here[case] != there[case] for here, there in
                                                   zip(digests, measures))]
        failed += len(problems)
        title = " ".join(f"{name}={value}" for name, value in variant.items()) or "as chosen"
        print(f"{title:<28}{len(digests[0])} cases, {len(problems)} with other bits", flush=True)
        for problem in problems[:10]:
            print(f"    {problem}", flush=True)
    print("bits differ" if failed else "all bits are the same")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
