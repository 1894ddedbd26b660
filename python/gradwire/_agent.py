"""What a rank says to the agent of ``gradwire run`` on its host, through its standard error.

The agent takes these lines out of the output. The texts are those of proto/services/src/launch.rs.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

_STDERR = "GRADWIRE_STDERR"
_LAST_WORDS, _LAST_WORDS_END = b"\x1egradwire: last words\n", b"\x1egradwire: end of last words\n"
_CONSEQUENCE = b"\x1egradwire: a consequence of "
_FORMS = b"\x1egradwire: forms another job\n"


@contextlib.contextmanager
def announced() -> Iterator[None]:
    """Returns a context in which an error or a report is written to standard error.

    ``gradwire run`` shows lines that several ranks write alike only once, and leaves out the middle
    of a long report.
    """
    _tell(_LAST_WORDS)
    try:
        yield
    finally:
        _tell(_LAST_WORDS_END)


def is_consequence(failure: dict[str, Any]) -> None:
    """Tells the agent that this process ends because of a failure that another rank has caused."""
    _tell(_CONSEQUENCE + json.dumps(failure).encode() + b"\n")


def forms_another_job() -> None:
    """Tells the agent that this process has left the job and waits until ranks form another one."""
    _tell(_FORMS)


def _tell(line: bytes) -> None:
    """Writes a line into the pipe that the agent reads.

    The agent has named this pipe in a variable: its device and inode, and a copy of its descriptor.
    Standard error may be a file or another pipe.
    """
    device, _, rest = os.environ.get(_STDERR, "").partition(":")
    inode, _, copy = rest.partition(":")
    for number in ("2", copy):
        with contextlib.suppress(OSError, ValueError):
            about = os.fstat(int(number))
            if (device, inode) == (str(about.st_dev), str(about.st_ino)):
                if number == "2" and sys.__stderr__ is not None:
                    sys.__stderr__.flush()
                os.write(int(number), line)
                return
