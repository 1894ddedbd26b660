"""Checks that the programs and the Python package share one build of each crate that both need."""

import subprocess
import unittest
from pathlib import Path

ROOT = Path(__file__).parent.parent


def tree(*packages: str) -> set[str]:
    """The crates in the trees of these packages, each with its features."""
    chosen = [word for package in packages for word in ("-p", package)]
    command = ["cargo", "tree", "--quiet", *chosen, "--edges", "normal,build", "--prefix", "none"]
    command += ["--format", "{p} [{f}]"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {line.removesuffix(" (*)") for line in printed.splitlines()}


class SharedBuilds(unittest.TestCase):
    """Compares what Cargo would build."""

    def test_crates_of_both_have_equal_features(self) -> None:
        """A crate with other features would be built twice."""
        package = tree("gradwire-python")
        programs = tree("gradwire-cli", "gradwire-daemon")
        names = {crate.partition(" ")[0] for crate in programs}
        differ = sorted(crate for crate in package - programs if crate.partition(" ")[0] in names)
        self.assertEqual(differ, [], "name their features in python/Cargo.toml (decision 032)")


if __name__ == "__main__":
    unittest.main()
