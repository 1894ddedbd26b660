"""Training with DDP that skips the step of a loss: ``DdpHookState(on_loss="skip", ...)``.

DDP waits for collectives in its forward and backward passes: the hook's buckets, its buffers, the
order of its buckets, its unused parameters. If a rank is lost in one of them, this is noted, and
the passes complete with the values that are there, because ``step`` will skip them. So DDP has a
group of its own: ``DdpGroup``.

- Until the hook is registered, the group has this rank only. So making a DDP model needs no
  collective, which a new rank would make alone.
- Then it consists of all ranks of the present epoch.
- After a loss it makes no collectives until ``step`` joins the next epoch.

In each epoch, DDP's reducer is made anew, with the buckets of a new rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from gradwire import _world
from gradwire._errors import InvalidRequest
from gradwire._world import session
from gradwire.elastic import State
from gradwire.torch import _scaler
from gradwire.torch._stepping import note_contributors
from gradwire.torch._voting import OwnState, Patience, Voting, check_is_only_one, wants_change
from gradwire.torch._wrapping import Wrapped, wrap
from gradwire.torch.distributed._base import as_list
from gradwire.torch.distributed._futures import Failed
from gradwire.torch.distributed._group import ProcessGroupGradwire
from gradwire.torch.distributed._work import Work
from gradwire.torch.distributed._world import Everybody


class DdpGroup(ProcessGroupGradwire):
    """The process group of a DDP model that skips the steps of losses."""

    def __init__(self, losses: Patience, timeout: timedelta) -> None:
        self._losses, self._is_alone = losses, True
        everybody: Any = Everybody()
        super().__init__(None, session().rank, everybody, range(session().size), "ddp", timeout)

    def begin_epoch(self) -> None:
        """Makes it the group of all ranks of the present epoch."""
        self._is_alone = False
        self._become(self.world, session().rank, range(session().size))

    def getRank(self) -> int:
        """Returns this process's rank in the group."""
        return 0 if self._is_alone else self._rank

    rank = getRank

    def getSize(self) -> int:
        """Returns the number of ranks in the group."""
        return 1 if self._is_alone else len(self._ranks)

    size = getSize

    def _patiently(self, call: Callable[[], Work], alone: Callable[[], Any], result: Any) -> Work:
        """Makes a call, or acts without other ranks (``alone``); returns a complete work."""
        losses = self._losses
        if not self._is_alone and losses.lost is None:
            with losses.patience():
                call().wait()
                return Work("a call of DDP", [], None, result, self._timeout)
        alone()
        return Work("a call of DDP", [], None, result, self._timeout)

    def allreduce(self, tensors: Any, *given: Any, **named: Any) -> Work:
        """Reduces tensors over all ranks, in place."""
        call = super().allreduce
        return self._patiently(
            lambda: call(tensors, *given, **named), lambda: None, as_list(tensors)
        )

    def broadcast(self, tensors: Any, *given: Any, **named: Any) -> Work:
        """Copies the root's tensors to all ranks."""
        call = super().broadcast
        return self._patiently(
            lambda: call(tensors, *given, **named), lambda: None, as_list(tensors)
        )

    def allgather(self, outputs: Any, inputs: Any, *given: Any, **named: Any) -> Work:
        """Copies every rank's tensor to all ranks."""
        call = super().allgather

        def alone() -> None:
            several = (
                [(outputs, inputs)] if isinstance(inputs, torch.Tensor) else zip(outputs, inputs)
            )
            for targets, tensor in several:
                for target in targets:
                    target.copy_(tensor)

        return self._patiently(lambda: call(outputs, inputs, *given, **named), alone, outputs)


class PatientWork(Work):
    """The exchange of a bucket. After a loss, its future has the unchanged bucket."""

    losses: Patience
    joined: int

    def _failed(self, error: BaseException) -> Any:
        return self.value if self.losses.note(error, self.joined) else Failed(error)


