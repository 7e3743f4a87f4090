"""Locations of checkpoints: paths of directories, and URLs of object stores. Standard library only."""

from __future__ import annotations

import os
import re

__all__ = [
    "URL_SCHEMES",
    "StoreURL",
    "has_scheme",
    "is_url",
    "join_location",
    "normalize_location",
    "split_url",
]

URL_SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "az": "az", "azure": "az", "abfs": "az", "abfss": "az"}
"""Schemes of URLs, and the kind of service that each one is of: S3, Google Cloud Storage, Azure Blob Storage."""
_URL = re.compile(rf"({'|'.join(URL_SCHEMES)}):/+(.*)", re.DOTALL)
_OTHER_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
"""Beginning of a URL with any scheme, also as a `Path`; a drive has one letter."""


class StoreURL(str):
    """URL of a checkpoint in an object store: a text with `name`, `parent` and `/`, as a `Path` on disk has them.

    It equals the same URL as text.
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        """Last name, such as `checkpoint_3`; empty for a bucket."""
        return split_url(self)[1].rpartition("/")[2]

    @property
    def parent(self) -> StoreURL:
        """URL without the last name; a bucket is its own parent."""
        bucket, path = split_url(self)
        above = path.rpartition("/")[0]
        return StoreURL(f"{bucket}/{above}" if above else bucket)

    def __truediv__(self, name: str | os.PathLike[str]) -> StoreURL:
        return StoreURL(join_location(self, os.fspath(name)))


def is_url(location: str | os.PathLike[str]) -> bool:
    """Return whether a location is in an object store.

    Raises:
        ValueError: It is a URL with another scheme, which would be the name of a directory.
    """
    text = os.fspath(location)
    if _URL.fullmatch(text):
        return True
    if other := _OTHER_URL.match(text):
        raise ValueError(
            f"Invalid location {text!r}: {other[1]}:// is not a known scheme. Pass a directory, or a URL that begins with "
            f"{', '.join(f'{scheme}://' for scheme in URL_SCHEMES)}."
        )
    return False


def has_scheme(location: str | os.PathLike[str]) -> bool:
    """Return whether a location begins with the scheme of a URL, known or not."""
    return bool(_OTHER_URL.match(os.fspath(location)))


def normalize_location(location: str | os.PathLike[str]) -> str:
    """Return an absolute path, or the URL without superfluous slashes: `Path("s3://bucket")` has lost one.

    Raises:
        ValueError: A URL has no bucket, or a scheme that is not known.
    """
    text = os.fspath(location)
    match = _URL.fullmatch(text) if is_url(text) else None
    if match is None:
        return os.path.abspath(text)  # noqa: PTH100 - Path.absolute() keeps `..`
    names = [name for name in match[2].split("/") if name]
    if not names or any(name in {".", ".."} for name in names):
        raise ValueError(f"Invalid location {text!r}: expected {match[1]}://BUCKET/PATH.")
    return f"{match[1]}://{'/'.join(names)}"


def join_location(parent: str | os.PathLike[str], name: str) -> str:
    """Return the location of a name below a parent."""
    if is_url(parent):
        return f"{normalize_location(parent)}/{name}"
    return os.path.join(os.fspath(parent), name)  # noqa: PTH118 - text


def split_url(url: str) -> tuple[str, str]:
    """Return the URL of the bucket, and the path in it."""
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    return f"{scheme}://{bucket}", path
