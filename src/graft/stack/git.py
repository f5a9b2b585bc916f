"""Git, called the same way everywhere, whatever the caller's configuration says."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from graft.errors import GraftError

IDENTITY = {
    "NAME": "inductor-graft",
    "EMAIL": "inductor-graft@localhost",
    "DATE": "2026-01-01T00:00:00+0000",
}

FORMAT_PATCH_FLAGS: tuple[str, ...] = (
    "-k",
    "--zero-commit",
    "--full-index",
    "--no-signature",
    "--no-stat",
    "--no-renames",
    "--no-encode-email-headers",
)
"""How every patch file is written: nothing in it depends on who wrote it, where, or when."""

NULL_BLOB = "0" * 40


def _environment() -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env.update(
        GIT_CONFIG_GLOBAL=os.devnull,
        GIT_CONFIG_NOSYSTEM="1",
        GIT_TERMINAL_PROMPT="0",
        LC_ALL="C",
        TZ="UTC",
    )
    for who in ("AUTHOR", "COMMITTER"):
        env.update({f"GIT_{who}_{key}": value for key, value in IDENTITY.items()})
    return env


ENV: dict[str, str] = _environment()
"""The environment of every git process: no configuration of the user's, a fixed identity."""


class GitFailed(GraftError):
    """Git ended with an error; `words` is all that it said."""

    def __init__(self, message: str, words: str) -> None:
        super().__init__(message)
        self.words = words


def user_environment() -> dict[str, str]:
    """The caller's own environment, for what needs their identity, remotes and credentials.

    Left out is what git sets for a hook: it would name another repository than `cwd` does.
    """
    ours = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")
    env = {key: value for key, value in os.environ.items() if key not in ours}
    return {**env, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


def git(
    *args: str,
    cwd: Path | str,
    input: str | bytes | None = None,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    as_user: bool = False,
) -> str:
    """Run git in `cwd` and return what it printed.

    `env` adds to `ENV`, or with `as_user` to `user_environment`. Text travels as UTF-8; bytes that
    are not are kept (surrogateescape). Raises GitFailed with git's own words when it fails and
    `check` is set, and GraftError when there is no git. With ``check=False`` a failure returns what
    was printed, stderr included.
    """
    data = input.encode("utf-8", "surrogateescape") if isinstance(input, str) else input
    try:
        done = subprocess.run(
            ["git", *args],
            cwd=cwd,
            input=data if data is not None else b"",
            capture_output=True,
            env={**(user_environment() if as_user else ENV), **(env or {})},
            check=False,
        )
    except FileNotFoundError as missing:
        if not Path(cwd).is_dir():
            raise GraftError(f"git {args[0]}: there is no folder {cwd}") from missing
        raise GraftError(
            "there is no git on the PATH, and patches are applied with it",
            next="install git (apt-get install git, dnf install git), then the same command",
        ) from missing
    out = done.stdout.decode("utf-8", "surrogateescape")
    if done.returncode == 0:
        return out
    words = done.stderr.decode("utf-8", "replace").strip()
    if not check:
        return f"{out}{words}"
    said = words or out.strip()
    raise GitFailed(f"git {' '.join(args)} failed in {cwd}: {said}", f"{out}{words}")


def blob_id(data: bytes) -> str:
    """The id that git gives a file of these bytes (SHA-1 of ``blob <size>\\0<data>``)."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
