#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small transformer with DistributedDataParallel in float32 on data that is the same in
every run, and writes the losses of rank 0: run it on two NCCL libraries and compare.

  torch_ddp.py run --output A.json          train; LD_PRELOAD chooses the library
  torch_ddp.py compare A.json B.json        exit status 1 if a loss differs by more than 1e-4
"""
import argparse
import json
import math
import os
import sys
import time

# cuBLAS is deterministic only with a fixed workspace; read when the first context is made.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import torch_support

VOCABULARY = 512
LENGTH = 64
BATCH = 8
WIDTH = 256
HEADS = 4
LAYERS = 4
SEED = 20240607


class Block(nn.Module):
    """Pre-norm causal self-attention and a feed-forward network."""

    def __init__(self):
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.norm_feed = nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, mask):
        batch, length, _ = x.shape
        parts = self.queries_keys_values(self.norm_attention(x))
        parts = parts.view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        queries, keys, values = parts[0], parts[1], parts[2]
        # Written out: fused attention kernels need not give the same bits in every run.
        scores = queries @ keys.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        mixed = torch.softmax(scores + mask, dim=-1) @ values
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.feed(self.norm_feed(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x))


def batch_of(step, rank):
    """Sequences in which a token mostly decides the next one; made on the CPU, the same always."""
    generator = torch.Generator().manual_seed(SEED + step * 1009 + rank)
    tokens = torch.empty(BATCH, LENGTH + 1, dtype=torch.int64)
    tokens[:, 0] = torch.randint(VOCABULARY, (BATCH,), generator=generator)
    noise = torch.rand(BATCH, LENGTH, generator=generator)
    other = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    for i in range(LENGTH):
        following = (tokens[:, i] * 5 + 7) % (VOCABULARY // 8)
        tokens[:, i + 1] = torch.where(noise[:, i] < 0.9, following, other[:, i])
    return tokens[:, :-1], tokens[:, 1:]


def train(rank, world, device, options):
    place = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    if rank == 0:
        library, version = torch_support.say_library()
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(SEED)
    model = Transformer().to(place)
    parallel = DistributedDataParallel(
        model, device_ids=[rank] if device == "cuda" else None, bucket_cap_mb=2)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    losses = []
    start = time.monotonic()
    for step in range(options.steps):
        tokens, targets = batch_of(step, rank)
        logits = parallel(tokens.to(place))
        loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1).to(place))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if rank == 0 and (step % 20 == 0 or step == options.steps - 1):
            print(f"step {step:4d} loss {losses[-1]:.6f}", flush=True)
    seconds = time.monotonic() - start
    if rank == 0:
        parameters = sum(p.double().abs().sum().item() for p in model.parameters())
        print(f"{options.steps} steps in {seconds:.1f} s", flush=True)
        with open(options.output, "w") as file:
            json.dump({"library": library, "version": version, "ranks": world, "losses": losses,
                       "parameters": parameters, "seconds": seconds}, file)
    if options.steps >= 100 and not sum(losses[-10:]) / 10 < losses[0] - 1:
        raise RuntimeError(f"it does not learn: loss {losses[0]:.3f} became {losses[-1]:.3f}")


def compare(options):
    with open(options.first) as file:
        first = json.load(file)
    with open(options.second) as file:
        second = json.load(file)
    for run in (first, second):
        print(f"{run['library']} version {run['version']}: {len(run['losses'])} steps, "
              f"last loss {run['losses'][-1]:.6f}, {run['seconds']:.1f} s")
    if first["library"] == second["library"]:
        print("FAILED: both ran on the same library")
        return 1
    if len(first["losses"]) != len(second["losses"]) or first["ranks"] != second["ranks"]:
        print("FAILED: they are not runs of the same training")
        return 1

    def difference(a, b):
        return abs(a - b) / abs(a) if math.isfinite(a) and math.isfinite(b) else math.inf

    worst, step = max((difference(a, b), i)
                      for i, (a, b) in enumerate(zip(first["losses"], second["losses"])))
    print(f"largest relative difference of a loss: {worst:.2e} at step {step} "
          f"(allowed: {options.tolerance:.0e})")
    if not worst <= options.tolerance:
        print("FAILED: the losses differ")
        return 1
    print("ok: the same training")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    torch_support.add_rank_options(run)
    run.add_argument("--steps", type=int, default=200)
    run.add_argument("--output", required=True, help="JSON file for the losses of rank 0")
    check = commands.add_parser("compare")
    check.add_argument("first")
    check.add_argument("second")
    check.add_argument("--tolerance", type=float, default=1e-4, help="relative (default: 1e-4)")
    options = parser.parse_args()
    if options.command == "compare":
        return compare(options)
    torch_support.check_rank_options(run, options)
    torch_support.run_ranks(options.ranks, options.device, options.eager, train, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
