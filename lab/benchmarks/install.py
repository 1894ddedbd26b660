"""Installs the peers with their package managers, and builds the programs that run them.

PyTorch (with Gloo), Horovod, Intel MPI and oneCCL come from PyPI into `.venv-bench`, Open MPI and
iperf3 from apt. Peers that can't be installed are reported and left out. One peer is enough.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from shell import Trouble, call, say

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
VENV = ROOT / ".venv-bench"
PYTHON = VENV / "bin" / "python"
BUILT = ROOT / "target" / "bench"
MINUTES = 60.0


@dataclass
class Tools:
    """The programs that can be measured, and the reasons why others can't."""

    gradwire: Path
    programs: dict[str, Path] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def has(self, peer: str) -> bool:
        """Whether a peer can be measured."""
        return peer in self.versions


def prepare(every: bool) -> Tools:
    """Installs and builds everything; with `every`, also peers that take long to install or to
    measure."""
    tools = Tools(gradwire=_gradwire())
    _virtual_environment()
    attempts = [("gloo", _gloo), ("openmpi", _open_mpi), ("iperf3", _iperf)]
    if every:
        attempts += [("gradwire-python", _gradwire_python)]
        attempts += [("intelmpi", _intel_mpi), ("oneccl", _oneccl), ("horovod", _horovod)]
    for name, attempt in attempts:
        try:
            tools.versions[name] = attempt(tools)
        except Trouble as trouble:
            tools.missing[name] = str(trouble)
            say(f"{name} is left out: {trouble}")
    tools.versions["gradwire"] = (
        call([tools.gradwire, "--version"]).strip().removeprefix("gradwire ")
    )
    return tools


def plot_library() -> None:
    """Installs the library that draws the plot."""
    _pip("matplotlib", "matplotlib")


def _gradwire() -> Path:
    say("building Gradwire")
    crates = ("gradwire-cli", "gradwire-daemon", "gradwire-lab")
    words = ["build", "--release", *(word for crate in crates for word in ("-p", crate))]
    call([os.environ.get("CARGO", "cargo"), *words], 60 * MINUTES, cwd=ROOT)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    return target / "release" / "gradwire"


def _gradwire_python(tools: Tools) -> str:
    if not tools.has("gloo"):
        raise Trouble("PyTorch is missing")
    say("building Gradwire's Python package")
    call(["make", "wheel"], 60 * MINUTES, cwd=ROOT)
    wheels = [str(wheel) for wheel in (ROOT / "python" / "dist").glob("gradwire-*.whl")]
    words = ["install", "--quiet", "--force-reinstall", "--no-deps", *wheels]
    call([PYTHON, "-m", "pip", *words], 10 * MINUTES)
    tools.programs["gradwire-python"] = HERE / "gradwire_rank.py"
    return _installed("gradwire")


def _virtual_environment() -> None:
    # An incomplete one has no pip.
    words = [PYTHON, "-m", "pip", "--version"]
    if not PYTHON.exists() or subprocess.run(words, capture_output=True).returncode != 0:
        say(f"making {VENV.relative_to(ROOT)}")
        call([sys.executable, "-m", "venv", "--clear", VENV], 10 * MINUTES)


def _pip(module: str, *packages: str) -> None:
    """Installs packages unless `module` can be imported already."""
    if subprocess.run([PYTHON, "-c", f"import {module}"], capture_output=True).returncode == 0:
        return
    say(f"installing {', '.join(packages)} with pip")
    call([PYTHON, "-m", "pip", "install", "--quiet", *packages], 20 * MINUTES)


def _installed(package: str) -> str:
    script = f"from importlib.metadata import version; print(version('{package}'))"
    return call([PYTHON, "-c", script]).strip()


def _has(package: str) -> bool:
    try:
        return bool(_installed(package))
    except Trouble:
        return False


def _gloo(tools: Tools) -> str:
    # Its wheel is linked against all of its CUDA libraries, so they are all needed.
    _pip("torch, numpy", "torch", "numpy")
    version = call([PYTHON, "-c", "import torch; print(torch.__version__)"]).strip()
    tools.programs["gloo"] = HERE / "gloo_rank.py"
    return f"of PyTorch {version}"


def _apt(program: str, *packages: str, header: str = "") -> None:
    """Installs packages, unless this program and this header are there."""
    if shutil.which(program) and (not header or any(Path("/usr").glob(header))):
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise Trouble(f"{program} is not installed; install {' '.join(packages)}")
    say(f"installing {', '.join(packages)} with apt")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    words = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    try:
        call(words, 10 * MINUTES, env=quiet)
    except Trouble:
        call(["apt-get", "update"], 10 * MINUTES, env=quiet)
        call(words, 10 * MINUTES, env=quiet)


