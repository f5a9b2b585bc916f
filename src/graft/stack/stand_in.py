"""What stands for a patch that conflicts, so that those after it are judged by their own hunks.

`git` runs git in a work tree and returns what it prints; nothing is committed here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from graft.errors import GraftError
from graft.stack import conflicts


def put(git: Callable[..., str], commit: str, own: Collection[str]) -> None:
    """Put what of `commit` does not conflict on top of HEAD, and the whole of its files in `own`.

    HEAD wins where it does. `own` are paths that nobody has but the stack.
    """
    try:
        git("cherry-pick", "-n", "-X", "ours", commit)
    except GraftError:
        there = _paths(git("ls-tree", "-r", "-z", "--name-only", "HEAD"))
        for path in conflicts.stages(git):
            if path in there:
                git("checkout", "-q", "HEAD", "--", path)
            else:
                git("rm", "-q", "-f", "--ignore-unmatch", "--", path)
        git("cherry-pick", "--quit")
    put_own(git, commit, own)


def put_own(git: Callable[..., str], commit: str, own: Collection[str]) -> None:
    """Put the files of `own` that `commit` changes on top as they are in it, and nothing else."""
    names = ("diff-tree", "-r", "-z", "--no-renames", "--name-only")
    for path in _paths(git(*names, f"{commit}^", commit)) & {*own}:
        if _paths(git("ls-tree", "-z", "--name-only", commit, "--", path)):
            git("checkout", "-q", commit, "--", path)
        else:
            git("rm", "-q", "--ignore-unmatch", "--", path)


def _paths(text: str) -> set[str]:
    return {*text.split("\0")[:-1]}
