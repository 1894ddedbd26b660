"""The plan of measurements: scenarios, sizes, and numbers of iterations. Pure.

A scenario is a number of nodes and ranks with the links between them. Every system runs in all
scenarios.
"""

from dataclasses import dataclass, replace

MIB = 1 << 20
GBIT = 1_000_000_000

QUICK_SIZES = (4, MIB, 64 * MIB)
NODE_SIZES = (4, 64 << 10, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
LINE_SIZES = (16 * MIB, 64 * MIB)

# From this size on, there is a barrier before each iteration. Ranks take different times to fill a
# tensor, which would otherwise count for the operation. Below, calls follow each other directly.
BARRIER_FROM = MIB


@dataclass(frozen=True)
class Scenario:
    """Some ranks on some nodes, and the tensors that they exchange."""

    name: str
    title: str
    nodes: int
    ranks_per_node: int
    sizes: tuple[int, ...]
    # The rate of each node's link, in bits per second in each direction; None for no limit.
    rate: int | None = None
    # The delay of each packet, in milliseconds in each direction.
    delay_ms: float = 0.0
    # Whether to use the gradients of a network instead of sizes.
    model: bool = False
    # The names of the systems to run; empty for all that can run.
    systems: tuple[str, ...] = ()
    # The number of racks, all of the same size. The link of a rack to the others has a quarter of
    # the combined rate of its nodes.
    racks: int = 1

    @property
    def ranks(self) -> int:
        """Returns the number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node


def quick() -> list[Scenario]:
    """Returns the most informative scenarios for five minutes."""
    return [
        Scenario("node-4", "one node, 4 ranks", 1, 4, QUICK_SIZES),
        Scenario("10g-2x2", "two nodes × 2 ranks, 10 Gbit/s", 2, 2, QUICK_SIZES, rate=10 * GBIT),
    ]


def full() -> list[Scenario]:
    """Returns all scenarios that have a table in lab/docs/results.md."""
    scenarios = [
        Scenario("node-4", "one node, 4 ranks", 1, 4, NODE_SIZES),
        Scenario("node-2", "one node, 2 ranks", 1, 2, NODE_SIZES),
        Scenario(
            "resnet50", "one node, 4 ranks, the 161 gradients of ResNet-50", 1, 4, (), model=True
        ),
    ]
    for ranks in (2, 1):
        for rate, text in ((GBIT, "1 Gbit/s"), (10 * GBIT, "10 Gbit/s"), (None, "unshaped")):
            name = f"{rate // GBIT}g" if rate else "free"
            word = "ranks" if ranks > 1 else "rank"
            scenarios.append(
                Scenario(
                    f"{name}-2x{ranks}",
                    f"two nodes × {ranks} {word}, {text}",
                    2,
                    ranks,
                    LINE_SIZES,
                    rate=rate,
                )
            )
    for rate in (GBIT, 10 * GBIT):
        name = f"{rate // GBIT}g-1ms-2x1"
        title = f"two nodes × 1 rank, {rate // GBIT} Gbit/s, 1 ms each way"
        scenarios.append(Scenario(name, title, 2, 1, LINE_SIZES, rate, delay_ms=1.0))
    scenarios.append(Scenario("1g-4x1", "four nodes × 1 rank, 1 Gbit/s", 4, 1, LINE_SIZES, GBIT))
    return scenarios


# Peers at their best on one node.
NODE_PEERS = ("gloo-tuned", "openmpi-tuned", "intelmpi-tuned", "oneccl-tuned", "horovod-tuned")
MODEL_PEERS = ("gloo-ddp-tuned", "openmpi-each-tuned", "intelmpi-each-tuned", "horovod-tuned")
LINE_PEERS = ("gloo-tuned", "openmpi-tuned")
OURS = ("gradwire", "gradwire-ordinary", "gradwire-dist", "gradwire-hvd")


def for_targets() -> list[Scenario]:
    """Returns only the scenarios that the targets (`targets.py`) need: a quarter of an hour."""
    wanted: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "node-4": ((4, 1 << 10, 64 << 10, MIB, 16 * MIB, 64 * MIB), OURS + NODE_PEERS),
        "node-2": ((1 << 10, MIB, 16 * MIB, 64 * MIB), OURS + NODE_PEERS),
        "resnet50": ((), ("gradwire", *MODEL_PEERS)),
        "1g-2x2": ((64 * MIB,), ("gradwire", "gloo-tuned")),
        "10g-2x2": (LINE_SIZES, ("gradwire", "gloo-tuned")),
        "1g-2x1": (LINE_SIZES, ("gradwire", "gradwire-bf16", *LINE_PEERS)),
        "10g-2x1": (LINE_SIZES, ("gradwire", *LINE_PEERS)),
        "free-2x1": ((64 * MIB,), ("gradwire", *LINE_PEERS)),
        "10g-1ms-2x1": (LINE_SIZES, ("gradwire", "gloo-tuned")),
        "1g-4x1": (LINE_SIZES, ("gradwire",)),
    }
    every = {scenario.name: scenario for scenario in full()}
    return [
        replace(every[name], sizes=sizes, systems=systems)
        for name, (sizes, systems) in wanted.items()
    ]


# The fewest iterations that are not timed, for every system: PyTorch's tensors move into Gradwire's
# shared memory during their first exchanges.
WARMUP = 5


@dataclass(frozen=True)
class Run:
    """One size with its iterations, equal for every system."""

    size: int
    warmup: int
    iterations: int
    barrier: bool

    def __str__(self) -> str:
        """Returns the form that the peers' programs parse."""
        return f"{self.size}:{self.warmup}:{self.iterations}{':barrier' if self.barrier else ''}"


def expected_seconds(scenario: Scenario, size: int) -> float:
    """Estimates the time of an iteration, to choose the number of iterations."""
    seconds = 100e-6 + size * 2e-9
    if scenario.rate:
        seconds += line_bits(scenario, size) / scenario.rate
    return seconds + 4e-3 * scenario.delay_ms


def line_bits(scenario: Scenario, size: int) -> float:
    """Returns the least bits that each node has to send: 2(M-1)/M · S for M nodes."""
    return 2 * (scenario.nodes - 1) / scenario.nodes * size * 8


def bus_bytes(scenario: Scenario, size: int) -> float:
    """Returns the bytes of nccl-tests' bus bandwidth: 2(N-1)/N · S for N ranks."""
    return 2 * (scenario.ranks - 1) / scenario.ranks * size


def runs(scenario: Scenario, seconds: float, thrift: int = 1) -> list[Run]:
    """Returns the sizes with iterations for about `seconds`; `thrift` reduces it for slow
    systems."""
    planned = []
    for size in scenario.sizes:
        often = seconds / expected_seconds(scenario, size) / thrift
        iterations = min(max(round(often), 3), 200)
        planned.append(Run(size, max(WARMUP, iterations // 5), iterations, size >= BARRIER_FROM))
    return planned


def size_text(size: int) -> str:
    """Returns a size with its unit."""
    for unit, name in ((1 << 30, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"
