# SPDX-License-Identifier: Apache-2.0
"""What the PyTorch checks share: starting ranks, and which NCCL library they run on."""
import ctypes
import datetime
import os
import pathlib
import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = datetime.timedelta(seconds=120)


class _SymbolInfo(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p),
                ("name", ctypes.c_char_p), ("address", ctypes.c_void_p)]


def loaded_nccl():
    """Path of the NCCL library that PyTorch's calls reach, and its version number, or (None, 0).

    A process can hold two: one that was preloaded, whose names come first, and the one that
    PyTorch's package brings and loads all the same.
    """
    try:
        function = ctypes.CDLL(None).ncclGetVersion
    except AttributeError:
        return _first_mapped_nccl()
    info = _SymbolInfo()
    address = ctypes.cast(function, ctypes.c_void_p)
    if ctypes.CDLL(None).dladdr(address, ctypes.byref(info)) == 0:
        raise RuntimeError("ncclGetVersion is in no library")
    version = ctypes.c_int(0)
    if function(ctypes.byref(version)) != 0:
        raise RuntimeError("ncclGetVersion failed")
    return os.path.realpath(info.file.decode()), version.value


def _first_mapped_nccl():
    names = ("libnccl", "libunisono")
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.startswith("/") and os.path.basename(path).startswith(names):
            version = ctypes.c_int(0)
            if ctypes.CDLL(path).ncclGetVersion(ctypes.byref(version)) != 0:
                raise RuntimeError(f"{path}: ncclGetVersion failed")
            return path, version.value
    return None, 0


def say_library():
    path, version = loaded_nccl()
    print(f"library: {path} version {version}", flush=True)
    return path, version


def gpu_of(rank):
    """The GPU of a rank. Ranks share GPUs where there are fewer of them, which needs
    NCCL_MULTI_RANK_GPU_ENABLE=1."""
    return rank % torch.cuda.device_count()


def barrier(rank, device):
    dist.barrier(**({"device_ids": [gpu_of(rank)]} if device == "cuda" else {}))


def _rank_main(rank, world, device, eager, rendezvous, function, arguments):
    try:
        # With threads for all cores in every rank, expected results take several times as long.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
        keywords = {}
        if device == "cuda":
            torch.cuda.set_device(gpu_of(rank))
            if eager:
                keywords["device_id"] = torch.device("cuda", gpu_of(rank))
        dist.init_process_group(
            backend="nccl" if device == "cuda" else "gloo", init_method=f"file://{rendezvous}",
            rank=rank, world_size=world, timeout=TIMEOUT, **keywords)
        function(rank, world, device, arguments)
        barrier(rank, device)
        dist.destroy_process_group()
    except Exception:
        # The traceback at once: other ranks may hang until they are ended.
        print(f"rank {rank}: {traceback.format_exc()}", file=sys.stderr, flush=True)
        raise


def run_ranks(world, device, eager, function, arguments):
    """Calls function(rank, world, device, arguments) in `world` processes with a process group over
    all of them: NCCL on cuda, gloo on cpu. Raises if one of them failed; the others are ended."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank_main, nprocs=world, join=True,
                 args=(world, device, eager, os.path.join(folder, "rendezvous"), function,
                       arguments))


def add_rank_options(parser):
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="cpu runs on gloo, to check the script itself (default: cuda)")
    parser.add_argument("--ranks", type=int, default=2,
                        help="one process and GPU each (default: 2)")
    parser.add_argument("--eager", action="store_true",
                        help="create communicators at once (device_id=), not at the first call")


def check_rank_options(parser, options, least=2):
    if options.ranks < least:
        parser.error(f"--ranks must be at least {least}")
    if options.device == "cuda" and torch.cuda.device_count() < options.ranks:
        parser.error(f"{options.ranks} ranks need as many GPUs; "
                     f"{torch.cuda.device_count()} are there")
