"""The settings file that ``GRADWIRE_CONFIG`` names, for a job that is formed without a launcher.

``gradwire run`` and ``gradwire join`` read the file themselves. Elsewhere the daemon and the ranks
know only variables, so the settings of the file become variables of this process.
"""

from __future__ import annotations

import json
import os
import subprocess

from gradwire._errors import InvalidRequest
from gradwire._programs import find

# The variables that were set here, with their values.
_taken: dict[str, str] = {}


def take() -> None:
    """Sets a variable for each setting of the file that the environment does not have already.

    Raises:
        InvalidRequest: The file can't be read, or a setting is wrong.
    """
    for name, value in _taken.items():
        if os.environ.get(name) == value:  # the file may have changed
            del os.environ[name]
    _taken.clear()
    if not os.environ.get("GRADWIRE_CONFIG"):
        return
    done = subprocess.run(
        [find("gradwire"), "config", "show", "--json"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode != 0:
        raise InvalidRequest(done.stderr.strip().removeprefix("error: "), kind="invalid")
    for row in json.loads(done.stdout):
        if row["origin"].startswith("file "):
            _taken[row["variable"]] = row["value"]
    os.environ.update(_taken)
