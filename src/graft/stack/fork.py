"""The stack as branches of a fork, for who may not push to the repository itself.

A branch a patch, each on the one before. GitHub's page that compares a branch with upstream is
where its pull request is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath

from graft.errors import GraftError, UsageError
from graft.stack import Patch, journal, submit
from graft.stack import checkout as checkouts
from graft.stack.checkout import Remote, last_words
from graft.stack.export import Export
from graft.stack.git import GitFailed
from graft.stack.submit import Plan
from graft.stack.submitted import Branch


@dataclass(frozen=True)
class Pushed:
    """One branch: `what` became of it (``created``, ``updated``, ``unchanged``), and two pages: all
    of it against upstream, and this patch alone."""

    patch: Patch
    branch: str
    what: str
    compare: str
    alone: str


def find(plan: Plan, name: str) -> Remote:
    """The fork that is the remote `name`. Raises UsageError where it is none."""
    fork = checkouts.remote(plan.checkout, name)
    if fork.repository is None or fork.repository == plan.repository:
        raise UsageError(
            f"remote {name} is {fork.repository or 'no repository on GitHub'}; expected a fork of "
            f"{plan.repository}",
            f"git -C {plan.checkout.shown} remote add NAME URL, then --fork NAME",
        )
    return fork


def pushes(plan: Plan, fork: Remote, made: Export) -> list[Pushed]:
    """What would be pushed: the branches in order, and their pages."""
    found: list[Pushed] = []
    whose = f"https://{fork.host}/{fork.repository}/compare"
    base = f"https://{plan.remote.host}/{plan.repository}/compare/{plan.base}..."
    repository = (fork.repository or "").partition("/")[2]
    who = (
        fork.owner
        if repository == plan.repository.partition("/")[2]
        else (f"{fork.owner}:{repository}")
    )
    for each in made.outcomes:
        if each.commit is None:
            continue
        branch = PurePath(each.patch.name).stem
        compare = f"{base}{who}:{branch}"
        alone = f"{whose}/{found[-1].branch}...{branch}" if found else compare
        found.append(Pushed(each.patch, branch, "", f"{compare}?expand=1", alone))
    return found


def send(plan: Plan, fork: Remote, *, force: bool = False) -> tuple[list[Pushed], list[str]]:
    """Push the branches and record them; returns them, and branches that no patch stands for.

    Raises GraftError for a branch that something else pushed (not with `force`), and, with what was
    pushed recorded, where the fork refuses; the next call goes on from there.
    """
    assert fork.repository is not None  # `find` has looked
    with journal.alone(plan.root), submit.prepare(plan) as made:
        wanted = pushes(plan, fork, made)
        commits = dict(zip([each.patch.name for each in wanted], made.commits))
        known = dict(plan.sent().branches.get(fork.repository, {}))
        there = _there(plan, fork)
        specs = []
        for each in wanted:
            now, commit = there.get(each.branch), commits[each.patch.name]
            was = known.get(each.patch.name)
            ours = {commit, was.commit, was.coming} if was else {commit}
            if now is not None and now not in ours and not force:
                raise GraftError(
                    f"{fork.name} has a branch {each.branch} that graft submit did not push",
                    f"git -C {plan.checkout.shown} push {fork.name} --delete {each.branch}; or the "
                    "same command with --force",
                )
            known[each.patch.name] = Branch(each.branch, now or commit, commit)
            if now != commit:
                lease = f"--force-with-lease=refs/heads/{each.branch}:{now or ''}"
                specs.append((lease, f"{commit}:refs/heads/{each.branch}"))
        _record(plan, fork, known)
        refused = _push(plan, fork, specs)
        done = _there(plan, fork)
        for each in wanted:
            if done.get(each.branch) == commits[each.patch.name]:
                known[each.patch.name] = Branch(each.branch, commits[each.patch.name])
        gone = known.keys() - plan.stack.names
        orphans = sorted(known[name].name for name in gone if known[name].name in done)
        for name in gone:
            if known[name].name not in done:
                del known[name]
        _record(plan, fork, known)
        if refused is not None:
            pushed = [each.branch for each in wanted if known[each.patch.name].coming is None]
            raise GraftError(
                f"{fork.name} refused the push: {refused}; {len(pushed)} of {len(wanted)} branches "
                "are there, and recorded",
                "fix it, then the same command: it goes on from there",
            )
        return [replace(e, what=_what(there, commits, e)) for e in wanted], orphans


def _what(there: Mapping[str, str], commits: Mapping[str, str], each: Pushed) -> str:
    before = there.get(each.branch)
    if before is None:
        return "created"
    return "unchanged" if before == commits[each.patch.name] else "updated"


def _there(plan: Plan, fork: Remote) -> dict[str, str]:
    """The fork's branches and their commits. Raises GraftError where it cannot be reached."""
    try:
        listed = plan.checkout.as_user("ls-remote", "--heads", fork.name)
    except GitFailed as refused:
        raise GraftError(
            f"cannot reach {fork.name}: {last_words(refused.words)}",
            f"git -C {plan.checkout.shown} ls-remote {fork.name}, until it works",
        ) from refused
    pairs = (line.split("\t") for line in listed.splitlines() if "\t" in line)
    return {ref.removeprefix("refs/heads/"): commit for commit, ref in pairs}


def _push(plan: Plan, fork: Remote, specs: list[tuple[str, str]]) -> str | None:
    """Push; what the fork said where it refused any, else None."""
    if not specs:
        return None
    leases, refs = zip(*specs)
    try:
        plan.checkout.as_user("push", "-q", "--no-verify", *leases, fork.name, *refs)
    except GitFailed as refused:
        return last_words(refused.words)
    return None


def _record(plan: Plan, fork: Remote, known: Mapping[str, Branch]) -> None:
    assert fork.repository is not None
    plan.record(plan.sent().with_branches(fork.repository, known))
