#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""namespaces.py BUILD [--repeats N] [CASE...]: runs ranks in network namespaces of their own, which
veth pairs and bridges join, and breaks the network between them.

BUILD is a build folder with bin/net_rank. Needs neither root nor a network, but user namespaces,
ip, tc and ss, and for loss nft; says "skipped" and why where something is missing. A case with a fault runs
--repeats times: every rank but the one that dies must return an error that names a peer and an
interface, or the rank that died, within LIMIT seconds.
"""
import argparse
import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import re
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time

TIMEOUT = 4  # UNISONO_NETWORK_TIMEOUT
LIMIT = TIMEOUT + 4  # what the kernel adds to probes, and the grace of the proxy


def sh(*command):
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def reexecute():
    """Enters namespaces of this script's own, or ends it."""
    for tool in ("unshare", "ip", "tc", "ss"):
        if shutil.which(tool) is None:
            print(f"skipped: {tool} is not installed")
            sys.exit(0)
    if os.environ.get("IN_NAMESPACE") == "1":
        return
    probe = subprocess.run(["unshare", "-Urnm", "mount", "-t", "tmpfs", "none", "/run"],
                           capture_output=True, text=True)
    if probe.returncode != 0:
        print(f"skipped: the kernel refuses user namespaces: {probe.stderr.strip()}")
        sys.exit(0)
    os.environ["IN_NAMESPACE"] = "1"
    os.execvp("unshare", ["unshare", "-Urnm", "--kill-child", "-pf", "--mount-proc", sys.executable,
                          *sys.argv])


class Wire:
    """A process that carries packets between the tun interfaces of two hosts: each is late by `delay`
    seconds and up to `jitter` more, so that packets overtake each other, or is dropped."""

    TUN, NO_HEADER, SET, NEW_NETWORK = 0x0001, 0x1000, 0x400454CA, 0x40000000

    def __init__(self, delay=0.0, jitter=0.0, loss=0.0):
        self.delay, self.jitter, self.loss = delay, jitter, loss
        self.process = os.fork()
        if self.process == 0:
            try:
                self.carry([self.open(host) for host in range(2)])
            finally:
                os._exit(1)

    def open(self, host):
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/host{host}") as namespace:
            if libc.setns(namespace.fileno(), self.NEW_NETWORK) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, self.SET, struct.pack("16sH22x", b"veth0", self.TUN | self.NO_HEADER))
        return tun

    def carry(self, tuns):
        ends = selectors.DefaultSelector()
        for tun, other in zip(tuns, reversed(tuns)):
            ends.register(tun, selectors.EVENT_READ, other)
        late, number = [], 0
        while True:
            patience = max(0.0, late[0][0] - time.monotonic()) if late else None
            for key, _ in ends.select(patience):
                with contextlib.suppress(BlockingIOError):
                    packet, number = os.read(key.fd, 65536), number + 1
                    if random.random() >= self.loss:
                        due = time.monotonic() + self.delay + random.uniform(0, self.jitter)
                        heapq.heappush(late, (due, number, key.data, packet))
            while late and late[0][0] <= time.monotonic():
                _, _, tun, packet = heapq.heappop(late)
                with contextlib.suppress(OSError):  # the interface is full, or down
                    os.write(tun, packet)

    def close(self):
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)


class Network:
    """Hosts host0, host1, ... with an interface for each of `planes`, which are bridges."""

    def __init__(self, hosts, planes=1, ipv6=False, down=False, wire=None):
        self.hosts, self.planes, self.ipv6, self.wire = hosts, planes, ipv6, None
        for host in range(hosts):
            sh("ip", "netns", "add", f"host{host}")
            self.on(host, "ip", "link", "set", "lo", "up")
        if wire:
            self.planes = 0
            for host in range(hosts):
                self.on(host, "ip", "tuntap", "add", "mode", "tun", "name", "veth0")
                self.on(host, "ip", "addr", "add", f"10.0.0.{host + 1}/24", "dev", "veth0")
                self.on(host, "ip", "link", "set", "veth0", "mtu", "9000", "up")
            self.wire = Wire(**wire)
            return
        for plane in range(planes):
            sh("ip", "link", "add", f"br{plane}", "type", "bridge")
            if not (down and plane == 1):
                sh("ip", "link", "set", f"br{plane}", "up")
            for host in range(hosts):
                end, name = f"p{plane}h{host}", f"veth{plane}"
                sh("ip", "link", "add", end, "type", "veth", "peer", "name", name, "netns",
                   f"host{host}")
                sh("ip", "link", "set", end, "master", f"br{plane}", "up")
                address = (f"fd00:{plane}::{host + 1}/64" if ipv6
                           else f"10.{plane}.0.{host + 1}/24")
                self.on(host, "ip", "addr", "add", address, "dev", name,
                        *(["nodad"] if ipv6 else []))
                self.on(host, "ip", "link", "set", name, "up")

    def on(self, host, *command):
        sh("ip", "netns", "exec", f"host{host}", *command)

    def counter(self, host, name):
        """Of TCP, since the host was made."""
        text = subprocess.run(["ip", "netns", "exec", f"host{host}", "cat", "/proc/net/netstat"],
                              capture_output=True, text=True, check=True).stdout
        names, values = (line.split() for line in text.splitlines()[:2])
        return int(values[names.index(name)])

    def root(self):
        return "[fd00:0::1]:5555" if self.ipv6 else "10.0.0.1:5555"

    def close(self):
        if self.wire:
            self.wire.close()
        # The kernel takes its time with the links of a namespace that has ended.
        for plane in range(self.planes):
            for host in range(self.hosts):
                sh("ip", "link", "del", f"p{plane}h{host}")
        for host in range(self.hosts):
            sh("ip", "netns", "del", f"host{host}")
        for plane in range(self.planes):
            sh("ip", "link", "del", f"br{plane}")


