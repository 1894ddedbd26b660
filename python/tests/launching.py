"""What the tests that start jobs have in common."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# Nothing may hang; no test is about how long anything takes.
LIMIT = 300
LAUNCHER = str(Path(sys.executable).parent / "gradwire")
Job = Callable[..., "subprocess.CompletedProcess[str]"]
