"""Tests of check_licences.py: `cd scripts && python3 -m unittest discover .`"""

import unittest

from check_licences import allowed, findings, policy

POLICY = """
[licenses]
allow = [
    "Apache-2.0",
    "MIT",
]
[[licenses.exceptions]]
crate = "fonts"
allow = ["OFL-1.1"]
"""
REGISTRY = "registry+https://index.example"


def crate(licence: str | None, name: str = "a", source: str | None = REGISTRY) -> dict:
    """A package as `cargo metadata` prints it."""
    return {"name": name, "version": "1.0.0", "license": licence, "source": source}


class Licences(unittest.TestCase):
    """Licence expressions."""

    def test_every_and_one_or_must_be_allowed(self) -> None:
        """AND binds more than OR; an exception belongs to its licence."""
        allow = {"MIT", "Apache-2.0", "Zlib", "Apache-2.0 WITH LLVM-exception"}
        for met in (
            "MIT",
            "GPL-3.0 OR MIT",
            "MIT/GPL-3.0",
            "GPL-3.0 AND GPL-2.0 OR MIT AND Zlib",
            "(GPL-3.0 OR MIT) AND (Zlib)",
            "Apache-2.0 WITH LLVM-exception",
        ):
            self.assertTrue(allowed(met, allow), met)
        for unmet in ("GPL-3.0", "MIT AND GPL-3.0", "(MIT OR Zlib) AND X", "MIT WITH X"):
            self.assertFalse(allowed(unmet, allow), unmet)

    def test_what_is_no_expression_is_an_error(self) -> None:
        """Nothing is allowed by mistake."""
        for text in ("", "MIT MIT", "(MIT", "MIT)", "MIT OR", "AND MIT"):
            with self.assertRaises(ValueError, msg=text):
                allowed(text, {"MIT"})


class Crates(unittest.TestCase):
    """Crates against a policy."""

    def test_the_policy_is_read(self) -> None:
        """Both lists."""
        self.assertEqual(policy(POLICY), ({"Apache-2.0", "MIT"}, {"fonts": {"OFL-1.1"}}))

    def test_exceptions_are_for_one_crate(self) -> None:
        """The others may not have its licences."""
        self.assertEqual(list(findings([crate("MIT AND OFL-1.1", "fonts")], POLICY)), [])
        lines = list(findings([crate("OFL-1.1"), crate(None, "b")], POLICY))
        self.assertEqual(
            lines,
            [
                "a 1.0.0 has the licence OFL-1.1, which deny.toml does not allow",
                "b 1.0.0 has the licence None, which deny.toml does not allow",
            ],
        )

    def test_other_sources_are_found(self) -> None:
        """Crates of the workspace have no source."""
        self.assertEqual(list(findings([crate("MIT", source=None)], POLICY)), [])
        lines = list(findings([crate("MIT", source="git+https://a.example")], POLICY))
        wanted = "a 1.0.0 comes from git+https://a.example, and deny.toml allows registries only"
        self.assertEqual(lines, [wanted])


if __name__ == "__main__":
    unittest.main()
