"""What the shell offers on Tab."""

from __future__ import annotations

__all__ = ["assignments", "profile_names"]


def profile_names(incomplete: str) -> list[str]:
    """The names of the profiles there are."""
    import os
    from pathlib import Path

    from accel_cli.profile.store import Store

    return [n for n in Store.from_env(os.environ, Path.cwd()).names() if n.startswith(incomplete)]


def assignments(incomplete: str) -> list[tuple[str, str]]:
    """The keys of a profile, ready for a value."""
    from accel_cli.profile.schema import known_keys

    return [(f"{key}=", text) for key, text in known_keys().items() if key.startswith(incomplete)]
