"""A user's PyTorch checkout, in which the stack becomes commits without being in anyone's way.

Its branch, index and files are never touched. Work is done in a worktree of its own, inside the
checkout's ``.git``, that holds the few files of the stack and is gone when the work ends; what
remains is objects, and the branches that are made from them in one step.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import signal
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from graft.errors import GraftError, UsageError, refused
from graft.stack.git import NULL_BLOB, GitFailed, git
from graft.stack.pins import Pin

UPSTREAM = "pytorch/pytorch"
MADE = "refs/graft/exported/"
"""Where it is remembered at which commit an export left a branch, by the branch's name."""

# The checkout's configuration may hold any of these, and each would change what is made, or would
# change something else beside it.
_SETTINGS: Mapping[str, str] = {
    "advice.detachedHead": "false",
    "apply.whitespace": "nowarn",
    "commit.gpgSign": "false",
    "core.attributesFile": os.devnull,
    "core.autocrlf": "false",
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.quotePath": "false",
    "core.sparseCheckout": "true",
    "core.sparseCheckoutCone": "false",
    "fetch.recurseSubmodules": "false",
    "gc.auto": "0",
    "i18n.commitEncoding": "UTF-8",
    "index.sparse": "false",
    "maintenance.auto": "false",
    "merge.conflictStyle": "merge",
    "rebase.autoSquash": "false",
    "rebase.autoStash": "false",
    "rebase.updateRefs": "false",
    "rerere.enabled": "false",
    "safe.directory": "*",  # `find` has asked the user's own git
    "submodule.recurse": "false",
}


def _as_environment(settings: Mapping[str, str]) -> dict[str, str]:
    env = {"GIT_CONFIG_COUNT": str(len(settings))}
    for at, (key, value) in enumerate(settings.items()):
        env |= {f"GIT_CONFIG_KEY_{at}": key, f"GIT_CONFIG_VALUE_{at}": value}
    return env


_ENVIRONMENT = _as_environment(_SETTINGS)


@dataclass(frozen=True)
class Remote:
    """A remote of a checkout: its name there, and the repository that it is (``owner/name``).

    `repository` is None where the URL is not one of a hosted repository; `host` is then empty.
    """

    name: str
    host: str
    repository: str | None

    @property
    def owner(self) -> str:
        """The first part of `repository`."""
        return (self.repository or "").partition("/")[0]