class Rank:
    """A process of net_rank."""

    def __init__(self, network, rank, ranks, seconds, settings):
        environment = dict(os.environ, NCCL_HOSTID=f"host{rank}", NCCL_NET="Socket",
                           NCCL_COMM_ID=network.root(), NCCL_SOCKET_IFNAME="veth",
                           UNISONO_NETWORK_TIMEOUT=str(TIMEOUT), UNISONO_BACKEND="host",
                           UNISONO_HOST_DEVICES="1") | settings
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", f"host{rank % network.hosts}", NET_RANK, str(rank), str(ranks),
             str(seconds)], env=environment, stdout=subprocess.PIPE, text=True)
        self.lines, self.begun, self.ended_at = [], threading.Event(), None
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("begin"):
                self.begun.set()
            elif line.startswith(("end", "error", "wrong")):
                self.ended_at = time.monotonic()
        self.begun.set()

    def last(self):
        return self.lines[-1] if self.lines else "(no output)"


@contextlib.contextmanager
def job(ranks, seconds, settings=None, **shape):
    network = Network(ranks, **shape)
    started = []
    try:
        started = [Rank(network, rank, ranks, seconds, settings or {}) for rank in range(ranks)]
        yield network, started
    finally:
        for rank in started:
            rank.process.kill()
            rank.process.wait()
        network.close()


def wait_all(ranks, limit):
    deadline = time.monotonic() + limit
    for rank in ranks:
        try:
            rank.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
    time.sleep(0.1)
    return True


def healthy(name, ranks, prepare=None, settings=None, sockets_over=(), none_over=(), **shape):
    if prepare is drop and shutil.which("nft") is None:
        print(f"skipped: {name}: nft is not installed", flush=True)
        return True
    if "wire" in shape and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        print(f"skipped: {name}: /dev/net/tun cannot be used", flush=True)
        return True
    with job(ranks, 1.0, settings, **shape) as (network, started):
        if prepare:
            prepare(network)
        for rank in started:
            rank.begun.wait(30)
        used = subprocess.run(["ip", "netns", "exec", "host1", "ss", "-Htn"], capture_output=True,
                              text=True, check=True).stdout
        done = wait_all(started, 60)
        texts = [rank.last() for rank in started]
        good = done and all(text.startswith("end") for text in texts)
        good = good and all(part in used for part in sockets_over)
        good = good and not any(part in used for part in none_over)
        if network.wire:
            overtaken = sum(network.counter(host, "TCPOFOQueue") for host in range(ranks))
            texts.append(f"{overtaken} packets were overtaken")
            good = good and (overtaken > 0 or network.wire.jitter == 0)
        return report(name, good, texts)


def report(name, good, texts, seconds=None):
    print(f"{'passed' if good else 'FAILED'}: {name}"
          + (f", {seconds:.1f} s" if seconds is not None else ""), flush=True)
    if not good or VERBOSE:
        for text in texts:
            print(f"    {text[:400]}", flush=True)
    return good


def faulty(name, ranks, fault, dies=None, stops=False, settings=None, **shape):
    """`fault(network, ranks)` happens in the middle of calls. `dies` is a rank that ends by it."""
    good, longest, texts = True, 0, []
    for _ in range(REPEATS):
        with job(ranks, 120, settings, **shape) as (network, started):
            for rank in started:
                rank.begun.wait(30)
            time.sleep(0.05)
            begin = time.monotonic()
            fault(network, started)
            others = [rank for i, rank in enumerate(started) if i != dies]
            ended = wait_all(others, 3 if stops else LIMIT + 10)
            texts = [f"rank {started.index(rank)}: {rank.last()}" for rank in others]
            if stops:
                good = good and not ended and all(rank.last() == "begin" for rank in others)
                continue
            times = [rank.ended_at - begin if rank.ended_at else 1e9 for rank in others]
            longest = max(longest, *times)
            named = all(re.search(r"error .*(over veth\d|Rank \d+ \(process)", rank.last())
                        for rank in others)
            good = good and ended and named and longest <= LIMIT
            if not good:
                break
    return report(f"{name}, {REPEATS} times", good, texts, None if stops else longest)


def unreachable(name, seconds):
    """The second interface works only after `seconds`, or never."""
    with job(2, 1.0, planes=2, down=True) as (network, started):
        if seconds is not None:
            time.sleep(seconds)
            sh("ip", "link", "set", "br1", "up")
        done = wait_all(started, 30)
        texts = [rank.last() for rank in started]
        wanted = r"end" if seconds is not None else r"error .*10\.1\.0\.\d:\d+ cannot be made"
        return report(name, done and all(re.match(wanted, text) for text in texts), texts)


