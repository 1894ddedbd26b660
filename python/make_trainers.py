"""Creates .venv-trainers, the virtual environment of `make frameworks`, on top of .venv-python.

It has PyTorch's trainers in the versions that the documentation names. PyTorch itself is that of
.venv-python, whose packages a ``.pth`` file adds, so nothing large is installed twice. A trainer
that can't be installed is named, and its tests are skipped.

    python3 python/make_trainers.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASE, FOLDER = ROOT / ".venv-python", ROOT / ".venv-trainers"
# Each with what it imports. Their own lists of dependencies would install PyTorch again.
COMMON = ["psutil==7.2.2", "tqdm==4.70.1"]
HUB = ["huggingface_hub==2.4.0", "safetensors==0.8.0", "hf-xet==1.8.0", "httpx2==2.16.2"]
HUB += ["httpcore2==2.16.2", "truststore==0.10.5", "anyio==4.16.0", "idna==3.20", "h11==0.16.0"]
CONSOLE = ["typer==0.29.2", "click==8.5.1", "rich==15.0.0", "shellingham==1.5.4"]
TEXTS = ["tokenizers==0.23.3", "regex==2026.11.19"]
METRICS = ["torchmetrics==1.9.0", "lightning-utilities==0.15.3"]
TRAINERS = {
    "accelerate": ["accelerate==1.15.0", *HUB],
    "transformers": ["transformers==5.24.0", *TEXTS, *CONSOLE, *HUB],
    "lightning": ["lightning==2.6.0", "pytorch-lightning==2.6.6", *METRICS],
}


def packages_of(python: Path) -> Path:
    """Returns the folder of an environment's packages."""
    words = [python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"]
    return Path(subprocess.check_output(words, text=True).strip())


def environment(folder: Path) -> Path:
    """Creates an environment on top of .venv-python; returns its Python."""
    if not (BASE / "installed").exists():
        raise SystemExit(f"{folder.name}: .venv-python is missing: run make python-test first")
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    (packages_of(python) / "base.pth").write_text(f"{packages_of(BASE / 'bin' / 'python')}\n")
    for program in ("gradwire", "gradwired"):
        link = folder / "bin" / program
        link.unlink(missing_ok=True)
        link.symlink_to(BASE / "bin" / program)
    return python


def install(python: Path, what: str, packages: list[str]) -> None:
    """Installs a framework, or says that its tests are skipped."""
    words = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*words, "--no-deps", *packages]).returncode != 0:
        print(f"{what} can't be installed: its tests are skipped")
    words = [python, "-m", "compileall", "-q", packages_of(python)]
    subprocess.run(words, stdout=subprocess.DEVNULL)


def main() -> None:
    """Creates the environment, or brings it up to date."""
    python = environment(FOLDER)
    for trainer, packages in TRAINERS.items():
        install(python, trainer, COMMON + packages)


if __name__ == "__main__":
    main()
