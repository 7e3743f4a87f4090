"""A source folder, and git in it."""

from support.cases.folders import git, tree, write

__all__ = ["git", "tree", "write"]
