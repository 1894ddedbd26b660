"""Tests of release_crates.py: `cd scripts && python3 -m unittest discover .`"""

import tempfile
import unittest
from pathlib import Path

from release_crates import checksums, crates_of, licence_texts, sbom, uplot

TREE = """0|gradwire-cli v0.1.0 (/somewhere/cli)|Apache-2.0
1|clap v4.6.7|MIT OR Apache-2.0
2|strsim v0.11.1|MIT
1|libc v0.2.1|MIT/Apache-2.0

0|gradwire-python v0.1.0 (/somewhere/python)|Apache-2.0
1|libc v0.2.1|MIT/Apache-2.0 (*)
"""
LOCK = """[[package]]
name = "clap"
version = "4.6.7"
source = "registry+https://index.example"
checksum = "abc"

[[package]]
name = "gradwire-cli"
version = "0.1.0"
dependencies = [
 "clap",
]
"""


class Crates(unittest.TestCase):
    """What a wheel is made of."""

    def test_the_tree_is_read(self) -> None:
        """Each crate once, with what it needs."""
        found = crates_of(TREE)
        names = [("clap", "4.6.7"), ("gradwire-cli", "0.1.0"), ("gradwire-python", "0.1.0")]
        names += [("libc", "0.2.1"), ("strsim", "0.11.1")]
        self.assertEqual(sorted(found), names)
        self.assertEqual(found[names[1]].needs, {names[0], names[3]})
        self.assertEqual(found[names[0]].needs, {names[4]})
        self.assertEqual(found[names[2]].needs, {names[3]})
        self.assertEqual(found[names[3]].licence, "MIT OR Apache-2.0")
        self.assertEqual([found[name].ours for name in names], [False, True, True, False, False])

    def test_checksums_are_those_of_registries(self) -> None:
        """Our own crates have none."""
        self.assertEqual(checksums(LOCK), {("clap", "4.6.7"): "abc"})

    def test_the_sbom_is_whole_and_repeats(self) -> None:
        """Every reference has a component."""
        texts = [sbom(crates_of(TREE), checksums(LOCK), "0.1.0", [uplot()]) for _ in range(2)]
        self.assertEqual(texts[0], texts[1])
        text = texts[0]
        refs = {component["bom-ref"] for component in text["components"]}
        refs.add(text["metadata"]["component"]["bom-ref"])
        for needs in text["dependencies"]:
            self.assertLessEqual({needs["ref"], *needs["dependsOn"]}, refs)
        clap = next(each for each in text["components"] if each["name"] == "clap")
        self.assertEqual(clap["hashes"], [{"alg": "SHA-256", "content": "abc"}])
        wheel = text["dependencies"][0]
        self.assertEqual(len(wheel["dependsOn"]), 3)

    def test_a_licence_text_appears_once(self) -> None:
        """Below all crates that have it."""
        with tempfile.TemporaryDirectory() as name:
            folders = {}
            for crate, text in (("a 1", "Text.\n"), ("b 2", "Text."), ("c 3", None)):
                folders[crate] = Path(name) / crate
                folders[crate].mkdir()
                if text:
                    (folders[crate] / "LICENSE-MIT").write_text(text, encoding="utf-8")
            written = licence_texts(folders)
        self.assertEqual(written.count("Text."), 1)
        self.assertIn("\na 1, b 2\n", written)
        self.assertIn("without a text of their own: c 3", written)


if __name__ == "__main__":
    unittest.main()
