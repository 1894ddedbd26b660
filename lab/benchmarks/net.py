"""Nodes and the links between them: network namespaces of this machine, joined and shaped.

Each node is a network namespace. Two nodes are joined by a veth pair, more nodes by a bridge in
another namespace. `tc tbf` shapes both ends of every link. For a delay, a relay in user space
carries the packets (`relay.py`). The machine's own settings are never changed: the congestion
control is set inside the namespaces. All names contain the id of this process, and everything is
removed when it ends.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL

from plan import GBIT, Scenario
from shell import Trouble, call, end, say

PREFIX = "gwbench"
DEVICE = "gwb0"
IPERF_SECONDS = "2"
ROUND_TRIP_PORT = "29300"


@dataclass(frozen=True)
class Node:
    """A machine, as the systems see it."""

    # Its namespace; None for this machine itself, without namespaces.
    namespace: str | None
    host: str
    address: str
    device: str

    def inside(self, words: list[str]) -> list[str]:
        """Returns a command that runs `words` on this node, under the node's host name."""
        if self.namespace is None:
            return words
        name = 'hostname "$0" && exec "$@"'
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        return [*enter, "sh", "-c", name, self.host, *words]


@dataclass(frozen=True)
class Line:
    """The rate of the plain link in bits per second, by iperf3: in one direction, and in the slower
    direction when both are used."""

    one_way: float
    both_ways: float
    round_trip_ms: float

    def best(self, other: "Line") -> "Line":
        """Returns the better of two measurements, because other load can only slow a line down."""
        return Line(
            max(self.one_way, other.one_way),
            max(self.both_ways, other.both_ways),
            min(self.round_trip_ms, other.round_trip_ms),
        )


@dataclass(frozen=True)
class Network:
    """The nodes of a scenario."""

    nodes: list[Node]
    # Reaches another node, as ssh would.
    remote_shell: Path

    def congestion_control(self, name: str) -> None:
        """Sets the congestion control of new connections."""
        for node in self.nodes:
            if node.namespace:
                setting = f"echo {name} > /proc/sys/net/ipv4/tcp_congestion_control"
                call(["ip", "netns", "exec", node.namespace, "sh", "-c", setting])


def may_make_namespaces() -> str | None:
    """Returns None if this process can make network namespaces, otherwise the reason why not."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"{PREFIX}-{os.getpid()}-try"
    try:
        call(["ip", "netns", "add", name])
        call(["ip", "netns", "delete", name])
    except Trouble as trouble:
        return f"no network namespace can be made: {trouble}"
    return None


def machine_congestion_control() -> str:
    """Returns the congestion control of the machine's connections."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def sweep_stale() -> None:
    """Removes the namespaces of benchmark runs that were killed."""
    for entry in call(["ip", "netns", "list"]).split("\n"):
        name = entry.split(" ")[0]
        parts = name.split("-")
        if (
            parts[0] == PREFIX
            and len(parts) == 3
            and parts[1].isdigit()
            and not Path(f"/proc/{parts[1]}").exists()
        ):
            say(f"removing {name}, left by a killed run")
            _delete(name)


@contextmanager
def network(scenario: Scenario, namespaces: bool) -> Iterator[Network]:
    """Makes the nodes of a scenario, which exist until the block ends."""
    with tempfile.TemporaryDirectory(prefix="gwb") as folder:
        shell = Path(folder) / "remote-shell"
        if not namespaces:
            yield Network([Node(None, "localhost", "127.0.0.1", "lo")], shell)
            return
        made: list[str] = []
        relay: subprocess.Popen[bytes] | None = None
        try:
            nodes = _nodes(scenario, made)
            shell.write_text(_remote_shell(nodes))
            shell.chmod(0o755)
            if scenario.delay_ms:
                relay = _join_by_relay(nodes, scenario.delay_ms)
            elif scenario.racks > 1:
                _join_racks(nodes, made, scenario)
            elif scenario.nodes == 2:
                _join_by_veth(nodes)
            elif scenario.nodes > 2:
                _join_by_bridge(nodes, _switch("switch", made), scenario.rate)
            if scenario.rate and scenario.nodes > 1:
                for node in nodes:
                    _shape(str(node.namespace), DEVICE, scenario.rate)
            yield Network(nodes, shell)
        finally:
            if relay:
                end([relay])
            for name in made:
                _delete(name)


def measure_line(net: Network) -> Line:
    """Measures the link between the first two nodes: in one direction, and in both at once with two
    pairs of programs."""
    here, there = net.nodes[:2]
    servers = []
    try:
        for node in (here, there):
            words = node.inside(["iperf3", "--server", "--bind", node.address])
            servers.append(
                subprocess.Popen(words, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)
            )
        time.sleep(0.3)
        one_way = _received(call(here.inside(_client(there))))
        with ThreadPoolExecutor(2) as pool:
            ways = [
                pool.submit(call, a.inside(_client(b))) for a, b in ((here, there), (there, here))
            ]
            both_ways = min(_received(way.result()) for way in ways)
    finally:
        end(servers)
    return Line(one_way, both_ways, _round_trip(here, there))


def _client(server: Node) -> list[str]:
    return ["iperf3", "--client", server.address, "--json", "--time", IPERF_SECONDS, "--omit", "1"]


def _received(answer: str) -> float:
    try:
        return float(json.loads(answer)["end"]["sum_received"]["bits_per_second"])
    except (ValueError, KeyError, TypeError) as error:
        raise Trouble(f"invalid output of iperf3 ({error!r}): {answer[:200]}") from error


