"""What the shell offers on Tab."""

from __future__ import annotations

__all__ = ["assignments", "checkpoints", "keys", "profile_names"]


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


def keys(incomplete: str) -> list[tuple[str, str]]:
    """The keys of a profile."""
    from accel_cli.profile.schema import known_keys

    return [(key, text) for key, text in known_keys().items() if key.startswith(incomplete)]


def checkpoints(incomplete: str) -> list[str]:
    """Directories: checkpoints, and those on the way to them."""
    from pathlib import Path

    # What is typed so far stays as it is, `./` in front too.
    head, _, rest = incomplete.rpartition("/")
    above = f"{head}/" if "/" in incomplete else ""
    try:
        found = sorted(path.name for path in Path(above or ".").iterdir() if path.is_dir())
    except OSError:
        return []
    return [f"{above}{name}" for name in found if name.startswith(rest) and not name.startswith(".")]
