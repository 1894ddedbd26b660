"""The module ``horovod.tensorflow.keras``. It is ``gradwire.keras``, for Keras 3."""

from __future__ import annotations

from gradwire.keras import *  # noqa: F403
from gradwire.keras import Compression as Compression
from gradwire.keras import __all__ as __all__
from gradwire.keras import callbacks as callbacks
from gradwire.keras import elastic as elastic