@dataclass(frozen=True)
class Checkout:
    """A git checkout: its folder, and the folder that all its worktrees share (``.git``)."""

    path: Path
    common: Path
    shallow: bool

    @property
    def shown(self) -> str:
        """Its path, for a command to type."""
        return shlex.quote(str(self.path))

    def git(
        self,
        *args: str,
        cwd: Path | None = None,
        input: str | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> str:
        """Run git here, or in `cwd`, whatever is configured."""
        env = {**_ENVIRONMENT, **(env or {})}
        return git(*args, cwd=cwd or self.path, input=input, env=env, check=check)

    def as_user(self, *args: str, check: bool = True) -> str:
        """Run git here as the user would, with their identity, remotes and credentials."""
        return git(*args, cwd=self.path, as_user=True, check=check)

    def commit(self, name: str) -> str | None:
        """The id of the commit that `name` means; None where it means none."""
        try:
            return self.git("rev-parse", "--verify", "-q", f"{name}^{{commit}}").strip()
        except GitFailed:
            return None

    def ref(self, name: str) -> str | None:
        """What the ref of this full name points to; None where there is none."""
        try:
            return self.git("rev-parse", "--verify", "-q", name).strip()
        except GitFailed:
            return None

    def blobs(self, commit: str, paths: Collection[str]) -> dict[str, str]:
        """Path -> blob id in `commit`; forty zeros where it has no such file."""
        listed = self.git("ls-tree", "-z", commit, "--", *paths).split("\0")[:-1]
        there = {path: info.split()[2] for info, _, path in (e.partition("\t") for e in listed)}
        return {path: there.get(path, NULL_BLOB) for path in paths}

    def identity(self) -> Mapping[str, str]:
        """Whose commits they will be: the user's own name and address, as git's environment.

        Raises GraftError where none is set.
        """
        try:
            said = self.as_user("-c", "user.useConfigOnly=true", "var", "GIT_AUTHOR_IDENT")
        except GitFailed as unknown:
            raise GraftError(
                f"git does not know whose commits to make in {self.path}: name and address are "
                "not set",
                f"git -C {self.shown} config user.name NAME, and user.email ADDRESS (the one that "
                "signed upstream's CLA)",
            ) from unknown
        found = re.fullmatch(r"(.*) <(.*)> \d+ [-+]\d+", said.strip())
        assert found, said  # the one form that git prints
        return {
            f"GIT_{who}_{what}": value
            for who in ("AUTHOR", "COMMITTER")
            for what, value in (("NAME", found[1]), ("EMAIL", found[2]))
        }


def find(path: Path) -> Checkout:
    """The checkout whose root is `path`.

    Raises UsageError where it is none, GraftError where the user's git refuses to look at it.
    """
    if not path.is_dir():
        raise UsageError(f"there is no folder {path}", "the command with a PyTorch checkout")
    path = path.resolve()
    asked = ("--path-format=absolute", "--git-common-dir", "--is-shallow-repository")
    # A folder inside another repository is not a checkout of PyTorch: look no further up.
    above = {"GIT_CEILING_DIRECTORIES": str(path.parent)}
    try:
        said = git("rev-parse", *asked, cwd=path, env=above, as_user=True)
    except GitFailed as refused:
        if "not a git repository" in refused.words:
            raise UsageError(
                f"{path} is not the root of a git checkout",
                f"git clone https://github.com/{UPSTREAM}, and the command with its path",
            ) from refused
        where = shlex.quote(str(path))
        unsafe = f"git config --global --add safe.directory {where}"
        raise GraftError(
            f"git refuses to look at {path}: {last_words(refused.words)}",
            unsafe if "safe.directory" in refused.words else f"git -C {where} status",
        ) from refused
    common, shallow = said.splitlines()
    return Checkout(path, Path(common), shallow == "true")


def check_pin(checkout: Checkout, pin: Pin) -> None:
    """Raise GraftError unless the checkout has the pin's commit, with the fetch that brings it."""
    if checkout.commit(pin.commit) is not None:
        return
    named = next((r.name for r in remotes(checkout) if r.repository == UPSTREAM), None)
    depth = "--depth 1 " if checkout.shallow else ""  # would cut off the history of a whole clone
    raise GraftError(
        f"{checkout.path} does not have {pin.name} (commit {pin.commit[:12]})",
        f"git -C {checkout.shown} fetch {depth}{named or f'https://github.com/{UPSTREAM}'} "
        f"{pin.commit}, then the same command",
    )


# --- a worktree of its own -----------------------------------------------------------------------


@contextlib.contextmanager
def worktree(checkout: Checkout, commit: str, paths: Collection[str]) -> Iterator[Path]:
    """A worktree at `commit` that holds the files `paths` alone, for as long as it is needed.

    It goes away however the work ends; one that a killed process left is taken away first. Raises
    GraftError where another process is at work in the checkout, and for what the file system
    refuses.
    """
    folder = checkout.common / "graft" / "export"
    try:
        with _alone(checkout), _ends_as_interrupt():
            try:
                _remove(checkout, folder)
                _make(checkout, folder, commit, paths)
                yield folder
            finally:
                _remove(checkout, folder)
    except OSError as wrong:
        raise refused(wrong, checkout.common, _writable_copy(checkout)) from wrong


def _writable_copy(checkout: Checkout) -> str:
    return f"git clone {checkout.shown} DIR, then the same command with DIR"


def _make(checkout: Checkout, folder: Path, commit: str, paths: Collection[str]) -> None:
    try:
        add = ("worktree", "add", "-q", "--no-checkout", "--detach")
        checkout.git(*add, str(folder), commit)
        own = checkout.git("rev-parse", "--absolute-git-dir", cwd=folder).strip()
        patterns = "".join(f"/{path}\n" for path in sorted(paths))
        (Path(own) / "info").mkdir(exist_ok=True)
        (Path(own) / "info" / "sparse-checkout").write_text(patterns)
        checkout.git("read-tree", "-m", "-u", commit, cwd=folder)
    except GitFailed as failed:
        raise GraftError(
            f"cannot work in {checkout.common}: {last_words(failed.words)}",
            f"make room there; or {_writable_copy(checkout)}",
        ) from failed


@contextlib.contextmanager
def _alone(checkout: Checkout) -> Iterator[None]:
    """Hold the checkout's lock: its ``.git`` itself, so that no file is left."""
    held = os.open(checkout.common, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as taken:
        raise GraftError(
            f"another graft export or submit is at work in {checkout.path}",
            "wait until it has ended, then the same command",
        ) from taken
    finally:
        os.close(held)


@contextlib.contextmanager
def _ends_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind as Ctrl-C does, so that what was begun is taken away."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _remove(checkout: Checkout, folder: Path) -> None:
    """Take the worktree away, and git's note of it, whole or half-made.

    ``git worktree prune`` would do it for every worktree whose folder is not there just now.
    """
    shutil.rmtree(folder, ignore_errors=True)
    notes = checkout.common / "worktrees"
    for note in notes.glob("*"):
        try:
            is_ours = Path((note / "gitdir").read_text().strip()) == folder / ".git"
        except OSError:
            # git makes the note before it says of what: one without is of a process that was killed
            is_ours = note.name.startswith(folder.name) and not (note / "gitdir").exists()
        if is_ours:
            shutil.rmtree(note, ignore_errors=True)
    for empty in (folder.parent, notes):
        with contextlib.suppress(OSError):
            empty.rmdir()


# --- branches ------------------------------------------------------------------------------------


def check_branch(checkout: Checkout, branch: str, *, force: bool) -> str | None:
    """Raise GraftError unless an export may make or move `branch`; returns where it is now.

    It may where there is none, where it is as an export left it, and with `force`; never where a
    worktree has it checked out.
    """
    try:
        checkout.git("check-ref-format", "--branch", branch)
    except GitFailed as wrong:
        raise UsageError(f"{branch!r} is no name for a branch", "another --branch") from wrong
    now = checkout.ref(f"refs/heads/{branch}")
    if now is not None and now != checkout.ref(f"{MADE}{branch}") and not force:
        raise GraftError(
            f"{checkout.path} has a branch {branch} that is not as graft export left it",
            f"the same command with --branch OTHER; or with --force, which moves it away from "
            f"{now[:12]}",
        )
    return now


def set_branch(checkout: Checkout, branch: str, commit: str, *, force: bool) -> bool:
    """Make `branch` point to `commit`, in one step; False where it did.

    Raises what `check_branch` raises, and GraftError where a worktree has the branch checked out:
    its files would be behind.
    """
    now = check_branch(checkout, branch, force=force)
    if now != commit and (there := _checked_out(checkout).get(f"refs/heads/{branch}")):
        raise GraftError(
            f"branch {branch} is checked out in {there}, and would move under its files",
            f"git -C {shlex.quote(there)} switch --detach, or the same command with --branch OTHER",
        )
    lines = [
        f"update refs/heads/{branch} {commit} {now or NULL_BLOB}",
        f"update {MADE}{branch} {commit}",
    ]
    try:
        checkout.git("update-ref", "--stdin", input="".join(f"{line}\n" for line in lines))
    except GitFailed as failed:
        raise GraftError(
            f"cannot make branch {branch}: {last_words(failed.words)}",
            "the same command with --branch OTHER, or fix what git names",
        ) from failed
    return now != commit


def _checked_out(checkout: Checkout) -> dict[str, str]:
    """Branch (full name) -> the worktree that has it checked out."""
    found, folder = {}, ""
    for line in checkout.git("worktree", "list", "--porcelain").splitlines():
        key, _, value = line.partition(" ")
        if key == "worktree":
            folder = value
        elif key == "branch":
            found[value] = folder
    return found


# --- remotes -------------------------------------------------------------------------------------

_URL = re.compile(
    r"(?:[a-z+]+://)?(?:[^@/]+@)?([^/:@]+\.[^/:@]+)(?::\d+)?[:/]/?([^/]+)/([^/]+?)(\.git)?/?"
)


def remotes(checkout: Checkout) -> list[Remote]:
    """The remotes that the checkout has."""
    return [remote(checkout, name) for name in checkout.as_user("remote").split()]


def remote(checkout: Checkout, name: str) -> Remote:
    """The remote called `name`. Raises UsageError where there is none."""
    try:
        urls = [
            checkout.as_user("remote", "get-url", "--push", name).strip(),
            checkout.as_user("config", "--get", f"remote.{name}.url").strip(),
        ]
    except GitFailed as missing:
        names = checkout.as_user("remote").split()
        raise UsageError(
            f"{checkout.path} has no remote {name}; it has: {', '.join(names) or 'none'}",
            f"git -C {checkout.shown} remote add {name} URL",
        ) from missing
    # The first is where a push goes; the second is the name that an `insteadOf` was given for.
    found = next((match for url in urls if (match := _URL.fullmatch(url))), None)
    return Remote(name, found[1], f"{found[2]}/{found[3]}") if found else Remote(name, "", None)


def upstream_remote(checkout: Checkout) -> str:
    """The name of the remote that is PyTorch's repository; ``origin`` where none is."""
    return next((each.name for each in remotes(checkout) if each.repository == UPSTREAM), "origin")


def default_branch(checkout: Checkout, name: str, *, fetch: bool) -> str:
    """The default branch of a remote, brought up to date in ``refs/remotes/`` with `fetch`.

    Raises GraftError where the remote cannot be reached; without `fetch`, where the checkout does
    not know its branch.
    """
    if not fetch:
        said = checkout.git("symbolic-ref", "-q", f"refs/remotes/{name}/HEAD", check=False).strip()
        branch = said.removeprefix(f"refs/remotes/{name}/") if said.startswith("refs/") else "main"
        if checkout.ref(f"refs/remotes/{name}/{branch}") is None:
            raise GraftError(
                f"{checkout.path} has nothing of {name}'s branch {branch}",
                "the same command without --no-fetch",
            )
        return branch
    try:
        said = checkout.as_user("ls-remote", "--symref", name, "HEAD")
        found = re.search(r"^ref: refs/heads/(\S+)\tHEAD$", said, re.MULTILINE)
        branch = found[1] if found else "main"
        depth = ("--depth=1",) if checkout.shallow else ()
        checkout.as_user(
            *("-c", "fetch.recurseSubmodules=false", "fetch", "-q", "--no-tags"),
            *("--no-write-fetch-head", *depth, name),
            f"+refs/heads/{branch}:refs/remotes/{name}/{branch}",
        )
    except GitFailed as refused:
        raise GraftError(
            f"cannot fetch from {name}: {last_words(refused.words)}",
            f"git -C {checkout.shown} fetch {name}, until it works; or --no-fetch",
        ) from refused
    return branch


_PLAIN = re.compile(r"^! \[(?:remote )?rejected\] +\S+ -> (.*)")


def last_words(said: str) -> str:
    """Why git failed, in one line: what the remote said; else which refs it refused; else git."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    remote = [line for line in lines if line.startswith("remote: ") and "hook declined" not in line]
    refs = [f"{found[1]}" for line in lines if (found := _PLAIN.match(line))]
    own = [line for line in lines if line.startswith(("fatal:", "error:"))]
    telling = [line.removeprefix("remote: ") for line in remote] or refs or own or lines[-1:]
    shown = "; ".join(list(dict.fromkeys(telling))[:3]) or "no reason given"
    return re.sub(r"://[^/@\s]+@", "://", shown)  # a URL may hold a password
