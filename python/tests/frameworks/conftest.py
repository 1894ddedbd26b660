"""Tests in folders run on the ranks of jobs that other tests start."""

from __future__ import annotations

import os

collect_ignore = [] if "GWTEST_RANK" in os.environ else ["keras_ranks", "tensorflow_ranks"]
