"""Random trainings: a plan from a seed, for one process and N ranks (``training_runs``)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

# The options of each optimizer, of which one is drawn, and whether it has a fused form.
OPTIMIZERS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "SGD": (
        [{}, {"momentum": 0.9}, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1}],
        True,
    ),
    "Adam": ([{}, {"amsgrad": True}, {"weight_decay": 0.1}], True),
    "AdamW": ([{}, {"weight_decay": 0.2}, {"maximize": True}], True),
    "Adagrad": ([{}, {"lr_decay": 0.1}], True),
    "Adamax": ([{}, {"weight_decay": 0.1}], False),
    "NAdam": ([{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}], False),
    "RAdam": ([{}, {"weight_decay": 0.1}], False),
    "ASGD": ([{}, {"t0": 2.0}], False),
    "Adadelta": ([{}, {"rho": 0.5}], False),
    "RMSprop": ([{}, {"centered": True, "momentum": 0.5}], False),
    "Rprop": ([{}], False),
    "Adafactor": ([{}], False),
    "LBFGS": ([{"max_iter": 3}, {"max_iter": 4, "line_search_fn": "strong_wolfe"}], False),
    "Muon": ([{}], False),
}
SPARSE = ["SGD", "Adagrad", "SparseAdam"]
SCHEDULERS = ["StepLR", "ExponentialLR", "CosineAnnealingLR", "OneCycleLR", "ReduceLROnPlateau"]
CLEARS = [
    "optimizer",
    "optimizer",
    "optimizer zeros",
    "model",
    "model zeros",
    "data zeros",
    "kept zeros",
    "never",
]
# Events that may happen, and their step.
EVENTS = {
    "before": [
        "load state",
        "broadcast",
        "copy",
        "recast",
        "share memory",
        "freeze",
        "unfreeze",
        "restart",
        "tie",
        "wrap again",
        "root wraps again",
    ],
    "between": [
        "swap storage",
        "read groups",
        "root reads groups",
        "synchronize",
        "look at gradients",
        "drop",
        "replace",
        "write data",
        "freeze in flight",
    ],
    "instead": [
        "no backward",
        "begin again",
        "another backward",
        "skip the step",
        "root drops",
        "root replaces",
        "root writes",
    ],
}
_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


@dataclass
class Plan:
    """One training."""

    seed: int
    model: str = "dense"
    norm: bool = False
    channels_last: bool = False
    sparse: str | None = None
    tied: bool = False
    # Whether a second optimizer has some of the parameters as well.
    shared: bool = False
    branch: str = "left"
    frozen: bool = False
    dtype: torch.dtype = torch.float64
    optimizer: str = "SGD"
    options: dict[str, Any] = field(default_factory=dict)
    way: str | None = None
    groups_of_parameters: bool = False
    scheduler: str | None = None
    scheduled_before: bool = False
    clip: str | None = None
    passes: int = 1
    # Whether the optimizers of some ranks have their parameters in another order.
    reordered: bool = False
    # Whether all gradients are views of one buffer.
    flat: bool = False
    scaler: str | None = None
    infinity: tuple[int, int] | None = None
    closure: bool = False
    hooks: bool = False
    clear: str = "optimizer"
    wrapped: dict[str, Any] = field(default_factory=dict)
    groups: int | str | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    tail: int = 0

    @property
    def within(self) -> float:
        """Returns the allowed difference between the parameters of N ranks and of one process."""
        if "compression" in self.wrapped or self.dtype is torch.bfloat16:
            return 0.1
        return 2e-3 if self.dtype is torch.float32 else 1e-6


def plan(seed: int) -> Plan:
    """Returns the plan of a seed."""
    dice = random.Random(seed)
    chance = lambda share: dice.random() < share  # noqa: E731
    made = Plan(
        seed,
        model=dice.choice(["dense", "conv", "conv", "words"]),
        branch=dice.choice(["left", "step"]),
    )
    made.optimizer = dice.choice([name for name in OPTIMIZERS if hasattr(torch.optim, name)])
    options, fused = OPTIMIZERS[made.optimizer]
    made.options = dice.choice(options)
    if made.optimizer not in ("LBFGS", "Muon"):
        ways = [None, "foreach", "loop", "fused" if fused and _TORCH >= (2, 4) else "foreach"]
        made.way = dice.choice(ways)
        if made.optimizer == "SGD" and made.way == "fused":
            # PyTorch's optimizer fails if a parameter gets its first gradient after others.
            made.options = {"weight_decay": 0.1}
    made.norm = made.model == "conv" and chance(0.4)
    made.channels_last = made.model == "conv" and chance(0.6)
    if not made.norm and chance(0.4):
        made.branch = dice.choice(["rank", "rank and step"])
    if made.model == "words":
        made.tied = chance(0.3)
        made.sparse = None if made.tied or chance(0.4) else dice.choice(SPARSE)
    made.frozen = chance(0.4)
    # Other optimizers divide by the gradient's norm, so rounding matters if it is small.
    smooth = made.optimizer == "SGD"
    made.dtype = dice.choice(
        [torch.float64] * 2 + ([torch.float32, torch.bfloat16] if smooth else [])
    )
    if made.optimizer == "LBFGS":
        # PyTorch's fused form accepts only contiguous gradients.
        made.closure, made.branch, made.channels_last = True, "left", False
    else:
        made.closure = chance(0.15)
        made.groups_of_parameters = chance(0.3)
    if chance(0.5):
        made.scheduler, made.scheduled_before = dice.choice(SCHEDULERS), chance(0.5)
        if made.scheduler == "OneCycleLR" and made.optimizer == "SGD" and made.way == "fused":
            made.scheduler = "StepLR"  # the other one sets a momentum
    if not made.closure:
        made.clip = dice.choice([None, None, "norm", "value", "norm of groups", "by hand"])
        made.passes = dice.choice([1, 1, 2, 3])
        if chance(0.35) and hasattr(torch.amp, "GradScaler"):
            made.scaler = dice.choice(["on", "on", "off"])
    made.hooks, made.clear = chance(0.3), dice.choice(CLEARS)
    if made.sparse is not None and made.clear in ("data zeros", "kept zeros"):
        made.clear = "model zeros"  # writes through .data don't clear a sparse gradient
    made.reordered = made.optimizer != "LBFGS" and chance(0.3)
    if made.clip == "norm of groups":
        made.reordered = False  # in another order, the sum of the norms is rounded differently
    made.flat = made.sparse is None and made.clear.endswith("zeros") and chance(0.5)
    if "line_search_fn" in made.options and made.clear == "never":
        # The search compares losses with gradients. With accumulated gradients of earlier losses,
        # its end depends on rounding: even one process gets different results if it adds its shards
        # in another order.
        made.clear = "optimizer"
    wrapped = made.wrapped
    if chance(0.25):
        wrapped["op"] = "Sum"
    elif chance(0.2):
        wrapped["gradient_predivide_factor"] = 2.0
    if chance(0.2) and made.optimizer in ("SGD", "ASGD") and made.scaler is None:
        wrapped["compression"] = dice.choice(["fp16", "bf16"])
    if chance(0.3):
        made.groups = dice.choice([1, 2, 3, "lists"])
    if made.sparse is not None and chance(0.3):
        wrapped["sparse_as_dense"] = True
    for step in range(dice.randint(3, 6)):
        made.steps.append(_step(dice, made, step))
    _more(random.Random(f"more {seed}"), made)
    if made.scaler == "on" and chance(0.7):
        made.infinity = (dice.randrange(len(made.steps)), dice.randrange(4))
    made.tail = dice.choice([0, 0, 0, 1, 2]) if made.scaler is None else 0
    return made


def _more(dice: random.Random, made: Plan) -> None:
    """Lets optimizers share parameters, and leaves a rank without a batch in some steps."""
    if made.closure or made.norm:
        return
    alone = made.sparse is None and made.optimizer != "Muon"
    if alone and made.clear.startswith("optimizer") and dice.random() < 0.3:
        made.shared = True
        for happens in made.steps:
            happens.pop("instead", None)  # the last one to be cleared makes the first step
    for happens in made.steps:
        if made.scaler is None and dice.random() < 0.2:
            happens["without"] = dice.randrange(4)


def _step(dice: random.Random, made: Plan, step: int) -> dict[str, Any]:
    happens: dict[str, Any] = {
        "micro": made.passes if dice.random() < 0.8 else dice.randint(1, made.passes)
    }
    for when, share in (("before", 0.3), ("between", 0.3), ("instead", 0.15)):
        if dice.random() < share:
            happens[when] = dice.choice(EVENTS[when])
    if happens.get("before") == "restart" and dice.random() < 0.7:
        del happens["before"]  # it takes a second
    if made.reordered and happens.get("before") == "broadcast":
        del happens["before"]  # states are broadcast by position
    if made.closure:
        happens.pop("between", None), happens.pop("instead", None)
    if made.scaler is not None:
        happens.pop("instead", None)
    return happens
