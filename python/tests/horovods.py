"""Horovod's own tests, from its source package, which the tests fetch."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from launching import LIMIT

# The last release whose source package contains the tests of frameworks.
RELEASE = "0.19.5"
# What these tests need that the package lacks.
VARIABLES = {
    "PYTHONPATH": str(Path(__file__).parent / "horovods_helpers"),
    "PYTHONWARNINGS": "ignore",
}


def tests_in(folder: Path, digests: dict[str, str]) -> Path:
    """Returns the folder of some tests; skips if the package can't be had.

    `digests` has their SHA-256 by their names; `folder` is empty.
    """
    kept = Path(sys.prefix) / f"horovod-{RELEASE}"
    if all((kept / name).exists() for name in digests):
        return kept
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    words += ["--no-deps", "--no-binary", "horovod", "--dest", str(folder), f"horovod=={RELEASE}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode != 0:
        pytest.skip(f"Horovod's source package can't be had: {done.stderr.strip()[-300:]}")
    with tarfile.open(next(folder.glob("*.tar.gz"))) as package:
        for name, digest in digests.items():
            member = package.extractfile(f"horovod-{RELEASE}/test/{name}")
            assert member is not None
            content = member.read()
            assert hashlib.sha256(content).hexdigest() == digest
            kept.mkdir(exist_ok=True)
            (kept / name).write_bytes(content)
    return kept