class DdpSteps(Voting):
    """The methods of an optimizer of a DDP model."""

    _ddp: Any
    # The names in the model, by which states are paired.
    _parameter_names: dict[torch.Tensor, str]
    # Makes DDP's reducer anew, for the ranks of the next epoch.
    _renew: Callable[[], None]
    # The number of ranks that have exchanged this step's gradients.
    _size: int
    _change: bool

    def _begin_ddp(self, ddp: Any, losses: Patience, state: State | None) -> None:
        self._size, self._change = session().size, False
        self._parameter_names = {each: name for name, each in ddp.module.named_parameters()}
        states = [] if state is None else [state]
        own = OwnState(self, lambda: _tensors_of(ddp.module), states)
        me = weakref.ref(self)

        def heal(*_: Any) -> None:
            optimizer = me()
            if optimizer is not None:
                optimizer._heal()

        # Before the first collective of a step. By then, the program has counted the last step.
        ddp.register_forward_pre_hook(heal)
        self._begin_voting(losses, [own, *states])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, as the original optimizer does.

        Args:
            param_group: The group.
        """
        super(Wrapped, self).add_param_group(param_group)

    def _rejoin(self) -> bool | None:
        outcome = super()._rejoin()
        self._change = False
        self._renew()
        return outcome

    def _complete_exchange(self) -> None:
        """Agrees on whether the ranks will change: DDP has exchanged the gradients."""
        self._size = session().size
        if not _world.is_elastic():
            return
        with self._losses.patience():
            if self._losses.lost is None:
                buffer = session().buffer("u8", [1])
                buffer.write(bytes([wants_change()]))
                session().allreduce([buffer], "max", name="ddp.change").wait()
                self._change = buffer.read() == b"\1"

    def _step_now(self, *args: Any, **kwargs: Any) -> Any:
        result = self._original_step(None, *args, **kwargs)
        note_contributors(self._size)
        return result

    def _leaves(self) -> bool:
        return self._change


def _tensors_of(module: Any) -> list[tuple[str, torch.Tensor]]:
    state = module.state_dict()
    return [(name, each) for name, each in state.items() if isinstance(each, torch.Tensor)]


class Skip:
    """What ``DdpHookState(on_loss="skip")`` adds to a state.

    Args:
        optimizer: The optimizer of the model.
        state: What else a new rank receives, or None.
        timeout: The maximum time to wait for a collective of DDP.
    """

    def __init__(self, optimizer: Any, state: State | None, timeout: timedelta) -> None:
        if not hasattr(optimizer, "param_groups"):
            raise ValueError(f"optimizer={optimizer!r}: on_loss='skip' needs a PyTorch optimizer")
        if isinstance(optimizer, Wrapped):
            raise ValueError(
                "this optimizer is already distributed: DDP exchanges the gradients of an ordinary "
                "one"
            )
        check_is_only_one()
        self.losses = Patience()
        self.group = DdpGroup(self.losses, timeout)
        self._given: tuple[Any, State | None] | None = (optimizer, state)

    def check(self, ddp: Any) -> None:
        """Raises InvalidRequest if steps of this model can't be skipped."""
        if ddp.process_group is not self.group:
            raise InvalidRequest(
                "on_loss='skip' needs a model with the process group of the hook's state, whose "
                "ranks may change: DistributedDataParallel(model, "
                "process_group=state.process_group)",
                kind="invalid",
            )
        if self._given is None:
            raise InvalidRequest(
                "the state of a hook with on_loss='skip' is for one model", kind="invalid"
            )
        for option in ("mixed_precision", "_use_python_reducer", "_delay_all_reduce_params"):
            if getattr(ddp, option, None):
                raise InvalidRequest(
                    f"on_loss='skip' can't be used with DDP's {option.strip('_')}: the reducer is "
                    "made anew after a loss",
                    kind="invalid",
                )

    def begin(self, ddp: Any, register: Callable[[], None]) -> None:
        """Makes the optimizer vote. ``register`` registers the hook with a new reducer."""
        _scaler.patch()
        assert self._given is not None, "checked"
        # DDP's C++ code holds this object, so it must not keep a reference to DDP.
        (optimizer, state), self._given = self._given, None
        self.group.begin_epoch()
        steps = wrap(optimizer, DdpSteps)
        steps._renew = lambda: self._renew(ddp, register)
        steps._begin_ddp(ddp, self.losses, state)

    def _renew(self, ddp: Any, register: Callable[[], None]) -> None:
        self.group.begin_epoch()
        if hasattr(ddp, "_remove_autograd_hooks"):
            ddp._remove_autograd_hooks()
        parameters, sparse = ddp._build_params_for_reducer()
        names = ddp._build_debug_param_to_name_mapping(parameters)
        # As DDP does when a model is unpickled.
        ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
        if ddp.static_graph:
            ddp.reducer._set_static_graph()
            # Its first backward pass exchanges all gradients at its end, as for a new model.
            ddp._static_graph_delay_allreduce_enqueued = False
        ddp._has_rebuilt_buckets = False
        ddp._comm_hooks.clear()
        register()
