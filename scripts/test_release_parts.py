"""Tests of release_parts.py: `cd scripts && python3 -m unittest discover .`"""

import io
import tarfile
import tempfile
import unittest
import zipfile
from pathlib import Path

import release_parts
from release_parts import (
    Refused,
    check_sdist,
    check_wheel,
    glibc_of,
    notes_for,
    python_version,
    version_for,
    with_links,
    with_urls,
)

MANIFEST = '[workspace]\n\n[workspace.package]\nversion = "1.2.3"\n\n[profile]\nversion = "9"\n'
CHANGELOG = """# Changelog

## [Unreleased]

- What comes next.

## [1.2.3] - 2026-01-31

**Ranks**

- They run.

## [1.2.2]

## [1.2.1]

- Old.

[1.2.1]: https://a.example
"""
ROOT = Path(__file__).resolve().parent.parent


class Versions(unittest.TestCase):
    """The version of a release."""

    def test_the_tag_names_the_version(self) -> None:
        """Without a tag, the version is that of the workspace."""
        self.assertEqual(version_for("v1.2.3", MANIFEST), "1.2.3")
        self.assertEqual(version_for(None, MANIFEST), "1.2.3")

    def test_another_tag_is_refused(self) -> None:
        """In one sentence."""
        with self.assertRaises(Refused) as caught:
            version_for("v1.2.4", MANIFEST)
        wanted = "the tag is v1.2.4, but the version in Cargo.toml is 1.2.3"
        self.assertEqual(str(caught.exception), wanted)
        for tag in ("1.2.3", "v1.2", "v1.2.3-dev", "v1.2.3.4"):
            with self.assertRaises(Refused) as caught:
                version_for(tag, MANIFEST)
            self.assertIn(f"the tag {tag} is not of the form", str(caught.exception))

    def test_a_workspace_without_version_is_refused(self) -> None:
        """A version elsewhere does not count."""
        with self.assertRaises(Refused):
            version_for(None, '[workspace.package]\n\n[profile]\nversion = "9"\n')

    def test_versions_are_written_as_python_does(self) -> None:
        """Only those before a release differ."""
        for cargo, python in (("1.2.3", "1.2.3"), ("1.2.3-rc.1", "1.2.3rc1")):
            self.assertEqual(python_version(cargo), python)
        self.assertEqual(python_version("0.1.0-alpha.12"), "0.1.0a12")


class Notes(unittest.TestCase):
    """The cut of the changelog."""

    def test_the_section_of_the_version_is_cut(self) -> None:
        """To the next heading, or to the links at the end."""
        self.assertEqual(notes_for("v1.2.3", "1.2.3", CHANGELOG), "**Ranks**\n\n- They run.")
        self.assertEqual(notes_for("v1.2.1", "1.2.1", CHANGELOG), "- Old.")

    def test_only_a_rehearsal_takes_unreleased_work(self) -> None:
        """If the version has no section yet."""
        self.assertEqual(notes_for(None, "2.0.0", CHANGELOG), "- What comes next.")
        with self.assertRaises(Refused) as caught:
            notes_for("v2.0.0", "2.0.0", CHANGELOG)
        self.assertIn("CHANGELOG.md has no section ## [2.0.0]", str(caught.exception))

    def test_an_empty_section_is_refused(self) -> None:
        """A release says what changed."""
        with self.assertRaises(Refused) as caught:
            notes_for("v1.2.2", "1.2.2", CHANGELOG)
        self.assertEqual(str(caught.exception), "the section of 1.2.2 in CHANGELOG.md is empty")

    def test_this_changelog_has_notes(self) -> None:
        """They are the notes of a rehearsal."""
        version = version_for(None, (ROOT / "Cargo.toml").read_text(encoding="utf-8"))
        changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        self.assertIn("\n- ", notes_for(None, version, changelog))