def _open_mpi(tools: Tools) -> str:
    packages = ("openmpi-bin", "libopenmpi-dev", "gcc", "libc6-dev")
    # The compiler is in another package than its headers.
    _apt("mpicc.openmpi", *packages, header="lib/*/openmpi/include/mpi.h")
    tools.programs["openmpi"] = _compile("mpi_allreduce.c", "mpi-openmpi", ["mpicc.openmpi"])
    return call(["mpirun.openmpi", "--version"]).splitlines()[0].split()[-1]


def _iperf(tools: Tools) -> str:
    _apt("iperf3", "iperf3")
    return call(["iperf3", "--version"]).split()[1]


def _intel_mpi(tools: Tools) -> str:
    if not _has("impi-devel"):
        say("installing impi-rt, impi-devel with pip")
        call([PYTHON, "-m", "pip", "install", "--quiet", "impi-rt", "impi-devel"], 20 * MINUTES)
    compiler = [str(VENV / "bin" / "mpicc")]
    tools.programs["intelmpi"] = _compile("mpi_allreduce.c", "mpi-intel", compiler)
    return _installed("impi-rt")


def _oneccl(tools: Tools) -> str:
    if not tools.has("intelmpi"):
        raise Trouble("Intel MPI, which starts its ranks, is missing")
    if not _has("oneccl-devel"):
        say("installing oneccl, oneccl-devel with pip")
        call([PYTHON, "-m", "pip", "install", "--quiet", "oneccl", "oneccl-devel"], 20 * MINUTES)
    library = VENV / "lib"
    # The C++ interface is in libccl.so.1; the plain name is that of the newer C interface.
    link = [f"-I{VENV}/include", f"-L{library}", f"-Wl,-rpath-link,{library}"]
    libraries = ["-l:libccl.so.1", "-l:libccl.so.2", "-lmpi"]
    tools.programs["oneccl"] = _compile(
        "ccl_allreduce.cpp", "ccl", ["c++", "-std=c++17", *link], libraries
    )
    return _installed("oneccl")


# Horovod's newest release sets C++14 or 17 in its own flags. The headers of current PyTorch need
# C++20.
NEWER = '#!/bin/sh\nexec c++ "$@" -std=gnu++20\n'


def _horovod(tools: Tools) -> str:
    if not _has("horovod"):
        say("building Horovod with pip, which takes a while")
        # Its setup.py needs an old setuptools with pkg_resources, and torch in the same place.
        build = [
            "cmake<4",
            "setuptools<80",
            "wheel",
            "packaging",
            "cloudpickle",
            "psutil",
            "pyyaml",
            "cffi",
        ]
        call([PYTHON, "-m", "pip", "install", "--quiet", *build], 10 * MINUTES)
        BUILT.mkdir(parents=True, exist_ok=True)
        compiler = BUILT / "c++20"
        compiler.write_text(NEWER)
        compiler.chmod(0o755)
        chosen = {"WITH_GLOO": "1", "WITH_PYTORCH": "1", "CPU_OPERATIONS": "GLOO"}
        chosen |= {f"WITHOUT_{name}": "1" for name in ("MPI", "TENSORFLOW", "MXNET")}
        environment = {
            **os.environ,
            **{f"HOROVOD_{name}": value for name, value in chosen.items()},
            "PATH": f"{VENV / 'bin'}:{os.environ.get('PATH', '')}",
            "CXX": str(compiler),
            "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        }
        words = ["install", "--quiet", "--no-build-isolation", "--no-deps", "horovod==0.28.1"]
        call([PYTHON, "-m", "pip", *words], 60 * MINUTES, env=environment)
    call([PYTHON, "-c", "import horovod.torch"], 2 * MINUTES)
    tools.programs["horovod"] = HERE / "horovod_rank.py"
    return _installed("horovod")


def _compile(
    source: str, name: str, compiler: list[str], libraries: list[str] | None = None
) -> Path:
    BUILT.mkdir(parents=True, exist_ok=True)
    out = BUILT / name
    words = [
        *compiler,
        "-O3",
        "-march=native",
        "-o",
        str(out),
        str(HERE / source),
        *(libraries or []),
    ]
    call(words, 5 * MINUTES, env={**os.environ, "I_MPI_ROOT": str(VENV)})
    return out
