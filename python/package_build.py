"""Builds the Python package from source, for pip: the two programs first, then the native module.

pip calls these functions (PEP 517), for a checkout and for an sdist. maturin does the rest; it
knows nothing of the programs, so they are built here and put where it takes a wheel's scripts from.
What a system lacks is said in one sentence, before anything is compiled.

    pip install .                                    # optimized: minutes
    pip install . --config-settings profile=dev      # as the tests are built
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import maturin

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "python" / "gradwire.data" / "scripts"
PROGRAMS = {"gradwire": "gradwire-cli", "gradwired": "gradwire-daemon"}
# What pip passes with --config-settings.
Settings = Mapping[str, Any] | None


def version_of(text: str) -> tuple[int, ...]:
    """The first version in a text, as numbers; empty if there is none."""
    found = re.search(r"\d+(?:\.\d+)+", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def refusal(system: str, compiler: str, linker: str | None, wanted: str) -> str | None:
    """What this system lacks, in one sentence, or None.

    Args:
        system: Its name, as ``platform.system()`` returns it.
        compiler: What ``rustc --version`` prints; empty if there is no Rust.
        linker: The path of the C compiler, which links.
        wanted: The oldest version of Rust that builds Gradwire.
    """
    if system != "Linux":
        return f"Gradwire needs Linux, but this system is {system or 'unknown'}"
    if not compiler:
        return (
            f"building Gradwire from source needs Rust {wanted} or newer with cargo, and neither "
            "is in PATH; wheels for Linux with glibc 2.28 or newer need no compiler"
        )
    if version_of(compiler) < version_of(wanted):
        found = compiler.strip()
        return f"building Gradwire from source needs Rust {wanted} or newer, but this is {found}"
    if linker is None:
        return "building Gradwire from source needs a C compiler, and no cc is in PATH"
    return None


def check() -> None:
    """Ends with one sentence if Gradwire can't be built here."""
    manifest = (ROOT / "Cargo.toml").read_text(encoding="utf-8")
    wanted = re.search(r'^rust-version = "(.+)"$', manifest, re.MULTILINE)
    assert wanted, "Cargo.toml names the oldest Rust"
    compiler = ""
    if shutil.which("cargo") and shutil.which("rustc"):
        said = subprocess.run(["rustc", "--version"], cwd=ROOT, capture_output=True, text=True)
        compiler = said.stdout
    lacking = refusal(platform.system(), compiler, shutil.which("cc"), wanted[1])
    if lacking:
        sys.exit(lacking)


def profile_of(settings: Settings) -> str:
    """The profile of Cargo that the user asks for."""
    return str((settings or {}).get("profile", "release"))


def build_programs(profile: str) -> None:
    """Builds gradwire and gradwired, and copies them to where maturin finds a wheel's scripts."""
    command = ["cargo", "build", "--locked", "--profile", profile]
    for package in PROGRAMS.values():
        command += ["--package", package]
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        sys.exit(f"the programs of Gradwire could not be built: {' '.join(command)}")
    ask = ["cargo", "metadata", "--no-deps", "--format-version", "1"]
    said = subprocess.run(ask, cwd=ROOT, check=True, capture_output=True).stdout
    folder = Path(json.loads(said)["target_directory"]) / {"dev": "debug"}.get(profile, profile)
    shutil.rmtree(SCRIPTS, ignore_errors=True)
    SCRIPTS.mkdir(parents=True)
    strip = shutil.which("strip")
    for name in PROGRAMS:
        if strip:
            subprocess.run([strip, "-o", SCRIPTS / name, folder / name], check=True)
        else:
            shutil.copy2(folder / name, SCRIPTS / name)


def prepared(settings: Settings) -> dict[str, Any]:
    """Builds the programs, and returns what to ask of maturin for the rest."""
    check()
    profile = profile_of(settings)
    build_programs(profile)
    return {"build-args": ["--locked", "--strip", "--profile", profile]}


def get_requires_for_build_wheel(settings: Settings = None) -> list[str]:
    """Returns what pip must install first: nothing more. maturin would fetch Rust."""
    check()
    return []


get_requires_for_build_editable = get_requires_for_build_wheel


def get_requires_for_build_sdist(settings: Settings = None) -> list[str]:
    """Returns what pip must install before it makes an sdist: nothing more."""
    return []


def prepare_metadata_for_build_wheel(folder: str, settings: Settings = None) -> str:
    """Writes the metadata of the package."""
    check()
    SCRIPTS.mkdir(parents=True, exist_ok=True)
    return maturin.prepare_metadata_for_build_wheel(folder, None)


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_wheel(folder: str, settings: Settings = None, metadata: str | None = None) -> str:
    """Builds a wheel with both programs."""
    return maturin.build_wheel(folder, prepared(settings), metadata)


def build_editable(folder: str, settings: Settings = None, metadata: str | None = None) -> str:
    """Builds a wheel that refers to this checkout."""
    return maturin.build_editable(folder, prepared(settings), metadata)


def build_sdist(folder: str, settings: Settings = None) -> str:
    """Packs the files that are in git."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        sys.exit("an sdist is made of the files in git: run this in a checkout, with git installed")
    os.makedirs(SCRIPTS, exist_ok=True)
    return maturin.build_sdist(folder, settings)
