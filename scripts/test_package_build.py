"""Tests of python/package_build.py: `cd scripts && python3 -m unittest discover .`"""

import sys
import types
import unittest
from pathlib import Path

# pip installs it; these tests don't call it.
sys.modules.setdefault("maturin", types.ModuleType("maturin"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

from package_build import profile_of, refusal, version_of  # noqa: E402

RUST = "rustc 1.95.0 (59807616e 2026-04-14)\n"


class Refusals(unittest.TestCase):
    """What a system lacks."""

    def test_a_system_with_everything_is_not_refused(self) -> None:
        """A newer Rust is fine, and so is one before a release."""
        for compiler in (RUST, "rustc 1.100.0", "rustc 1.96.0-nightly (a 2026-05-01)"):
            self.assertIsNone(refusal("Linux", compiler, "/usr/bin/cc", "1.95"), compiler)

    def test_one_sentence_says_what_is_required(self) -> None:
        """The system comes first: nothing helps on another one."""
        for arguments, words in (
            (("Darwin", "", None), "Gradwire needs Linux, but this system is Darwin"),
            (("", RUST, "cc"), "this system is unknown"),
            (("Linux", "", "cc"), "needs Rust 1.95 or newer with cargo"),
            (("Linux", "rustc 1.63.0 (x)\n", "cc"), "1.95 or newer, but this is rustc 1.63.0 (x)"),
            (("Linux", RUST, None), "needs a C compiler"),
        ):
            said = refusal(*arguments, "1.95") or ""
            self.assertIn(words, said)
            self.assertNotIn("\n", said)

    def test_versions_are_compared_as_numbers(self) -> None:
        """1.100 is newer than 1.95."""
        self.assertEqual(version_of(RUST), (1, 95, 0))
        self.assertGreater(version_of("1.100"), version_of("1.95.0"))
        self.assertEqual(version_of("none"), ())

    def test_the_profile_is_a_setting_of_pip(self) -> None:
        """Optimized without it."""
        self.assertEqual(profile_of(None), "release")
        self.assertEqual(profile_of({"profile": "dev"}), "dev")


if __name__ == "__main__":
    unittest.main()
