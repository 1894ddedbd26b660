"""Finds this installation's programs ``gradwire`` and ``gradwired``."""

from __future__ import annotations

import importlib.metadata
import shutil
import sysconfig
from pathlib import Path

from gradwire._errors import NotLaunched


def find(name: str) -> str:
    """Returns the path of a program from this wheel, or from the PATH.

    Raises:
        NotLaunched: It was not found.
    """
    places = [Path(sysconfig.get_path("scripts")) / name]
    try:
        files = importlib.metadata.files("gradwire") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    # Installations with --target or --user put scripts elsewhere.
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
