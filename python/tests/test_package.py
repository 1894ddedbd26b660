"""The wheel is typed, complete, and usable without NumPy and PyTorch."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import gradwire


def test_versions_agree() -> None:
    assert importlib.metadata.version("gradwire") == gradwire.__version__
    for program in ("gradwire", "gradwired"):
        words = [str(Path(sys.executable).parent / program), "--version"]
        said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        assert said.stdout.split() == [program, gradwire.__version__]


def test_it_is_typed_and_the_stubs_match() -> None:
    folder = Path(gradwire.__file__).parent
    assert (folder / "py.typed").exists()
    pytest.importorskip("mypy")
    config = Path(__file__).parent.parent / "pyproject.toml"
    words = [sys.executable, "-m", "mypy.stubtest", "gradwire._native"]
    words += ["--mypy-config-file", str(config)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_name_numbers_repeat() -> None:
    from gradwire._names import NAMES, repeating_number

    assert [repeating_number(count) for count in (1, 2, NAMES, NAMES + 1, 2 * NAMES)] == [
        1,
        2,
        NAMES,
        1,
        NAMES,
    ]


def test_import_needs_no_other_package() -> None:
    text = """
import sys
sys.modules["numpy"] = sys.modules["torch"] = sys.modules["cloudpickle"] = None
import gradwire
gradwire.init()
print(gradwire.size(), gradwire.broadcast_object({"a": 1}), gradwire.allgather_object("b"))
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "1 {'a': 1} ['b']", done.stdout + done.stderr


# Lines of scripts that use Horovod, with the module renamed.
IMPORTS = """
import gradwire.torch as hvd
from gradwire.torch import DistributedOptimizer, broadcast_parameters
from gradwire.torch.mpi_ops import allreduce_async_, grouped_allreduce_async_, synchronize
from gradwire.torch.mpi_ops import Adasum, Average, Sum, init, local_rank, poll, rank, size
from gradwire.torch.mpi_ops import mpi_threads_supported, nccl_built, rocm_built
from gradwire.torch.mpi_ops import ProcessSet, global_process_set
from gradwire.torch.compression import Compression, FP16Compressor, NoneCompressor
from gradwire.torch.functions import allgather_object, broadcast_object
from gradwire.torch.functions import broadcast_optimizer_state, broadcast_parameters
from gradwire.torch.optimizer import DistributedOptimizer
from gradwire.torch.sync_batch_norm import SyncBatchNorm
from gradwire.torch.elastic import TorchState, run
from gradwire.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry
from gradwire.torch.elastic.sampler import ElasticSampler
from gradwire.common.elastic import ObjectState, State, run_fn
from gradwire.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from gradwire.common.process_sets import ProcessSet, global_process_set
from gradwire.common.util import check_extension, gloo_built, mpi_built, nccl_built, split_list
"""


def test_horovods_imports() -> None:
    hvd = pytest.importorskip("gradwire.torch")
    for line in IMPORTS.strip().splitlines():
        scope: dict[str, object] = {}
        exec(line, scope)
        for name, value in scope.items():
            if hasattr(hvd, name) and not name.startswith("__") and name != "run":
                same = getattr(hvd, name)
                assert value is same or name.endswith("_built"), line
    assert hvd.mpi_ops.allreduce is hvd.allreduce and hvd.compression.Compression.none
    from gradwire.common import exceptions, util

    util.check_extension("gradwire.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    util.check_extension("gradwire.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__, "mpi_lib")
    with pytest.raises(ImportError, match="'mxnet'"):
        util.check_extension("mxnet")
    assert util.split_list(list(range(5)), 3) == [[0, 1], [2, 3], [4]]
    assert [util.num_rank_is_power_2(number) for number in range(5)] == [0, 1, 1, 0, 1]
    with util.env(GRADWIRE_TEST_ONE="1", PATH=None):
        assert os.environ["GRADWIRE_TEST_ONE"] == "1" and "PATH" not in os.environ
    assert "GRADWIRE_TEST_ONE" not in os.environ and "PATH" in os.environ
    assert util.extension_available("torch") and not util.extension_available("mxnet")
    assert not util.mpi_built(verbose=True)
    assert util.is_iterable([]) and not util.is_iterable(3)
    assert exceptions.HorovodInternalError is hvd.HorovodInternalError
    assert exceptions.HostsUpdatedInterrupt is hvd.elastic.HostsUpdatedInterrupt


