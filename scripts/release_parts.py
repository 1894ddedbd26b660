#!/usr/bin/env python3
"""The parts of scripts/release.sh that decide something: version, notes, metadata, checks.

    scripts/release_parts.py version [TAG]            # prints the version; refuses another tag
    scripts/release_parts.py notes [TAG]              # prints its section of CHANGELOG.md
    scripts/release_parts.py urls REPOSITORY [TAG]    # writes addresses into pyproject.toml
    scripts/release_parts.py wheel ARCH WHEEL         # checks a wheel for an architecture
    scripts/release_parts.py sdist SDIST              # checks that all parts are there

They work in the current folder, the root of a checkout. Without a tag, it is a rehearsal. A refusal
is one sentence, and the exit code is 1.
"""

import re
import sys
import tarfile
import zipfile
from pathlib import Path

TAG = re.compile(r"v(\d+\.\d+\.\d+)(?:-(alpha|beta|rc)\.(\d+))?")
PROGRAMS = ("gradwire", "gradwired")
# The order of a release: what `pip install` downloads.
MOST_BYTES = 12_000_000
# The oldest glibc of manylinux_2_28.
GLIBC = (2, 28)
# Folders of an sdist without which pip can't build it.
NEEDED = ("cli/src/main.rs", "daemon/src/main.rs", "python/src/lib.rs", "python/package_build.py")
NEEDED += ("Cargo.lock", "PKG-INFO", "pyproject.toml", "LICENSE")


class Refused(Exception):
    """Why nothing can be released, in one sentence."""


def python_version(version: str) -> str:
    """A version of Cargo as Python writes it: `1.2.3-rc.1` is `1.2.3rc1`."""
    short = {"alpha": "a", "beta": "b", "rc": "rc"}
    return re.sub(r"-(alpha|beta|rc)\.(\d+)$", lambda found: short[found[1]] + found[2], version)


def workspace_version(manifest: str) -> str:
    """The version in the text of Cargo.toml."""
    section = manifest.partition("[workspace.package]")[2].partition("\n[")[0]
    found = re.search(r'^version = "(.+)"$', section, re.MULTILINE)
    if not found:
        raise Refused("Cargo.toml has no version in [workspace.package]")
    return found[1]


def version_for(tag: str | None, manifest: str) -> str:
    """The version of the workspace, if the tag names it or there is none."""
    version = workspace_version(manifest)
    if tag is None:
        return version
    if not TAG.fullmatch(tag):
        raise Refused(f"the tag {tag} is not of the form v1.2.3 or v1.2.3-rc.1")
    if tag != f"v{version}":
        raise Refused(f"the tag is {tag}, but the version in Cargo.toml is {version}")
    return version


def section(changelog: str, name: str) -> str | None:
    """The text below the heading `## [name]`, or None without such a heading."""
    start = re.search(rf"^## \[{re.escape(name)}\].*$", changelog, re.MULTILINE)
    if not start:
        return None
    end = re.search(r"^## |^\[[^\]]+\]: ", changelog[start.end() :], re.MULTILINE)
    text = changelog[start.end() :]
    return (text[: end.start()] if end else text).strip()


def notes_for(tag: str | None, version: str, changelog: str) -> str:
    """The release notes: the section of the version; in a rehearsal also that of the next one."""
    notes = section(changelog, version)
    if notes is None and tag is None:
        notes = section(changelog, "Unreleased")
    if notes is None:
        raise Refused(f"CHANGELOG.md has no section ## [{version}]: rename ## [Unreleased]")
    if not notes:
        raise Refused(f"the section of {version} in CHANGELOG.md is empty")
    return notes


