"""`graft submit`: the stack on a repository's default branch, exactly, and what of it was sent.

`prepare` is what every way to send has in common: `graft.stack.ghstack_session` sends it as pull
requests, `graft.stack.fork` as branches, and a dry run not at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from graft import stack as stacks
from graft.errors import GraftError, UsageError
from graft.places import ROOT
from graft.stack import Patch, Stack, Status, export, journal, submitted, trailers
from graft.stack import checkout as checkouts
from graft.stack.checkout import UPSTREAM, Checkout, Remote
from graft.stack.export import Export, Target
from graft.stack.submitted import Pull, Submitted


@dataclass(frozen=True)
class Plan:
    """A stack, and where it is to go: the repository that is `remote`, on its branch `base`."""

    checkout: Checkout
    stack: Stack
    remote: Remote
    repository: str
    base: str
    root: Path = ROOT

    @property
    def onto(self) -> Target:
        """The commit that the stack is put on."""
        name = f"{self.remote.name}/{self.base}"
        return replace(export.find_target(self.checkout, f"refs/remotes/{name}"), name=name)

    @property
    def to_send(self) -> tuple[Patch, ...]:
        """The patches that the series does not say are in the release that `base` is on."""
        onto = self.onto
        return tuple(patch for patch in self.stack.patches if not onto.has(patch, self.stack.pin))

    def sent(self) -> Submitted:
        """What was sent before, of all of the pin's patches, to any repository."""
        return submitted.load(self.stack.pin, self.root)

    def pulls(self) -> Mapping[str, Pull]:
        """The pull requests of this repository, by patch."""
        return self.sent().pulls.get(self.repository, {})

    def url(self, number: int) -> str:
        """The page of a pull request."""
        return f"https://{self.remote.host}/{self.repository}/pull/{number}"

    def record(self, sent: Submitted) -> None:
        """Write what was sent; for upstream's own repository the series says it too.

        The caller holds `graft.stack.journal.alone`.
        """
        changes: dict[Path, bytes | None] = {
            submitted.file(self.stack.pin, self.root): sent.render()
        }
        if self.repository == UPSTREAM:
            series = stacks.series_file(self.stack.pin, self.root)
            changes[series] = _series(series.read_text("utf-8"), sent.pulls.get(UPSTREAM, {}))
        journal.write(
            self.root,
            {p: d for p, d in changes.items() if d != (p.read_bytes() if p.exists() else None)},
        )


def _series(text: str, pulls: Mapping[str, Pull]) -> bytes:
    """The series, with the number of each patch that it says was not sent."""
    lines = []
    for line in text.splitlines():
        name, status = "", Status()
        if line.strip() and not line.startswith("#"):
            name, status = stacks.read_line(line, "series")
        if name in pulls and status.upstream == "not sent":
            line = stacks.write_line(name, Status(status.origin, f"pytorch#{pulls[name].number}"))
        lines.append(line)
    return "".join(f"{line}\n" for line in lines).encode()


def plan(
    path: Path,
    stack: Stack,
    *,
    remote: str | None = None,
    fetch: bool = True,
    root: Path = ROOT,
) -> Plan:
    """What the stack would be sent to from the checkout at `path`.

    Without `remote` it is the one that is PyTorch's repository, or ``origin``. Raises GraftError
    for a checkout or remote that is not as expected, or cannot be reached with `fetch`.
    """
    checkout = checkouts.find(path)
    checkouts.check_pin(checkout, stack.pin)
    where = checkouts.remote(checkout, remote or checkouts.upstream_remote(checkout))
    if where.repository is None:
        raise UsageError(
            f"the URL of remote {where.name} is not one of a repository on GitHub",
            f"the command with --remote NAME; git -C {checkout.shown} remote -v has the names",
        )
    base = checkouts.default_branch(checkout, where.name, fetch=fetch)
    return Plan(checkout, stack, where, where.repository, base, root)


@contextlib.contextmanager
def prepare(
    plan: Plan,
    pulls: Mapping[str, Pull] | None = None,
    show: Callable[[Export], None] = lambda made: None,
) -> Iterator[Export]:
    """The stack as the commits that will be sent, under messages that name `pulls`.

    `show` is told what became of each patch. Raises GraftError unless every patch applies, and the
    commits that are there beyond the repository's branch are the stack and nothing else.
    """
    known = pulls or {}
    messages = {
        patch.name: trailers.write(
            patch.message, plan.url(pull.number), pull.source_id, pull.comment_id
        )
        for patch in plan.stack.patches
        if (pull := known.get(patch.name))
    }
    with export.opened(plan.checkout, plan.stack, plan.onto, messages) as made:
        show(made)
        made.check(
            f"write 'in RELEASE' behind what upstream has in patches/{plan.stack.pin.name}/series; "
            "for the others graft pin add RELEASE, fix them there, and graft submit --pin RELEASE"
        )
        base = f"refs/remotes/{plan.remote.name}/{plan.base}"
        check_exact(made, made_beyond(made, base), base)
        yield made


def made_beyond(made: Export, base: str) -> list[str]:
    """The commits of the export that `base` does not have, oldest first."""
    asked = ("rev-list", "--reverse", "--topo-order", "HEAD", f"^{base}")
    return made.checkout.git(*asked, cwd=made.folder).split()


def check_exact(made: Export, would_send: list[str], base: str) -> None:
    """Raise GraftError unless `would_send`, oldest first, are the commits of the export."""
    if would_send != list(made.commits):
        others = [commit for commit in would_send if commit not in made.commits]
        extra = f", {len(others)} of them not the stack's ({others[0][:12]} …)" if others else ""
        raise GraftError(
            f"{len(would_send)} commits would be sent onto {base}, and the stack is "
            f"{len(made.commits)}{extra}",
            "the same command again, with nothing else at work in the checkout",
        )
