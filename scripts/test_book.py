"""Tests of book.py, and of the list of the book's pages."""

import tempfile
import unittest
from pathlib import Path

import book


class Book(unittest.TestCase):
    """The pages, and their sources."""

    def test_every_page_is_in_the_book(self) -> None:
        """No page of these folders is forgotten."""
        folders = ("docs", "docs/decisions", "lab/docs")
        written = {path for folder in folders for path in (book.ROOT / folder).glob("*.md")}
        self.assertEqual(written - {book.SUMMARY} - set(book.pages()), set())

    def test_no_page_is_listed_twice(self) -> None:
        """Each page has one place."""
        self.assertEqual(len(book.pages()), len(set(book.pages())))

    def test_sources_have_what_pages_link_to(self) -> None:
        """Relative links lead to the same files as in the repository."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "source"
            book.prepare(folder)
            for page in folder.rglob("*.md"):
                for target in book.targets(page):
                    self.assertTrue(target.is_file(), f"{page}: {target}")


if __name__ == "__main__":
    unittest.main()
