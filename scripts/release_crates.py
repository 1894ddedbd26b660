#!/usr/bin/env python3
"""Lists what a wheel is made of: an SBOM, and the licence texts of other people's crates.

    scripts/release_crates.py sbom TARGET        # prints CycloneDX, as JSON, for a Rust target
    scripts/release_crates.py licences TARGET    # prints the licences of all crates in a wheel

The crates are those that Cargo links into gradwire, gradwired and the native module; what only
builds or tests them is not listed. Both outputs are the same for the same commit.
"""

import json
import re
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gradwire-cli", "gradwire-daemon", "gradwire-python")
TEXTS = re.compile(r"(licen[cs]e|copying|notice|unlicense)", re.IGNORECASE)
# The charts of the status page: part of the programs, but not a crate.
UPLOT = ROOT / "viewer" / "assets" / "uplot"

Key = tuple[str, str]


@dataclass
class Crate:
    """A crate in the tree."""

    name: str
    version: str
    licence: str
    ours: bool
    needs: set[Key] = field(default_factory=set)

    @property
    def ref(self) -> str:
        """Its package URL."""
        return f"pkg:cargo/{self.name}@{self.version}"


def crates_of(tree: str) -> dict[Key, Crate]:
    """The crates that `cargo tree --prefix depth --format '|{p}|{l}'` prints, by name and version.

    Args:
        tree: Lines such as `1|clap v4.6.7|MIT OR Apache-2.0 (*)`; ours have a path as well.
    """
    found: dict[Key, Crate] = {}
    above: list[Crate] = []
    for line in tree.splitlines():
        depth, _, rest = line.partition("|")
        if not depth:
            continue
        package, _, licence = rest.removesuffix(" (*)").partition("|")
        name, version, *more = package.split()
        ours = any(word.startswith("(/") for word in more)
        key = (name, version.removeprefix("v"))
        licence = licence.replace(" / ", " OR ").replace("/", " OR ")
        crate = found.setdefault(key, Crate(*key, licence, ours))
        del above[int(depth) :]
        if above:
            above[-1].needs.add(key)
        above.append(crate)
    return found


def checksums(lock: str) -> dict[Key, str]:
    """The SHA-256 of each crate of a registry in Cargo.lock."""
    package = re.compile(
        r'^name = "(.+)"\nversion = "(.+)"\nsource = ".+"\nchecksum = "(.+)"$', re.MULTILINE
    )
    return {(name, version): sha for name, version, sha in package.findall(lock)}


def uplot() -> dict[str, Any]:
    """The component of the status page's charts."""
    start = (UPLOT / "uPlot.iife.min.js").read_text(encoding="utf-8")[:200]
    version = re.search(r"\(v(.+?)\)", start)
    assert version, "its first line has the version"
    return {
        "type": "library",
        "bom-ref": f"pkg:npm/uplot@{version[1]}",
        "name": "uplot",
        "version": version[1],
        "purl": f"pkg:npm/uplot@{version[1]}",
        "licenses": [{"expression": "MIT"}],
    }


def sbom(
    found: dict[Key, Crate], sums: dict[Key, str], version: str, others: list[dict[str, Any]]
) -> dict[str, Any]:
    """A CycloneDX document for the wheel."""
    wheel = f"pkg:pypi/gradwire@{version}"
    crates = [found[key] for key in sorted(found)]
    components = []
    for crate in crates:
        component: dict[str, Any] = {
            "type": "library",
            "bom-ref": crate.ref,
            "name": crate.name,
            "version": crate.version,
            "purl": crate.ref,
        }
        if crate.licence:
            component["licenses"] = [{"expression": crate.licence}]
        if sha := sums.get((crate.name, crate.version)):
            component["hashes"] = [{"alg": "SHA-256", "content": sha}]
        components.append(component)
    roots = [crate.ref for crate in crates if crate.name in PACKAGES]
    roots += [other["bom-ref"] for other in others]
    needs = [
        {"ref": crate.ref, "dependsOn": sorted(found[key].ref for key in crate.needs)}
        for crate in crates
    ]
    body = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": wheel,
                "name": "gradwire",
                "version": version,
                "purl": wheel,
                "licenses": [{"expression": "Apache-2.0"}],
            }
        },
        "components": components + others,
        "dependencies": [{"ref": wheel, "dependsOn": sorted(roots)}, *needs],
    }
    # The number follows from the contents, so that a second run gives the same file.
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(body, sort_keys=True))
    return {**body, "serialNumber": f"urn:uuid:{number}"}


def licence_texts(folders: dict[str, Path]) -> str:
    """All licence texts in the folders of crates, each once, below the crates that have it."""
    users: dict[str, list[str]] = {}
    without = []
    for crate, folder in sorted(folders.items()):
        files = [path for path in sorted(folder.iterdir()) if TEXTS.match(path.name)]
        texts = {
            path.read_text(encoding="utf-8", errors="replace").strip()
            for path in files
            if path.is_file()
        }
        for text in texts:
            users.setdefault(text, []).append(crate)
        if not texts:
            without.append(crate)
    parts = ["The programs and the native module of Gradwire contain these works of others.\n"]
    line = "=" * 80
    for text, names in sorted(users.items(), key=lambda item: item[1]):
        parts.append(f"{line}\n{', '.join(names)}\n{line}\n\n{text}\n")
    if without:
        parts.append(f"{line}\nwithout a text of their own: {', '.join(without)}\n{line}\n")
    return "\n".join(parts)


def cargo(*words: str) -> str:
    """What Cargo prints."""
    return subprocess.run(
        ["cargo", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def main() -> int:
    """Prints one of the two; returns the exit code."""
    if len(sys.argv) != 3 or sys.argv[1] not in ("sbom", "licences"):
        print(__doc__, file=sys.stderr)
        return 2
    what, target = sys.argv[1:]
    chosen = [word for package in PACKAGES for word in ("-p", package)]
    tree = cargo(
        *(
            "tree",
            "--locked",
            "--quiet",
            *chosen,
            "--target",
            target,
            "--edges",
            "normal,no-proc-macro",
        ),
        *("--prefix", "depth", "--format", "|{p}|{l}"),
    )
    found = crates_of(tree)
    metadata = json.loads(cargo("metadata", "--locked", "--format-version", "1"))
    packages = {(each["name"], each["version"]): each for each in metadata["packages"]}
    if what == "sbom":
        version = packages[next(key for key in found if key[0] == "gradwire-python")]["version"]
        sums = checksums((ROOT / "Cargo.lock").read_text(encoding="utf-8"))
        print(json.dumps(sbom(found, sums, version, [uplot()]), indent=1))
        return 0
    folders = {
        f"{crate.name} {crate.version} ({crate.licence})": Path(
            packages[key]["manifest_path"]
        ).parent
        for key, crate in found.items()
        if not crate.ours
    }
    folders["uPlot (MIT)"] = UPLOT
    print(licence_texts(folders))
    return 0


if __name__ == "__main__":
    sys.exit(main())