class Addresses(unittest.TestCase):
    """The project's addresses in the metadata."""

    def test_addresses_follow_from_the_repository(self) -> None:
        """A release has the documents of its tag."""
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        changed = with_urls(text, "https://code.example/a/b", "v1.2.3")
        self.assertIn('[project.urls]\nRepository = "https://code.example/a/b"\n', changed)
        self.assertIn('"https://code.example/a/b/blob/v1.2.3/CHANGELOG.md"', changed)
        self.assertIn("/blob/main/", with_urls(text, "https://code.example/a/b", None))
        with self.assertRaises(Refused):
            with_urls(changed, "https://code.example/a/b", None)

    def test_other_words_are_no_address(self) -> None:
        """They would end up in the metadata."""
        for wrong in ("code.example/a", "https://code.example", "https://a.example/b\nx", ""):
            with self.assertRaises(Refused, msg=wrong):
                with_urls("[project.optional-dependencies]\n", wrong, None)

    def test_links_to_other_folders_become_addresses(self) -> None:
        """Others stay."""
        text = "[a](../docs/a.md#b) [c](#d)"
        wanted = "[a](https://x.example/y/blob/v1.2.3/docs/a.md#b) [c](#d)"
        self.assertEqual(with_links(text, "https://x.example/y", "v1.2.3"), wanted)


class Files(unittest.TestCase):
    """Wheels and sdists."""

    def setUp(self) -> None:
        """Creates a folder."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def wheel(self, *names: str, glibc: str = "2.17", arch: str = "x86_64") -> Path:
        """A wheel with these programs."""
        path = self.folder / f"gradwire-1.2.3-cp310-abi3-manylinux_2_28_{arch}.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            for name in names:
                text = f"\0GLIBC_2.2.5\0GLIBC_{glibc}\0GLIBC_PRIVATE\0"
                wheel.writestr(f"gradwire-1.2.3.data/scripts/{name}", text)
        return path

    def refused(self, path: Path, arch: str = "x86_64") -> str:
        """Why a wheel is refused."""
        with self.assertRaises(Refused) as caught:
            check_wheel(path, arch, "1.2.3")
        return str(caught.exception)

    def test_a_good_wheel_is_described(self) -> None:
        """In one line."""
        said = check_wheel(self.wheel("gradwire", "gradwired", glibc="2.28"), "x86_64", "1.2.3")
        self.assertTrue(said.endswith("0.0 MB, needs glibc 2.28"), said)

    def test_other_wheels_are_refused(self) -> None:
        """One reason each."""
        self.assertIn("but should be", self.refused(self.wheel("gradwire"), "aarch64"))
        self.assertIn("has no program gradwired", self.refused(self.wheel("gradwire")))
        new = self.wheel("gradwire", "gradwired", glibc="2.34")
        self.assertTrue(self.refused(new).endswith("needs glibc 2.34"))
        big = self.wheel("gradwire", "gradwired")
        self.addCleanup(setattr, release_parts, "MOST_BYTES", release_parts.MOST_BYTES)
        release_parts.MOST_BYTES = 100
        self.assertTrue(self.refused(big).endswith("bytes, but may have 100"))

    def test_the_newest_glibc_counts(self) -> None:
        """As numbers, and only where a name ends."""
        self.assertEqual(glibc_of(b"\0GLIBC_2.9\0GLIBC_2.10\0GLIBC_2.99x\0"), (2, 10))
        self.assertEqual(glibc_of(b""), (0, 0))

    def test_an_sdist_lacks_nothing(self) -> None:
        """pip must be able to build it."""
        path = self.folder / "gradwire-1.2.3.tar.gz"
        for names in (release_parts.NEEDED, release_parts.NEEDED[1:]):
            with tarfile.open(path, "w:gz") as sdist:
                for name in names:
                    sdist.addfile(tarfile.TarInfo(f"gradwire-1.2.3/{name}"), io.BytesIO())
            if len(names) == len(release_parts.NEEDED):
                self.assertIn("gradwire-1.2.3.tar.gz", check_sdist(path, "1.2.3"))
        with self.assertRaises(Refused) as caught:
            check_sdist(path, "1.2.3")
        self.assertEqual(str(caught.exception), f"{path.name} lacks {release_parts.NEEDED[0]}")


if __name__ == "__main__":
    unittest.main()
