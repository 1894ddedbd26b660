"""The file in which torchrun looks for the error of a rank.

torchrun names a file for each rank in ``TORCHELASTIC_ERROR_FILE``. Of all ranks that failed, it
shows the one with the earliest time, in whole seconds. A rank that ends because of another one
therefore dates its own file a second later: a killed rank leaves no file, and torchrun notices its
end a moment after the others have ended.

The format is that of ``torch.distributed.elastic.multiprocessing.errors``.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback

_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def write(error: BaseException, text: str, *, is_own: bool) -> None:
    """Writes the error with which this process ends, unless the file exists.

    Args:
        error: The uncaught exception.
        text: What happened, in one line or a short table.
        is_own: Whether this rank is the cause, and not one that only noticed it.
    """
    path = os.environ.get(_VARIABLE)
    if not path:
        return
    stack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    about = {"py_callstack": stack, "timestamp": str(int(time.time()) + (not is_own))}
    # If the program uses PyTorch's `record`, that has written the file. A failure here must not
    # hide the error.
    with contextlib.suppress(OSError), open(path, "x") as file:
        json.dump({"message": {"message": text, "extraInfo": about}}, file)