def with_urls(pyproject: str, repository: str, tag: str | None) -> str:
    """The text of pyproject.toml with the addresses of the project."""
    if not re.fullmatch(r"https://[\w.-]+/[\w./-]*[\w-]", repository):
        raise Refused(f"invalid repository {repository!r}: expected https://HOST/PROJECT")
    tree = f"{repository}/blob/{tag or 'main'}"
    lines = {
        "Repository": repository,
        "Documentation": f"{tree}/README.md",
        "Changelog": f"{tree}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
        "Security": f"{tree}/SECURITY.md",
    }
    written = "".join(f'{name} = "{address}"\n' for name, address in lines.items())
    place = "[project.optional-dependencies]\n"
    if "[project.urls]" in pyproject or place not in pyproject:
        raise Refused("pyproject.toml has its addresses already, or is not ours")
    return pyproject.replace(place, f"[project.urls]\n{written}\n{place}")


def with_links(readme: str, repository: str, tag: str | None) -> str:
    """A text in python/ with addresses instead of its links to other folders."""
    return readme.replace("](../", f"]({repository}/blob/{tag or 'main'}/")


def glibc_of(binary: bytes) -> tuple[int, int]:
    """The newest version of glibc that a program or library names, or (0, 0)."""
    found = re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)", binary)
    return max(((int(major), int(minor)) for major, minor in found), default=(0, 0))


def check_wheel(path: Path, arch: str, version: str) -> str:
    """Checks the wheel's name, size and contents; returns what it has in one line."""
    wanted = f"gradwire-{python_version(version)}-cp310-abi3-manylinux_2_28_{arch}.whl"
    if path.name != wanted:
        raise Refused(f"the wheel is {path.name}, but should be {wanted}")
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise Refused(f"{path.name} has {size} bytes, but may have {MOST_BYTES}")
    newest = (0, 0)
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        scripts = {name.rpartition("/")[2] for name in names if ".data/scripts/" in name}
        for program in PROGRAMS:
            if program not in scripts:
                raise Refused(f"{path.name} has no program {program}")
        for name in names:
            if ".data/scripts/" not in name and not name.endswith(".so"):
                continue
            needed = glibc_of(wheel.read(name))
            newest = max(newest, needed)
            if needed > GLIBC:
                raise Refused(f"{name} in {path.name} needs glibc {needed[0]}.{needed[1]}")
    return f"{path.name}: {size / 1e6:.1f} MB, needs glibc {newest[0]}.{newest[1]}"


def check_sdist(path: Path, version: str) -> str:
    """Checks the sdist's name and contents; returns what it has in one line."""
    stem = f"gradwire-{python_version(version)}"
    if path.name != f"{stem}.tar.gz":
        raise Refused(f"the sdist is {path.name}, but should be {stem}.tar.gz")
    with tarfile.open(path) as sdist:
        names = set(sdist.getnames())
    missing = [name for name in NEEDED if f"{stem}/{name}" not in names]
    if missing:
        raise Refused(f"{path.name} lacks {', '.join(missing)}")
    return f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, {len(names)} files"


def read(name: str) -> str:
    """The text of a file of the project."""
    return Path(name).read_text(encoding="utf-8")


def run(command: str, words: list[str]) -> str:
    """Does what the command line asks; returns what to print."""
    if command in ("version", "notes"):
        tag = words[0] if words else None
        version = version_for(tag, read("Cargo.toml"))
        return version if command == "version" else notes_for(tag, version, read("CHANGELOG.md"))
    if command == "urls":
        repository, tag = words[0].rstrip("/"), words[1] if words[1:] else None
        changed = with_urls(read("pyproject.toml"), repository, tag)
        Path("pyproject.toml").write_text(changed, encoding="utf-8")
        changed = with_links(read("python/README.md"), repository, tag)
        Path("python/README.md").write_text(changed, encoding="utf-8")
        return f"the metadata names {repository}"
    version = workspace_version(read("Cargo.toml"))
    if command == "wheel":
        return check_wheel(Path(words[1]), words[0], version)
    if command == "sdist":
        return check_sdist(Path(words[0]), version)
    raise Refused(f"unknown command {command}: see the top of this file")


def main() -> int:
    """Runs one command; returns the exit code."""
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(run(sys.argv[1], sys.argv[2:]))
    except Refused as why:
        print(f"release: {why}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
