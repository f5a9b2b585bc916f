"""A PyTorch checkout as a base: its Python files with a wheel's binaries, or its own build."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

from graft.errors import GraftError, UsageError
from graft.stack import Stack
from graft.stack.git import NULL_BLOB, git
from graft.stack.pins import Pin


def check(checkout: Path, pin: Pin) -> None:
    """Raise GraftError unless `checkout` is a PyTorch checkout at the pin's commit, unchanged.

    Only tracked files under torch/ matter; each one that is changed is named.
    """
    if not (checkout / "torch" / "__init__.py").is_file():
        raise UsageError(
            f"{checkout} is not a PyTorch checkout (it has no torch/__init__.py)",
            next="./build.sh --source CHECKOUT, with the root of one",
        )
    head = git("rev-parse", "HEAD", cwd=checkout).strip()
    if head != pin.commit:
        raise GraftError(
            f"{checkout} is at {head[:12]}, and {pin.name} is {pin.commit[:12]}",
            next=f"git -C {checkout} checkout {pin.name}",
        )
    status = git("status", "--porcelain", "-z", "-uno", "--", "torch", cwd=checkout)
    dirty = [entry[3:] for entry in status.split("\0") if len(entry) > 3]
    if dirty:
        raise GraftError(
            f"{checkout} has changes of its own in {', '.join(dirty)}",
            next=f"git -C {checkout} stash (or commit them on a branch), then the same command",
        )


@functools.cache
def python_files(checkout: Path) -> frozenset[str]:
    """The tracked Python files under torch/ of a checkout."""
    listed = git("ls-files", "-z", "--", "torch/*.py", cwd=checkout)
    return frozenset(path for path in listed.split("\0") if path)


# --- PyTorch's own build -------------------------------------------------------------------------


def branch_name(stack: Stack) -> str:
    """The branch that holds the stack as commits: the same name for the same patch files."""
    digest = hashlib.sha256(b"".join(patch.text for patch in stack.patches)).hexdigest()
    return f"graft/{stack.pin.name}-{digest[:12]}"


def worktree(checkout: Path, stack: Stack, folder: Path) -> Path:
    """A worktree of `checkout` at `folder`, on a branch with a commit a patch on the pin's commit.

    The checkout's own branch, index and files are left alone. A worktree that is there is moved
    to the stack, and keeps what was built in it. Raises GraftError when the checkout lacks the
    pin's commit, `folder` is something else or has changes, or a patch does not apply.
    """
    from graft.stack import checkout as checkouts  # a pack has this module, and no use for that one

    commit, branch = stack.pin.commit, branch_name(stack)
    checkouts.check_pin(checkouts.find(checkout), stack.pin)
    quiet = ("-c", f"core.hooksPath={os.devnull}", "-c", "advice.detachedHead=false")
    if folder.exists():
        _check_ours(checkout, folder)
        if git("rev-parse", "--abbrev-ref", "HEAD", cwd=folder).strip() == branch:
            return folder
        git(*quiet, "checkout", "-q", "--detach", commit, cwd=folder)
    else:
        git("worktree", "prune", cwd=checkout)
        git(*quiet, "worktree", "add", "--detach", str(folder), commit, cwd=checkout)
    for patch in stack.patches:
        try:
            git(*quiet, "am", "-k", "--no-3way", str(patch.path), cwd=folder)
        except GraftError as wrong:
            git("am", "--abort", cwd=folder, check=False)
            raise GraftError(
                f"{patch.name} does not apply to {checkout}: {wrong.message}",
                next="graft edit --source CHECKOUT, fix the commit, then graft refresh",
            ) from wrong
    _check_commits(stack, folder)
    # The name is ours and says what it holds: moving it loses nothing.
    git(*quiet, "checkout", "-q", "-B", branch, cwd=folder)
    _add_submodules(checkout, folder)
    return folder


def _check_ours(checkout: Path, folder: Path) -> None:
    """The worktree must be this checkout's, and hold no change that a checkout would lose."""
    where = ("rev-parse", "--path-format=absolute", "--git-common-dir")
    same = (folder / ".git").exists() and git(*where, cwd=folder) == git(*where, cwd=checkout)
    if not same:
        raise GraftError(
            f"{folder} is not a worktree of {checkout}", next=f"remove {folder}, then again"
        )
    dirty = git("status", "--porcelain", "-uno", "--ignore-submodules", cwd=folder).splitlines()
    if dirty:
        raise GraftError(
            f"{folder} has changes of its own in {', '.join(line[3:] for line in dirty)}",
            next=f"git -C {folder} stash, then the same command",
        )


def _check_commits(stack: Stack, folder: Path) -> None:
    """Every file must be the blob that the last patch says: am takes offsets silently."""
    for path, blob in stack.files.items():
        listed = git("ls-tree", "HEAD", "--", path, cwd=folder).split()
        found = listed[2] if listed else NULL_BLOB
        if found != blob:
            raise GraftError(
                f"the stack leaves {path} as {found[:12]} in a checkout, and as {blob[:12]} by its "
                "patch files",
                next="graft edit, fix the commit, then graft refresh",
            )


def _add_submodules(checkout: Path, folder: Path) -> None:
    """Check the checkout's submodules out beside, from its own clones: nothing is downloaded.

    Those that the checkout does not have are left to PyTorch's build, which fetches them.
    """
    for path in _submodules(checkout):
        target = folder / path
        if (checkout / path / ".git").exists() and not (target / ".git").exists():
            commit = git("rev-parse", f"HEAD:{path}", cwd=folder).strip()
            git("worktree", "prune", cwd=checkout / path)
            git("worktree", "add", "-f", "--detach", str(target), commit, cwd=checkout / path)
            _add_submodules(checkout / path, target)


def _submodules(checkout: Path) -> list[str]:
    if not (checkout / ".gitmodules").exists():
        return []
    listed = git("config", "-z", "-f", ".gitmodules", "--get-regexp", r"\.path$", cwd=checkout)
    return [entry.partition("\n")[2] for entry in listed.split("\0") if entry]


def build_command(python: Path) -> list[str]:
    """PyTorch's own way to build a checkout in place (its CONTRIBUTING.md)."""
    return [str(python), "-m", "pip", "install", "--no-build-isolation", "-v", "-e", "."]
