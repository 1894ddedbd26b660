"""What the wheel is: typed, complete, and of use without NumPy and PyTorch."""

from __future__ import annotations

import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire


def test_versions_agree() -> None:
    assert importlib.metadata.version("gradwire") == gradwire.__version__
    for program in ("gradwire", "gradwired"):
        words = [str(Path(sys.executable).parent / program), "--version"]
        said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        assert said.stdout.split() == [program, gradwire.__version__]


def test_it_is_typed_and_the_stubs_are_the_modules() -> None:
    folder = Path(gradwire.__file__).parent
    assert (folder / "py.typed").exists()
    pytest.importorskip("mypy")
    config = Path(__file__).parent.parent / "pyproject.toml"
    words = [sys.executable, "-m", "mypy.stubtest", "gradwire._native"]
    words += ["--mypy-config-file", str(config)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_numbers_of_names_come_again() -> None:
    from gradwire._names import NAMES, again

    assert [again(count) for count in (1, 2, NAMES, NAMES + 1, 2 * NAMES)] == [1, 2, NAMES, 1, NAMES]


def test_nothing_else_is_needed_to_import_it() -> None:
    text = """
import sys
sys.modules["numpy"] = sys.modules["torch"] = sys.modules["cloudpickle"] = None
import gradwire
gradwire.init()
print(gradwire.size(), gradwire.broadcast_object({"a": 1}), gradwire.allgather_object("b"))
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "1 {'a': 1} ['b']", done.stdout + done.stderr


# Horovod's calls as its documentation has them: what a script may write must be understood.
SIGNATURES = {
    "init": "comm process_sets",
    "allreduce": "tensor average name compression op prescale_factor postscale_factor process_set",
    "allreduce_": "tensor average name op prescale_factor postscale_factor process_set",
    "allreduce_async": "tensor average name op prescale_factor postscale_factor process_set",
    "allreduce_async_": "tensor average name op prescale_factor postscale_factor process_set",
    "grouped_allreduce": "tensors average name compression op prescale_factor postscale_factor process_set",
    "grouped_allreduce_async_": "tensors average name op prescale_factor postscale_factor process_set",
    "grouped_allreduce_async": "tensors average name op prescale_factor postscale_factor process_set",
    "grouped_allreduce_": "tensors average name op prescale_factor postscale_factor process_set",
    "grouped_allgather_async": "tensors name process_set",
    "broadcast_": "tensor root_rank name process_set",
    "broadcast_async": "tensor root_rank name process_set",
    "alltoall_async": "tensor splits name process_set",
    "reducescatter_async": "tensor name op process_set prescale_factor postscale_factor",
    "grouped_reducescatter": "tensors name compression op process_set prescale_factor postscale_factor",
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather": "tensor name process_set",
    "allgather_async": "tensor name process_set",
    "grouped_allgather": "tensors name process_set",
    "broadcast": "tensor root_rank name process_set",
    "broadcast_async_": "tensor root_rank name process_set",
    "alltoall": "tensor splits name process_set",
    "reducescatter": "tensor name compression op process_set prescale_factor postscale_factor",
    "grouped_reducescatter_async": "tensors name op process_set prescale_factor postscale_factor",
    "poll": "handle",
    "synchronize": "handle",
    "join": "device process_set",
    "barrier": "process_set",
    "broadcast_parameters": "params root_rank process_set",
    "broadcast_optimizer_state": "optimizer root_rank model process_set",
    "broadcast_object": "obj root_rank name process_set",
    "allgather_object": "obj name process_set",
    "DistributedOptimizer": "optimizer named_parameters compression backward_passes_per_step op "
    "gradient_predivide_factor num_groups groups sparse_as_dense process_set",
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
    for call in (lambda: hvd.start_timeline("x"), hvd.stop_timeline, lambda: hvd.elastic.run(print)):
        with pytest.raises(NotImplementedError, match="gradwire has no"):
            call()
    for name in ("TorchState", "ObjectState", "ElasticSampler"):
        with pytest.raises(NotImplementedError, match=name):
            getattr(hvd.elastic, name)()
