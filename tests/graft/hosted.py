"""A PyTorch checkout, and a GitHub of two parts: a bare repository that is pushed to, and ghstack's
own fake of the rest. The checkout believes that it talks to github.com."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ghstack.github_fake
import ghstack.shell
import unidiff
from tinytorch import CONFIG, SCHEDULER, TORCH, Commit, make_patches, make_root, write_files

from graft import stack
from graft.places import ROOT
from graft.stack import Patch, Stack, ghstack_session, pins, refresh, submit
from graft.stack.ghstack_session import Connection, Options, Session
from graft.stack.git import git
from graft.stack.pins import Pin
from graft.stack.submit import Plan

UPSTREAM = "https://github.com/pytorch/pytorch"
FORK = "https://github.com/me/pytorch"
RELEASE = {
    **{path: text for path, text in TORCH.items() if path.startswith("torch/")},
    "test/inductor/test_old.py": "OLD = 1\n",
    "version.txt": "2.11.0a0\n",
}

CAP = (
    "[inductor] Cap the reads of a kernel\n\nEach read costs registers.\n\n"
    "Test plan: python test/inductor/test_reads.py\n",
    {
        "torch/_inductor/config.py": CONFIG.replace(
            "    max_tiles = None\n", "    max_tiles = None\n    max_reads = 10\n"
        ),
        "torch/_inductor/reads.py": "def count():\n    return 3\n",
        "test/inductor/test_reads.py": "def test_reads():\n    assert True\n",
    },
)
SPLIT = (
    "[inductor] Split the rows of a step\n\nOne program was left to do all of them.\n",
    {"torch/_inductor/scheduler.py": SCHEDULER.replace("return 5\n", "return 55\n")},
)
TILES = (
    "[inductor] Tile both directions\n\nEither is read at one speed then.\n",
    {"torch/_inductor/codegen/simd.py": "TILES = 4\n"},
)


def amended(commit: Commit, files: Mapping[str, str | None]) -> Commit:
    """The same commit with other contents."""
    return commit[0], {**commit[1], **files}


def configure(checkout: Path) -> None:
    """Give a repository a user of its own."""
    git("config", "user.name", "A User", cwd=checkout)
    git("config", "user.email", "user@example.org", cwd=checkout)


def commit_all(checkout: Path, message: str) -> str:
    """Commit what there is; returns the commit."""
    git("add", "-A", "-f", cwd=checkout)
    git("commit", "-q", "-m", message, cwd=checkout)
    return git("rev-parse", "HEAD", cwd=checkout).strip()


def make_checkout(folder: Path, files: Mapping[str, str] = RELEASE) -> str:
    """A repository in `folder` of a release of PyTorch, with a user; returns the commit."""
    folder.mkdir(parents=True)
    git("init", "-q", "-b", "main", cwd=folder)
    configure(folder)
    write_files(folder, files)
    return commit_all(folder, "release")


def write_series(root: Path, pin: Pin, commits: Sequence[Commit], lines: Sequence[str]) -> Stack:
    """Make `commits` the stack of a repository; `lines` are behind their names in the series."""
    home = root / "patches" / pin.name
    kept = (home / "submitted.toml").read_bytes() if (home / "submitted.toml").exists() else None
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    if kept is not None:
        (home / "submitted.toml").write_bytes(kept)
    shutil.rmtree(root / "made", ignore_errors=True)
    names = [refresh.file_name(message.partition("\n")[0]) for message, _ in commits]
    for name, text in zip(names, make_patches(root / "made", commits), strict=True):
        (home / name).write_bytes(text)
    behind = [*lines, *[""] * (len(names) - len(lines))]
    (home / "series").write_text("".join(f"{n}{b}\n" for n, b in zip(names, behind, strict=True)))
    pins.save(pin, root)
    return stack.load(pin, root)


def wheel_checkout(folder: Path) -> tuple[Stack, str]:
    """A checkout of the files of the installed torch, and the stack of this repository, pinned to
    its commit."""
    import torch

    package = Path(torch.__file__).resolve().parent / "_inductor"
    folder.mkdir(parents=True)
    git("init", "-q", "-b", "main", cwd=folder)
    configure(folder)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, folder / "torch/_inductor", ignore=ignore, symlinks=False)
    pin = pins.load()
    whole = stack.load(pin, ROOT)
    write_files(folder, {"version.txt": "2.11.0a0\n", **upstream_tests_of(whole.patches)})
    commit = commit_all(folder, "release")
    return replace(whole, pin=replace(pin, commit=commit)), commit


def upstream_tests_of(patches: Sequence[Patch]) -> dict[str, str]:
    """Stand-ins for upstream's tests that patches change, which no wheel has: the lines that the
    hunks want, where they want them, between empty ones."""
    made: dict[str, list[str]] = {}
    ours = {change.path for patch in patches for change in patch.files if change.is_new}
    for patch in patches:
        for file in unidiff.PatchSet(patch.text.decode()):
            if file.path in ours or not file.path.startswith("test/"):
                continue
            lines = made.setdefault(file.path, [])
            for hunk in file:
                lines += [""] * (hunk.source_start + hunk.source_length - len(lines))
                for at, line in enumerate(hunk.source_lines(), hunk.source_start - 1):
                    lines[at] = line.value.rstrip("\n")
    return {path: "\n".join(lines) + "\n" for path, lines in made.items()}


class GitHub(ghstack.github_fake.FakeGitHubEndpoint):
    """ghstack's fake, with the one call that graft makes and ghstack does not: the pull requests of
    a branch. It can break down at a call (`fails`: method, end of the path), once it has answered
    so many of them; with `after`, when what was asked for is done."""

    fails: tuple[str, str] | None = None
    calls_left = 0
    after = False

    async def arest(self, method: str, path: str, **values: Any) -> Any:
        breaks = False
        if self.fails and method == self.fails[0] and path.endswith(self.fails[1]):
            breaks, self.calls_left = self.calls_left == 0, self.calls_left - 1
        if breaks and not self.after:
            raise RuntimeError("502 Bad Gateway")
        if method == "get" and "/pulls?state=open&head=pytorch:" in path:
            head = path.rpartition(":")[2]
            open_ = [pr for pr in self.state.pull_requests.values() if not pr.closed]
            return [
                {"number": int(pr.number), "title": pr.title}
                for pr in open_
                if pr.headRefName == head
            ]
        answer = await super().arest(method, path, **values)
        if breaks:
            raise RuntimeError("502 Bad Gateway")
        return answer


@dataclass
class Hosted:
    """The repository of patches, the checkout, what GitHub holds, and a fork of it."""

    root: Path
    checkout: Path
    bare: Path
    fork: Path
    github: GitHub
    pin: Pin
    commits: list[Commit] = field(default_factory=list)

    def series(self, *commits: Commit, behind: Sequence[str] = ()) -> Stack:
        """Make these the stack."""
        self.commits = list(commits)
        return write_series(self.root, self.pin, commits, behind)

    @property
    def stack(self) -> Stack:
        return stack.load(self.pin, self.root)

    def plan(self) -> Plan:
        return submit.plan(self.checkout, self.stack, root=self.root)

    def send(self, **options: Any) -> Session:
        return ghstack_session.send(self.plan(), self.connection, Options(**options))

    @property
    def connection(self) -> Connection:
        return Connection("me", self.github)

    def push_main(self, files: Mapping[str, str | None], message: str = "elsewhere") -> None:
        """Upstream goes on: another commit on its main."""
        other = self.root.parent / "other"
        shutil.rmtree(other, ignore_errors=True)
        git("clone", "-q", str(self.bare), str(other), cwd=self.root)
        configure(other)
        write_files(other, files)
        commit_all(other, message)
        git("push", "-q", "origin", "main", cwd=other)

    def refuse(self, pattern: str, repository: Path | None = None) -> None:
        """Let the remote refuse each ref that fits a shell pattern ('' for none)."""
        hook = (repository or self.bare) / "hooks" / "update"
        refuse = 'echo "policy: $1 is not for you" >&2; exit 1'
        hook.write_text(f'#!/bin/sh\ncase "$1" in {pattern or "nothing"}) {refuse};; esac\n')
        hook.chmod(0o755)

    def pulls(self) -> dict[int, Any]:
        """The pull requests, by number."""
        return {int(pr.number): pr for pr in self.github.state.pull_requests.values()}

    def git(self, *args: str) -> str:
        """Git in what was pushed."""
        return git(*args, cwd=self.bare)

    def patch_of(self, number: int) -> set[str]:
        """The files that a pull request shows as changed."""
        pr = self.pulls()[number]
        return set(self.git("diff", "--name-only", pr.baseRefName, pr.headRefName).split())


def make_hosted(folder: Path, name: str = "pytorch") -> Hosted:
    """A release, and upstream's main one commit after it; nothing submitted yet."""
    checkout, bare, fork = folder / name, folder / "bare", folder / "fork"
    commit = make_checkout(checkout)
    bare.mkdir()
    github = GitHub(ghstack.shell.Shell(cwd=str(bare), testing=True))
    asyncio.run(github.state.initialize())
    git("init", "-q", "--bare", "-b", "main", str(fork), cwd=folder)
    for remote, url, where in (("origin", UPSTREAM, bare), ("me", FORK, fork)):
        git("remote", "add", remote, url, cwd=checkout)
        git("config", f"url.{where}.insteadOf", url, cwd=checkout)
    write_files(checkout, {"version.txt": "2.14.0a0\n", "torch/_inductor/later.py": ""})
    commit_all(checkout, "development")
    git("push", "-q", "-f", "origin", "main", cwd=checkout, as_user=True)
    root = make_root(folder)
    pin = replace(pins.load(root=root), commit=commit)
    made = Hosted(root, checkout, bare, fork, github, pin)
    made.series(CAP, SPLIT, TILES)
    return made
