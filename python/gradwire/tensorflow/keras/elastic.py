"""The module ``horovod.tensorflow.keras.elastic``. It is ``gradwire.keras.elastic``."""

from __future__ import annotations

from gradwire.keras.elastic import *  # noqa: F403
from gradwire.keras.elastic import __all__ as __all__
