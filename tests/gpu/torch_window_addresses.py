#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the buffers of other ranks at the addresses that ncclGetPeerDevicePointer returns, in memory of
PyTorch and of ncclMemAlloc. LD_PRELOAD chooses the NCCL library. Prints one line for each kind of memory; exit status
1 if one is wrong.
"""
import argparse
import ctypes
import sys

import torch
import torch.distributed as dist

import torch_support

COUNT = 3 << 20  # of 4 bytes
OFFSET = 1_000_004


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


def call(name, *arguments):
    status = getattr(ctypes.CDLL(None), name)(*arguments)
    if status != 0:
        raise RuntimeError(f"{name} failed with {status}")


def copy(to, source, count):
    """Copies numbers between addresses of any device."""
    if ctypes.CDLL("libcuda.so.1").cuMemcpy(ctypes.c_uint64(to), ctypes.c_uint64(source),
                                            ctypes.c_size_t(4 * count)) != 0:
        raise RuntimeError("cuMemcpy failed")
    torch.cuda.synchronize()


def pattern(rank, kind):
    return torch.arange(COUNT, dtype=torch.int32, device="cuda") * 7 + 1000 * rank + kind


def communicator(rank, world):
    identity = UniqueId()
    if rank == 0:
        call("ncclGetUniqueId", ctypes.byref(identity))
    shared = [bytes(identity)]
    dist.broadcast_object_list(shared, 0)
    identity = UniqueId.from_buffer_copy(shared[0])
    comm = ctypes.c_void_p()
    call("ncclCommInitRank", ctypes.byref(comm), world, identity, rank)
    return comm


def check(rank, world, comm, address, kind):
    """Every rank reads the numbers of all others at its address, and writes one word to each."""
    mine = pattern(rank, kind)
    copy(address, mine.data_ptr(), COUNT)
    window = ctypes.c_void_p()
    call("ncclCommWindowRegister", comm, ctypes.c_void_p(address), ctypes.c_size_t(4 * COUNT),
         ctypes.byref(window), 0)

    def peer_address(peer, offset):
        result = ctypes.c_void_p()
        call("ncclGetPeerDevicePointer", window, ctypes.c_size_t(offset), peer,
             ctypes.byref(result))
        return result.value

    is_right = peer_address(rank, OFFSET) == address + OFFSET
    words = torch.full((world,), -1, dtype=torch.int32, device="cuda")
    torch_support.barrier(rank, "cuda")
    for peer in range(world):
        there = peer_address(peer, 0)
        if there is None:
            raise RuntimeError(f"rank {rank} has no address for the buffer of rank {peer}")
        seen = torch.full_like(mine, -1)
        copy(seen.data_ptr(), there, COUNT)
        is_right = is_right and torch.equal(seen, pattern(peer, kind))
    torch_support.barrier(rank, "cuda")
    for peer in range(world):
        word = torch.tensor([100 * rank + peer], dtype=torch.int32, device="cuda")
        copy(peer_address(peer, OFFSET + 4 * rank), word.data_ptr(), 1)
    torch_support.barrier(rank, "cuda")
    copy(words.data_ptr(), address + OFFSET, world)
    is_right = is_right and words.tolist() == [100 * p + rank for p in range(world)]
    torch_support.barrier(rank, "cuda")
    call("ncclCommWindowDeregister", comm, window)
    return is_right


def measure(rank, world, _device, _options):
    torch_support.barrier(rank, "cuda")
    comm = communicator(rank, world)
    tensor = torch.empty(COUNT, dtype=torch.int32, device="cuda")
    allocated = ctypes.c_void_p()
    call("ncclMemAlloc", ctypes.byref(allocated), ctypes.c_size_t(4 * COUNT))
    wrong = []
    memory = {"PyTorch": tensor.data_ptr(), "ncclMemAlloc": allocated.value}
    for kind, (name, address) in enumerate(memory.items()):
        is_right = check(rank, world, comm, address, kind)
        print(f"rank {rank}, memory of {name}: {'right' if is_right else 'WRONG'}", flush=True)
        if not is_right:
            wrong.append(name)
    call("ncclMemFree", allocated)
    call("ncclCommDestroy", comm)
    if wrong:
        sys.exit(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    torch_support.add_rank_options(parser)
    options = parser.parse_args()
    torch_support.check_rank_options(parser, options)
    torch_support.say_library()
    torch_support.run_ranks(options.ranks, options.device, options.eager, measure, {})


if __name__ == "__main__":
    main()
