"""Build the site strictly in the environment's folder, unless the one there is of the same sources.

`make check` and the tests that read the site share one build: `python docs/build_site.py`.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parent.parent
SITE = Path(sys.prefix, "site")
SOURCES = ("mkdocs.yml", "pyproject.toml", "constraints.txt", "README.md", "CHANGELOG.md")
FOLDERS = ("docs", "accel_cli", "accel_runtime", "examples", "configs", "benchmarks")
"""All that pages are made of, and the versions of the packages that make them."""


def build_site() -> Path:
    """Return the folder of the site; processes that call this at the same time build it once."""
    stamp = SITE.with_suffix(".sources")
    with FileLock(SITE.with_suffix(".lock")):
        digest = hash_sources()
        if not (stamp.exists() and stamp.read_text() == digest):
            stamp.unlink(missing_ok=True)
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", SITE]
            # Material for MkDocs advertises its successor at every build.
            subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
            stamp.write_text(digest)
    return SITE


def hash_sources() -> str:
    """Return a hash of the names and contents of the sources."""
    files = [ROOT / name for name in SOURCES]
    files += [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file()]
    digest = hashlib.sha256()
    for file in sorted(files):
        if "__pycache__" not in file.parts:
            digest.update(f"{file.relative_to(ROOT)}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    try:
        build_site()
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
