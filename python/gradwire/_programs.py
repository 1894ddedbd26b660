"""Where the programs ``gradwire`` and ``gradwired`` of this installation are."""

from __future__ import annotations

import importlib.metadata
import shutil
import sysconfig
from pathlib import Path

from gradwire._errors import NotLaunched


def find(name: str) -> str:
    """The program of this wheel; where there is none, the one on the PATH."""
    places = [Path(sysconfig.get_path("scripts")) / name]
    try:
        files = importlib.metadata.files("gradwire") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    # An installation with --target or --user puts scripts elsewhere.
    places += [Path(str(file.locate())) for file in files if file.name == name]
    for place in places:
        if place.is_file():
            return str(place.resolve())
    found = shutil.which(name)
    if found is None:
        raise NotLaunched(
            f"the program {name} is not installed: it comes with the wheel (pip install gradwire)",
            kind="not-launched",
        )
    return found
