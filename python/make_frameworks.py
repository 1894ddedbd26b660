"""Creates the virtual environments of `make frameworks`, on top of .venv-python.

.venv-trainers has PyTorch's trainers, .venv-tensorflow has TensorFlow with Keras, and .venv-jax has
JAX with optax and Keras, in the versions that the documentation names. PyTorch itself is that of
.venv-python, whose packages a ``.pth`` file adds, so nothing large is installed twice. What can't
be installed is named, and its tests are skipped. ``--oldest`` makes .venv-tensorflow-oldest and
.venv-jax-oldest instead, with the oldest versions that are supported.

    python3 python/make_frameworks.py [--oldest]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / ".venv-python"
# Each with what it imports. Their own lists of dependencies would install PyTorch again.
COMMON = ["psutil==7.2.2", "tqdm==4.70.1"]
HUB = ["huggingface_hub==2.4.0", "safetensors==0.8.0", "hf-xet==1.8.0", "httpx2==2.16.2"]
HUB += ["httpcore2==2.16.2", "truststore==0.10.5", "anyio==4.16.0", "idna==3.20", "h11==0.16.0"]
CONSOLE = ["typer==0.29.2", "click==8.5.1", "rich==15.0.0", "shellingham==1.5.4"]
TEXTS = ["tokenizers==0.23.3", "regex==2026.11.19"]
METRICS = ["torchmetrics==1.9.0", "lightning-utilities==0.15.3"]
DEEPSPEED = ["einops==0.8.2", "hjson==3.1.0", "msgpack==1.2.4", "ninja==1.13.2"]
DEEPSPEED += ["py-cpuinfo==9.0.0", "pydantic==2.14.4", "pydantic-core==2.50.5"]
DEEPSPEED += ["annotated-types==0.8.0", "typing-inspection==0.4.5"]
RAY = ["ray==2.60.0", "click==8.5.1", "msgpack==1.2.4", "pydantic==2.14.4", "pandas==3.1.1"]
RAY += ["pydantic-core==2.50.5", "annotated-types==0.8.0", "typing-inspection==0.4.5"]
RAY += ["pyarrow==26.0.1", "protobuf==7.36.2", "requests==2.34.2", "urllib3==2.8.0"]
RAY += ["certifi==2026.10.19.post1", "charset-normalizer==3.5.3", "idna==3.20"]
RAY += ["tensorboardX==2.6.5"]
TRAINERS = {
    "accelerate": ["accelerate==1.15.0", *HUB],
    "transformers": ["transformers==5.24.0", *TEXTS, *CONSOLE, *HUB],
    "deepspeed": ["deepspeed==0.19.8", *DEEPSPEED],
    "ray": RAY,
    "lightning": ["lightning==2.6.0", "pytorch-lightning==2.6.6", *METRICS],
}
TENSORFLOW = {"tensorflow": ["tensorflow-cpu==2.21.0", "keras==3.15.1"]}
XLA = ["jaxlib==0.10.2", "ml_dtypes==0.6.0", "opt_einsum==3.4.0", "scipy==1.17.1"]
KERAS = ["keras==3.15.1", "absl-py==2.5.1", "h5py==3.14.0", "namex==0.1.0", "optree==0.20.0"]
KERAS += ["rich==15.0.0", "markdown-it-py==4.3.0", "mdurl==0.1.2"]
OPTAX = ["optax==0.2.8", "absl-py==2.5.1"]
JAX = {"jax": ["jax==0.10.2", *XLA], "optax": OPTAX, "keras": KERAS}
OLDEST_TENSORFLOW = {"tensorflow": ["tensorflow-cpu==2.16.2", "keras==3.10.0"]}
OLDEST_JAX = {"jax": ["jax==0.10.0", "jaxlib==0.10.0", *XLA[1:]], "optax": OPTAX, "keras": KERAS}


def packages_of(python: Path) -> Path:
    """Returns the folder of an environment's packages."""
    words = [python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"]
    return Path(subprocess.check_output(words, text=True).strip())


def create(folder: Path, frameworks: dict[str, list[str]], *options: str) -> None:
    """Creates an environment, or brings it up to date.

    Args:
        folder: Its folder.
        frameworks: The packages of each framework.
        options: Options for pip.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    site = packages_of(python)
    (site / "base.pth").write_text(f"{packages_of(BASE / 'bin' / 'python')}\n")
    for program in ("gradwire", "gradwired"):
        link = folder / "bin" / program
        link.unlink(missing_ok=True)
        link.symlink_to(BASE / "bin" / program)
    for framework, packages in frameworks.items():
        words = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*words, *options, *packages])
        if done.returncode != 0:
            print(f"make_frameworks.py: {framework} can't be installed: its tests are skipped")
    subprocess.run([python, "-m", "compileall", "-q", site], stdout=subprocess.DEVNULL)


def main() -> None:
    """Creates the environments."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--oldest", action="store_true", help="the oldest supported versions")
    oldest = parser.parse_args().oldest
    if not (BASE / "installed").exists():
        raise SystemExit(
            "make_frameworks.py: .venv-python is missing: run python/make_venv.py first"
        )
    if oldest:
        create(ROOT / ".venv-tensorflow-oldest", OLDEST_TENSORFLOW)
        create(ROOT / ".venv-jax-oldest", OLDEST_JAX, "--no-deps")
        return
    trainers = {name: [*COMMON, *packages] for name, packages in TRAINERS.items()}
    create(ROOT / ".venv-trainers", trainers, "--no-deps")
    create(ROOT / ".venv-tensorflow", TENSORFLOW)
    create(ROOT / ".venv-jax", JAX, "--no-deps")


if __name__ == "__main__":
    main()
