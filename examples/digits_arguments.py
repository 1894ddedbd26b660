"""The arguments and the file of the examples, for any framework."""

import argparse
from pathlib import Path

DATA = Path(__file__).parent.parent / "python" / "gradwire" / "demo" / "optdigits.csv.gz"
TEST_IMAGES = 360


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def arguments(about: str) -> argparse.ArgumentParser:
    """The common arguments; the first line of the docstring is the program's description."""
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("--epochs", type=positive, default=10, help="passes over the images")
    parser.add_argument("--batch", type=positive, default=64, help="batch size of all ranks")
    return parser