def everywhere(network, *command):
    for host in range(network.hosts):
        network.on(host, *command)


def drop(network):
    everywhere(network, "nft", "add", "table", "inet", "loss")
    everywhere(network, "nft", "add", "chain", "inet", "loss", "in",
               "{ type filter hook input priority 0; }")
    everywhere(network, "nft", "add", "rule", "inet", "loss", "in",
               "numgen random mod 100 < 1 drop")


def limit(network):
    everywhere(network, "tc", "qdisc", "add", "dev", "veth0", "root", "tbf", "rate", "400mbit",
               "burst", "64kb", "latency", "50ms")


def data_sockets(network, host):
    """Ports of the connections of a host that carry data: the ones with most bytes."""
    text = subprocess.run(["ip", "netns", "exec", f"host{host}", "ss", "-Htin"],
                          capture_output=True, text=True, check=True).stdout
    entries = []
    for head, info in zip(*[iter(text.splitlines())] * 2):
        sent = sum(int(n) for n in re.findall(r"bytes_(?:sent|received):(\d+)", info))
        entries.append((sent, head.split()[3].rsplit(":", 1)[1]))
    return [port for _, port in sorted(entries, reverse=True)]


def kill_connection(network, _):
    sh("ip", "netns", "exec", "host1", "ss", "-K", "sport", "=", f":{data_sockets(network, 1)[0]}")


def link_down(network, _):
    network.on(1, "ip", "link", "set", "veth0", "down")


def unplug(_network, _):
    # As a machine that loses its power: packets vanish, and nobody is told.
    sh("ip", "link", "set", "p0h1", "nomaster")


LANES = {"NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "2"}
CASES = {
    "two hosts": lambda n: healthy(n, 2),
    "four hosts": lambda n: healthy(n, 4),
    "four hosts, several sockets": lambda n: healthy(n, 4, settings=LANES),
    "IPv6": lambda n: healthy(n, 2, ipv6=True),
    "two interfaces": lambda n: healthy(n, 2, planes=2, sockets_over=("10.0.0.2", "10.1.0.2")),
    # No list; a host has the loopback as well.
    "three interfaces that nobody lists": lambda n: healthy(
        n, 2, planes=3, settings={"NCCL_SOCKET_IFNAME": "^docker", "NCCL_MIN_NCHANNELS": "3"},
        sockets_over=("10.0.0.2", "10.1.0.2", "10.2.0.2")),
    "interface of NCCL_COMM_ID": lambda n: healthy(
        n, 2, planes=2, settings={"NCCL_SOCKET_IFNAME": "", "NCCL_MIN_NCHANNELS": "2"},
        sockets_over=("10.0.0.2",), none_over=("10.1.0.2",)),
    "loss of 1 %": lambda n: healthy(n, 2, prepare=drop),
    "loss of 1 %, several sockets": lambda n: healthy(n, 4, prepare=drop, settings=LANES),
    "delay and reordering": lambda n: healthy(n, 2, wire={"delay": 0.002, "jitter": 0.002}),
    "delay and reordering, several sockets": lambda n: healthy(
        n, 2, wire={"delay": 0.002, "jitter": 0.002}, settings=LANES),
    "delay, reordering and loss of 1 %": lambda n: healthy(
        n, 2, wire={"delay": 0.0, "jitter": 0.001, "loss": 0.01}),
    "400 Mbit/s": lambda n: healthy(n, 2, prepare=limit),
    "unreachable for 2 s": lambda n: unreachable(n, 2),
    "unreachable": lambda n: unreachable(n, None),
    "process killed": lambda n: faulty(
        n, 3, lambda _, ranks: os.kill(child_of(ranks[1]), signal.SIGKILL), dies=1),
    "process stopped": lambda n: faulty(
        n, 3, lambda _, ranks: os.kill(child_of(ranks[1]), signal.SIGSTOP), dies=1, stops=True),
    "connection killed": lambda n: faulty(n, 3, kill_connection),
    "connection killed, several sockets": lambda n: faulty(n, 3, kill_connection, settings=LANES),
    "link down": lambda n: faulty(n, 3, link_down),
    "unplugged": lambda n: faulty(n, 3, unplug),
    "unplugged, several sockets": lambda n: faulty(n, 3, unplug, settings=LANES),
}


def child_of(rank):
    # `ip netns exec` replaces itself with the program.
    return rank.process.pid


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build")
    parser.add_argument("cases", nargs="*", help=", ".join(CASES).replace("%", "%%"))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_intermixed_args()
    NET_RANK = os.path.abspath(os.path.join(arguments.build, "bin/net_rank"))
    REPEATS, VERBOSE = arguments.repeats, arguments.verbose
    reexecute()
    sh("mount", "-t", "tmpfs", "none", "/run")
    results = [CASES[name](name) for name in arguments.cases or CASES]
    sys.exit(0 if all(results) else 1)