def _round_trip(here: Node, there: Node) -> float:
    program = [sys.executable, str(Path(__file__).with_name("round_trip.py"))]
    place = [there.address, ROUND_TRIP_PORT]
    words = there.inside([*program, "serve", *place])
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            return float(call(here.inside([*program, "ask", *place])))
        finally:
            end([server])


def _nodes(scenario: Scenario, made: list[str]) -> list[Node]:
    nodes = []
    for i in range(scenario.nodes):
        name = f"{PREFIX}-{os.getpid()}-{i}"
        call(["ip", "netns", "add", name])
        made.append(name)
        _ip(name, "link", "set", "lo", "up")
        alone = scenario.nodes == 1
        address, device = ("127.0.0.1", "lo") if alone else (f"10.201.0.{i + 1}", DEVICE)
        nodes.append(Node(name, f"gwnode{i}", address, device))
    return nodes


def _remote_shell(nodes: list[Node]) -> str:
    """Returns a replacement for ssh, called with options, the host, and a command for its shell."""
    cases = "".join(
        f"    {node.address}) exec ip netns exec {node.namespace} unshare --uts sh -c "
        f'\'hostname {node.host} && exec sh -c "$0"\' "$*" ;;\n'
        for node in nodes
    )
    return (
        "#!/bin/sh\n"
        "while :; do case $1 in -o | -l | -p) shift 2 ;; -*) shift ;; *) break ;; esac; done\n"
        f"host=$1; shift\ncase $host in\n{cases}"
        '    *) echo "unknown node $host" >&2; exit 255 ;;\nesac\n'
    )


def _join_by_veth(nodes: list[Node]) -> None:
    a, b = (str(node.namespace) for node in nodes)
    _ip(a, "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", b)
    for node in nodes:
        _up(node)


def _switch(name: str, made: list[str]) -> str:
    """Makes a namespace with a bridge; returns its name."""
    switch = f"{PREFIX}-{os.getpid()}-{name}"
    call(["ip", "netns", "add", switch])
    made.append(switch)
    _ip(switch, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
    _ip(switch, "link", "set", "bridge", "up")
    return switch


def _join_racks(nodes: list[Node], made: list[str], scenario: Scenario) -> None:
    """Joins consecutive nodes as racks: a bridge for each rack, and one between them."""
    core = _switch("core", made)
    size = len(nodes) // scenario.racks
    for rack in range(scenario.racks):
        switch = _switch(f"rack{rack}", made)
        own = nodes[rack * size : (rack + 1) * size]
        _join_by_bridge(own, switch, scenario.rate)
        up, down = "uplink", f"rack{rack}"
        _ip(switch, "link", "add", up, "type", "veth", "peer", "name", down, "netns", core)
        for namespace, port in ((switch, up), (core, down)):
            _ip(namespace, "link", "set", port, "master", "bridge", "up")
            if scenario.rate:
                _shape(namespace, port, scenario.rate * size // 4)


def _join_by_bridge(nodes: list[Node], switch: str, rate: int | None) -> None:
    for i, node in enumerate(nodes):
        port = f"port{i}"
        _ip(
            str(node.namespace),
            "link",
            "add",
            DEVICE,
            "type",
            "veth",
            "peer",
            "name",
            port,
            "netns",
            switch,
        )
        _ip(switch, "link", "set", port, "master", "bridge", "up")
        # Limits the traffic to this node, too.
        if rate:
            _shape(switch, port, rate)
        _up(node)


def _join_by_relay(nodes: list[Node], delay_ms: float) -> subprocess.Popen[bytes]:
    words = [sys.executable, str(Path(__file__).with_name("relay.py"))]
    for node in nodes:
        words += [str(node.namespace), f"{node.address}/24"]
    relay = subprocess.Popen(
        [*words, DEVICE, str(delay_ms)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert relay.stdout is not None and relay.stderr is not None
    if relay.stdout.readline() != b"ready\n":
        said = relay.stderr.read().decode(errors="replace").strip().splitlines()
        end([relay])
        raise Trouble(
            f"a line with a delay can't be made: {said[-1] if said else 'the relay ended'}"
        )
    return relay


def _up(node: Node) -> None:
    _ip(str(node.namespace), "address", "add", f"{node.address}/24", "dev", node.device)
    _ip(str(node.namespace), "link", "set", node.device, "up")


def _shape(namespace: str, device: str, rate: int) -> None:
    """Limits the rate at which a device sends. Its queue holds 4 ms, and a burst 1 ms."""
    millisecond = rate // 8 // 1000
    burst = max(millisecond, 256 << 10)
    limit = max(4 * millisecond, 1 << 20)
    words = ["rate", f"{rate}bit", "burst", f"{burst}b", "limit", f"{limit}b"]
    call(["tc", "-netns", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *words])


def _ip(namespace: str, *words: str) -> None:
    call(["ip", "-netns", namespace, *words])


def _delete(name: str) -> None:
    """Ends all processes in one of our namespaces, and removes it."""
    try:
        for number in (15, 9):
            for pid in call(["ip", "netns", "pids", name]).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), number)
            for _ in range(50):
                if not call(["ip", "netns", "pids", name]).split():
                    break
                time.sleep(0.02)
        call(["ip", "netns", "delete", name])
    except Trouble as trouble:
        say(f"{name} was not removed: {trouble}; remove it with `ip netns delete {name}`")


def line_text(line: Line) -> str:
    """Returns the description of a line."""
    return (
        f"plain TCP (iperf3) carries {rate_text(line.one_way)} one way, "
        f"{rate_text(line.both_ways)} both ways at once, "
        f"and takes {line.round_trip_ms:.2f} ms there and back"
    )


def rate_text(bits: float) -> str:
    """Returns a rate with its unit."""
    return f"{bits / GBIT:.3g} Gbit/s"
