"""A line with a delay, for kernels without netem: two tunnel devices and a process between them.

`relay.py NS_A ADDRESS_A/PREFIX NS_B ADDRESS_B/PREFIX DEVICE MS` makes a device in each of the two
network namespaces and prints `ready`. It passes each packet from one device to the other, `MS`
milliseconds later. It ends when its standard input ends.

Packets pass as the system would give them to a network card: those of TCP in bundles of up to 64
KiB, uncut and without checksums, which would cost both ends more than the relay. A real line does
not get slower when processors are busy, so the relay has a higher priority than all other work.
"""

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000
# Each packet has a header with the information for a network card.
IFF_VNET_HDR = 0x4000
TUNSETOFFLOAD = 0x400454D0
TUN_F_CSUM = 0x01
TUN_F_TSO4 = 0x02
MTU = 1500
LARGEST = 10 + (1 << 16)
# The length of the queue is the line's buffer. Packets beyond it are lost, as on a real line
# (BOUND).
MAX_PACKETS = 4096


def enter(namespace: str) -> None:
    """Moves this process into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"can't enter the namespace {namespace}")


def device(namespace: str, address: str, name: str) -> int:
    """Makes a tunnel device in a namespace; it exists until the descriptor is closed."""
    enter(namespace)
    tunnel = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(tunnel, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(tunnel, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    for words in (
        ["ip", "address", "add", address, "dev", name],
        ["ip", "link", "set", name, "mtu", str(MTU), "up"],
    ):
        subprocess.run(words, check=True)
    return tunnel


def forward(a: int, b: int, delay: float) -> None:
    """Moves packets until standard input ends."""
    queues: dict[int, deque[tuple[float, bytes]]] = {a: deque(), b: deque()}
    while True:
        heads = [queue[0][0] for queue in queues.values() if queue]
        wait = max(0.0, min(heads) - time.monotonic()) if heads else None
        readable, _, _ = select.select([a, b, 0], [], [], wait)
        if 0 in readable and not os.read(0, 64):
            return
        for source, target in ((a, b), (b, a)):
            queue = queues[target]
            while source in readable:
                try:
                    packet = os.read(source, LARGEST)
                except BlockingIOError:
                    break
                if len(queue) < MAX_PACKETS:
                    queue.append((time.monotonic() + delay, packet))
            while queue and queue[0][0] <= time.monotonic():
                # A device that is full or down loses packets, like a line.
                with suppress(OSError):
                    os.write(target, queue.popleft()[1])


def main() -> None:
    """Makes the line and runs it."""
    namespace_a, address_a, namespace_b, address_b, name, milliseconds = sys.argv[1:]
    a = device(namespace_a, address_a, name)
    b = device(namespace_b, address_b, name)
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print("ready", flush=True)
    forward(a, b, float(milliseconds) / 1000)


if __name__ == "__main__":
    main()
