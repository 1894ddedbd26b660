"""The callbacks of ``horovod.tensorflow.keras.callbacks``."""

from __future__ import annotations

from gradwire.keras.callbacks import *  # noqa: F403
from gradwire.keras.callbacks import __all__ as __all__
