"""Finds the programs ``gradwire`` and ``gradwired`` of this installation."""

from __future__ import annotations

import importlib.metadata
import shutil
import sysconfig
from pathlib import Path

from gradwire._errors import NotLaunched


def find(name: str) -> str:
    """Returns the path of a program of this wheel, or of one on the PATH.

    Raises:
        NotLaunched: There is none.
    """
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
