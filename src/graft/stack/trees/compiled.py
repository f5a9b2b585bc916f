"""A patched tree that is PyTorch's own build of a checkout with the stack applied as commits."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from graft.errors import GraftError
from graft.stack import Stack
from graft.stack.trees import caches, source, tree
from graft.stack.trees.bases import Base
from graft.stack.trees.tree import Tree

PACKAGES = ("torch", "torchgen", "functorch")
"""What an in-place build leaves in the checkout's root, importable."""


def worktree_of(prefix: Path) -> Path:
    """Where the checkout is built: kept beside the tree, so that the next build is incremental."""
    return tree.work_dir(prefix) / f"{prefix.name}.checkout"


def build(base: Base, stack: Stack, checkout: Path, prefix: Path) -> Tree:
    """Build `checkout` with the stack, in a worktree of its own, into an environment at `prefix`.

    The base lends its interpreter and its packages (pip, cmake, ninja, ...); nothing is installed
    into it. Raises GraftError when the stack does not apply or the build fails; the earlier tree
    is still there then.
    """
    prefix = prefix.absolute()
    with tree.locked(prefix):
        tree.refuse_foreign(prefix)
        folder = source.worktree(checkout, stack, worktree_of(prefix))
        names = tuple(patch.name for patch in stack.patches)
        made = Tree(
            prefix=prefix,
            base=base.with_source(folder),
            pin=stack.pin.name,
            patches=names,
            stack_hash=stack.hash,
            files=dict(stack.tree_files),
            recipe=tree.recipe(base, stack.pin, stack.hash, names, f"compiled from {checkout}"),
            compiled=True,
        )
        aside = tree.work_dir(prefix) / f"{prefix.name}.new"
        with tree.explaining(prefix):
            try:
                _fill(made, folder, aside)
                tree.swap(aside, prefix)
            finally:
                with contextlib.suppress(OSError):
                    shutil.rmtree(aside)
    return made


def _fill(made: Tree, folder: Path, aside: Path) -> None:
    site = tree.make_environment(made, aside)
    env = caches.stock_environ(os.environ)
    env.pop("PYTHONPATH", None)
    command = source.build_command(aside / "bin" / "python")
    done = subprocess.run(command, cwd=folder, env=env, check=False)
    if done.returncode:
        raise GraftError(
            f"PyTorch's own build failed in {folder} (exit code {done.returncode}; its words are "
            "above)",
            next="fix what it names, then the same command: what was built is kept",
        )
    # Path entries come before an editable install's finder, and the base's torch is on the path.
    for name in PACKAGES:
        if (folder / name).is_dir() and not (site / name).exists():
            (site / name).symlink_to(folder / name)
    tree.finish_environment(made, aside)