def test_import_gradwire_imports_torch_when_used() -> None:
    pytest.importorskip("torch")
    text = """
import sys
import gradwire
assert "torch" not in sys.modules and not hasattr(gradwire, "tensorflow")
assert gradwire.elastic.run and "torch" not in sys.modules
assert gradwire.torch.DistributedOptimizer and "torch" in sys.modules
assert gradwire.common.util.split_list
print("END")
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "END", done.stdout + done.stderr
    missing = "import sys; sys.modules['torch'] = None; import gradwire; gradwire.torch"
    done = subprocess.run(
        [sys.executable, "-c", missing], capture_output=True, text=True, timeout=120
    )
    assert "AttributeError: gradwire.torch can't be imported" in done.stderr, done.stderr


# The signatures in Horovod's documentation, which scripts may use.
_REDUCE = "op prescale_factor postscale_factor process_set"
_SCATTER = "op process_set prescale_factor postscale_factor"
SIGNATURES = {
    "init": "comm process_sets",
    "allreduce": f"tensor average name compression {_REDUCE}",
    "allreduce_": f"tensor average name {_REDUCE}",
    "allreduce_async": f"tensor average name {_REDUCE}",
    "allreduce_async_": f"tensor average name {_REDUCE}",
    "grouped_allreduce": f"tensors average name compression {_REDUCE}",
    "grouped_allreduce_async_": f"tensors average name {_REDUCE}",
    "grouped_allreduce_async": f"tensors average name {_REDUCE}",
    "grouped_allreduce_": f"tensors average name {_REDUCE}",
    "grouped_allgather_async": "tensors name process_set",
    "broadcast_": "tensor root_rank name process_set",
    "broadcast_async": "tensor root_rank name process_set",
    "alltoall_async": "tensor splits name process_set",
    "reducescatter_async": f"tensor name {_SCATTER}",
    "grouped_reducescatter": f"tensors name compression {_SCATTER}",
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather": "tensor name process_set",
    "allgather_async": "tensor name process_set",
    "grouped_allgather": "tensors name process_set",
    "broadcast": "tensor root_rank name process_set",
    "broadcast_async_": "tensor root_rank name process_set",
    "alltoall": "tensor splits name process_set",
    "reducescatter": f"tensor name compression {_SCATTER}",
    "grouped_reducescatter_async": f"tensors name {_SCATTER}",
    "poll": "handle",
    "synchronize": "handle",
    "join": "device process_set",
    "barrier": "process_set",
    "broadcast_parameters": "params root_rank process_set",
    "broadcast_optimizer_state": "optimizer root_rank model process_set",
    "broadcast_object": "obj root_rank name process_set",
    "allgather_object": "obj name process_set",
    "DistributedOptimizer": "optimizer named_parameters compression backward_passes_per_step op "
    "gradient_predivide_factor num_groups groups sparse_as_dense process_set on_loss state",
    "SyncBatchNorm": "num_features eps momentum affine track_running_stats process_set",
}


def test_horovods_interface() -> None:
    hvd = pytest.importorskip("gradwire.torch")
    for name, parameters in SIGNATURES.items():
        assert list(inspect.signature(getattr(hvd, name)).parameters) == parameters.split(), name
    assert (int(hvd.Average), int(hvd.Sum), int(hvd.Adasum)) == (0, 1, 2)
    assert (int(hvd.Min), int(hvd.Max), int(hvd.Product)) == (3, 4, 5)
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert issubclass(hvd.PeerLost, hvd.HorovodInternalError)
    assert hvd.nccl_built() == 0 and not hvd.mpi_threads_supported()
    for call in (lambda: hvd.start_timeline("x"), hvd.stop_timeline):
        with pytest.raises(hvd.NotInitialized):
            call()


def arguments(name: str, tensor: Any) -> tuple[Any, ...]:
    """Returns valid arguments for a public function."""
    if name.startswith("grouped_"):
        return ([tensor],)
    if name in ("broadcast_parameters", "broadcast_optimizer_state", "DistributedOptimizer"):
        import torch

        parameters = [torch.nn.Parameter(tensor)]
        given = parameters if name == "broadcast_parameters" else torch.optim.SGD(parameters, 0.1)
        return (given,) if name == "DistributedOptimizer" else (given, 0)
    if name == "ddp_hook":
        lists = {"parameters": list, "gradients": list}
        return None, SimpleNamespace(buffer=lambda: tensor, index=lambda: 0, **lists)
    rooted = ("broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "reduce", "gather")
    if name in (*rooted, "scatter", "send", "receive"):
        return (tensor, 0)
    if name in ("allgather", "allreduce", "alltoall", "reducescatter") or name.endswith(
        ("_async", "_")
    ):
        return (tensor.to_sparse() if name.startswith("sparse_") else tensor,)
    others = {
        "abort": "why",
        "add_process_set": [0],
        "allgather_object": 1,
        "broadcast_object": 1,
        "empty": 1,
        "start_timeline": "x",
    }
    return (others[name],) if name in others else ()


# Before init(), there is no handle and no registered process set.
NEED_MORE = {"remove_process_set", "synchronize"}


def refuse_to_work(module: ModuleType, tensor: Any) -> None:
    assert not module.is_initialized()
    for name in set(module.__all__) - NEED_MORE:
        function = getattr(module, name)
        if inspect.isfunction(function) and "NotInitialized: " in (function.__doc__ or ""):
            with pytest.raises(gradwire.NotInitialized, match=r"call init\(\) first"):
                function(*arguments(name, tensor))
                pytest.fail(f"{name} needs no init()")


def test_functions_before_init() -> None:
    refuse_to_work(gradwire, pytest.importorskip("numpy").ones(1, "float32"))


def test_functions_before_init_in_pytorch() -> None:
    torch = pytest.importorskip("torch")
    refuse_to_work(pytest.importorskip("gradwire.torch"), torch.ones(1))
