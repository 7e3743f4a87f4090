"""Patterns of file names: those of a profile, what is left out unasked, and what may hold a secret."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import translate

__all__ = ["SECRETS", "Pattern", "is_clutter", "may_be_secret", "parsed"]

_CLUTTER = frozenset({
    ".DS_Store", ".eggs", ".git", ".hg", ".hypothesis", ".idea", ".ipynb_checkpoints", ".jj", ".mypy_cache", ".nox",
    ".pytest_cache", ".ruff_cache", ".svn", ".tox", ".venv", ".vscode", "__pycache__", "mlruns", "node_modules", "venv",
    "wandb",
})  # fmt: skip
_CLUTTER_ENDINGS = (".pyc", ".pyo")
SECRETS = (
    ".env", ".env.*", "*.env", ".envrc", "*.pem", "*.key", "*.p12", "*.pfx", "id_rsa*", "id_dsa*", "id_ecdsa*",
    "id_ed25519*", ".aws", ".azure", ".boto", ".docker", ".gcloud", ".gnupg", ".kube", ".ssh", ".git-credentials",
    ".htpasswd", ".netrc", ".npmrc", ".pgpass", ".pypirc", ".s3cfg", "credentials.json", "kaggle.json",
    "secrets.json", "secrets.toml", "secrets.yaml", "secrets.yml", "service-account*.json", "service_account*.json",
    "token.json", "token.txt", "*.token",
)  # fmt: skip
"""Names of files and folders that are not sent unless a pattern of `include` names them."""
_PIECE = re.compile(r"\*+|\?|\[!?\]?[^\]]*\]|.", re.DOTALL)
_SECRET = re.compile("|".join(map(translate, SECRETS)))
_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Pattern:
    """A pattern as in a .gitignore: without a slash it holds at any depth, and a folder is all that is in it."""

    text: str
    regex: re.Pattern[str]

    def matches(self, name: str) -> bool:
        """Whether a file or folder, by its path from the folder that is sent, is meant."""
        return self.regex.match(name) is not None

    @property
    def anywhere(self) -> bool:
        """Whether it holds at any depth."""
        return "/" not in self.text

    @property
    def start(self) -> str:
        """The folder or file it begins with, as far as no wildcard comes: all it means is there, or at any depth."""
        parts = self.text.split("/")
        wild = [number for number, part in enumerate(parts) if _WILD.search(part)]
        return "/".join(parts[: wild[0]] if wild else parts)

    @property
    def names_a_secret(self) -> bool:
        """Whether what may hold a secret is called by its name, as `.env` does and `conf/*` does not."""
        return may_be_secret(self.text)


def parsed(text: str) -> Pattern:
    """A pattern of a profile.

    Raises:
        ValueError: It is none; the message says what was expected.
    """
    parts = [part for part in text.split("/") if part not in {"", "."}]
    if not parts or ".." in parts or text.startswith(("!", "~")):
        raise ValueError(
            "expected a pattern of files in launcher.source_dir, like data/*.csv or **/*.ckpt: no .., ! or ~"
        )
    kept = "/".join(parts)
    # `/data` is the one at the top, as in a .gitignore.
    top = text.startswith(("/", "./")) and len(parts) == 1
    try:
        regex = re.compile(_regex(parts if top or len(parts) > 1 else ["**", *parts]), re.DOTALL)
    except re.error:
        raise ValueError("expected a pattern of files, and its [ ] is none") from None
    return Pattern(f"./{kept}" if top else kept, regex)


def is_clutter(name: str) -> bool:
    """Whether a file or folder of this name is one that no job needs."""
    return name in _CLUTTER or name.endswith(_CLUTTER_ENDINGS)


def may_be_secret(path: str) -> bool:
    """Whether a file, or a folder it is in, has a name under which secrets are kept."""
    return any(_SECRET.match(part) for part in path.lower().split("/"))


def _regex(parts: list[str]) -> str:
    """The parts of a path, and behind them the end or what is in the folder."""
    *folders, last = parts
    before = "".join("(?:[^/]+/)*" if part == "**" else _part(part) + "/" for part in folders)
    return f"{before}{'.+' if last == '**' else _part(last)}(?:/|\\Z)"


def _part(text: str) -> str:
    return "".join(map(_piece, _PIECE.findall(text)))


def _piece(text: str) -> str:
    if text[0] == "*":
        return "[^/]*"
    if text == "?":
        return "[^/]"
    if len(text) == 1:
        return re.escape(text)
    negated, inner = text[1] == "!", text[1:-1].removeprefix("!")
    if not inner:
        return re.escape(text)
    # What means something in the class of a regular expression, and nothing in a pattern.
    inner = re.sub(r"[\\^\[&~|]", r"\\\g<0>", inner).replace("--", "-\\-")
    return f"(?!/)[{'^' if negated else ''}{inner}]"
