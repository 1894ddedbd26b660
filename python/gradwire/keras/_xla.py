"""Switches XLA off for models whose optimizer exchanges gradients.

Keras compiles with XLA if a model supports it (``jit_compile="auto"``, the default). An exchange
can't be compiled, so such a model does not support it. A function of Keras decides this, without a
hook for other packages. So this module replaces that function.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

from gradwire._errors import InvalidRequest

_log = logging.getLogger("gradwire.keras")
_switched_off = False


def switch_off() -> None:
    """Replaces Keras' function; further calls do nothing."""
    global _switched_off
    from keras.src.trainers import trainer

    if _switched_off or not hasattr(trainer, "model_supports_jit"):
        return
    _switched_off = True
    supports = trainer.model_supports_jit

    @functools.wraps(supports)
    def model_supports_jit(model: Any) -> bool:
        from gradwire.keras._optimizer import is_distributed

        if not is_distributed(getattr(model, "optimizer", None)):
            return bool(supports(model))
        # The setter of ``jit_compile`` calls this only if the program has requested XLA.
        if sys._getframe(1).f_code.co_name == "jit_compile":
            raise InvalidRequest(
                "XLA can't compile the exchange of gradients: pass jit_compile=False, or leave it "
                "out",
                kind="invalid",
            )
        _log.info("XLA is off for %s, because its optimizer exchanges gradients", model.name)
        return False

    trainer.model_supports_jit = model_supports_jit
