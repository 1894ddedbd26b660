"""The part that Horovod's tests use to compare PyTorch versions."""

from __future__ import annotations

import re


class LooseVersion:
    def __init__(self, text: str) -> None:
        self.numbers = [int(number) for number in re.findall(r"\d+", text)]

    def __lt__(self, other: LooseVersion) -> bool:
        return self.numbers < other.numbers

    def __ge__(self, other: LooseVersion) -> bool:
        return self.numbers >= other.numbers
