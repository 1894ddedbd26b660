"""The tests of TensorFlow run on the ranks of jobs that ``test_tensorflow.py`` starts."""

from __future__ import annotations

import os

collect_ignore = [] if "GWTEST_RANK" in os.environ else ["tensorflow_ranks"]
