"""All public functions document their arguments, results and errors.

Ruff checks the form of docstrings, but treats names as private that a public module exports from a
private one. These tests check the names that users see.
"""

from __future__ import annotations

import ast
import builtins
import doctest
import importlib
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import gradwire
from gradwire import _native

MODULES = [
    "gradwire",
    "gradwire.torch",
    "gradwire.torch.byteps",
    "gradwire.torch.byteps.parallel",
    "gradwire.torch.distributed",
    "gradwire.elastic",
    "gradwire.torch.elastic",
    "gradwire.torch.elastic.sampler",
    "gradwire.torch.elastic.state",
    "gradwire.common.exceptions",
    "gradwire.common.process_sets",
    "gradwire.common.util",
]
if importlib.util.find_spec("tensorflow"):
    MODULES += [
        "gradwire.tensorflow",
        "gradwire.tensorflow.byteps",
        "gradwire.tensorflow.compression",
        "gradwire.tensorflow.elastic",
        "gradwire.tensorflow.functions",
        "gradwire.tensorflow.mpi_ops",
        "gradwire.keras",
        "gradwire.keras.callbacks",
        "gradwire.keras.elastic",
    ]
ERRORS = {
    name
    for name, value in vars(gradwire).items()
    if inspect.isclass(value) and issubclass(value, BaseException)
} | {"HostsUpdatedInterrupt"}
# Classes that only this package or PyTorch instantiates.
CREATED = {"Handle", "SparseHandle", "ProcessGroupGradwire", "Distributed"} | ERRORS


def modules() -> list[ModuleType]:
    pytest.importorskip("torch")
    return [importlib.import_module(name) for name in MODULES]


def names(module: ModuleType) -> list[str]:
    own = [
        name
        for name in vars(module)
        if getattr(vars(module)[name], "__module__", "") == module.__name__
    ]
    return list(getattr(module, "__all__", [name for name in own if not name.startswith("_")]))


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Returns the public methods and properties that this package defines on a class."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "gradwire":
            for name, value in vars(base).items():
                inner = getattr(value, "__func__", value)
                if not name.startswith("_") and (callable(inner) or isinstance(value, property)):
                    yield name, inner


def public() -> dict[str, Any]:
    """Returns all public functions, classes and methods, by name."""
    found: dict[str, Any] = {}
    for module in modules():
        for name in names(module):
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                found.setdefault(f"{value.__module__}.{value.__qualname__}", value)
    hvd = importlib.import_module("gradwire.torch")
    optimizer = importlib.import_module("gradwire.torch._stepping").Distributed
    compressors = (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16)
    for kind in (
        optimizer,
        *compressors,
        importlib.import_module("gradwire.torch._sparse").SparseHandle,
    ):
        found[f"{kind.__module__}.{kind.__qualname__}"] = kind
    for name, kind in list(found.items()):
        if inspect.isclass(kind):
            for member, value in members(kind):
                found[f"{name}.{member}"] = value
    return found


def section(doc: str, title: str) -> str:
    match = re.search(rf"^{title}:\n((?:    .*\n|\n)*)", doc + "\n", re.MULTILINE)
    return match.group(1) if match else ""


def entries(doc: str, title: str) -> list[str]:
    return re.findall(r"^    (\*{0,2}\w+):", section(doc, title), re.MULTILINE)


def parameters(value: Any) -> list[str]:
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    every = list(inspect.signature(value).parameters.values())
    return [marks.get(each.kind, "") + each.name for each in every if each.name != "self"]


def complaints(name: str, value: Any) -> list[str]:
    if isinstance(value, property):
        return [] if value.__doc__ else [f"{name}: no docstring"]
    doc = inspect.cleandoc(value.__doc__ or "") if inspect.isclass(value) else inspect.getdoc(value)
    if not doc:
        return [f"{name}: no docstring"]
    if inspect.isclass(value):
        if value.__name__ in CREATED or "__init__" not in vars(value):
            return []
        expected = parameters(value.__init__)
    else:
        expected = parameters(value)
    found = []
    if entries(doc, "Args") != expected:
        found.append(f"{name}: documents {entries(doc, 'Args')} and takes {expected}")
    returns = "" if inspect.isclass(value) else inspect.signature(value).return_annotation
    if (returns not in ("None", "NoReturn", None, "")) and not re.search(
        "^(Returns|Yields):", doc, re.M
    ):
        found.append(f"{name}: no section on the result, {returns}")
    unknown = [
        error
        for error in entries(doc, "Raises")
        if error not in ERRORS and not hasattr(builtins, error)
    ]
    return found + [f"{name}: raises {error}, which is not an error" for error in unknown]


def test_everything_public_is_documented() -> None:
    every = public()
    assert len(every) > 150, sorted(every)
    found = [text for name, value in every.items() for text in complaints(name, value)]
    assert not found, "\n".join(found)


def test_errors_are_documented() -> None:
    silent = ("_built", "_enabled", "_supported", "poll", "is_initialized")
    silent += ("gradient_bytes_copied", "contributors")
    for module in modules()[:2]:
        for name in names(module):
            value = getattr(module, name)
            if inspect.isfunction(value) and not name.endswith(silent):
                assert entries(inspect.getdoc(value) or "", "Raises"), name


def test_the_native_module_is_documented() -> None:
    found = []
    for kind in (_native.Buffer, _native.Handle, _native.ProcessSet, _native.Session):
        assert kind.__doc__, kind
        for name, value in vars(kind).items():
            signature = getattr(value, "__text_signature__", None)
            if name.startswith("_") and not name.startswith("__dlpack"):
                continue
            doc = inspect.cleandoc(value.__doc__ or "")
            if not doc:
                found.append(f"{kind.__name__}.{name}: no docstring")
            elif signature and (expected := parameters(getattr(kind, name))) != entries(
                doc, "Args"
            ):
                found.append(
                    f"{kind.__name__}.{name}: {entries(doc, 'Args')} instead of {expected}"
                )
    assert not found, "\n".join(found)


def test_examples_are_python() -> None:
    count = 0
    texts = {name: inspect.getdoc(value) or "" for name, value in public().items()}
    texts |= {module.__name__: inspect.getdoc(module) or "" for module in modules()}
    for name, text in texts.items():
        assert text.count("```") % 2 == 0, name
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            ast.parse(textwrap.dedent(block), name)
            count += 1
    assert count > 20


def test_doctests_pass() -> None:
    pytest.importorskip("torch")
    launch = importlib.import_module("gradwire.torch.distributed._launch")
    ran = 0
    for module in (importlib.import_module("gradwire._ops"), launch):
        done = doctest.testmod(module)
        assert done.failed == 0, module
        ran += done.attempted
    assert ran >= 3
