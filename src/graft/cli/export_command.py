"""What `graft export` and `graft submit` print."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from graft import stack
from graft.errors import UsageError
from graft.places import ROOT
from graft.stack import Series, Stack, export, pins
from graft.stack.export import Export
from graft.stack.pins import DEFAULT_PIN
from graft.stack.submit import Plan


def run_export(
    path: Path,
    pin: str | None,
    branch: str | None,
    onto: str | None,
    force: bool,
    series: str | None = None,
) -> None:
    """Put the stack, or one of its series, on a branch, and say what became of each patch."""
    with _patches(path, pin, series) as found:
        if series and not branch:
            branch = f"{export.branch_name(found, onto)}-{found.series_of(series).slug}"
        made, name, moved = export.export(path, found, branch=branch, onto=onto, force=force)
        show(made, found.series_of(series) if series else None)
        made.check()
    base = made.onto.name if made.onto else found.pin.commit[:12]
    commits = made.commits
    if series:
        own = [each for each in made.outcomes if each.patch.name in found.series_of(series).patches]
        count = sum(each.commit is not None for each in own)
        if count < len(commits):  # behind those that it needs
            base = commits[len(commits) - count - 1][:12]
        commits = commits[len(commits) - count :]
    said = f"{len(commits)} commits on {base}"
    click.echo(f"branch {name}: {said}" if moved else f"branch {name} is there: {said}")
    click.echo(f"git -C {shlex.quote(str(path))} log {base}..{name}")


@contextlib.contextmanager
def _patches(path: Path, pin: str | None, series: str | None) -> Iterator[Stack]:
    """The stack of a pin, or what `series` of it is where it goes."""
    whole = stack.load(pins.load(pin or DEFAULT_PIN, ROOT), ROOT)
    if series is None:
        yield whole
        return
    with export.of_series(path, whole, series) as found:
        yield found


def show(made: Export, series: Series | None = None) -> None:
    """A line a patch, of `series` or of all: what became of it, and where."""
    shown = [e for e in made.outcomes if series is None or e.patch.name in series.patches]
    width = max(len(each.state) for each in shown)
    for each in shown:
        click.echo(f"{each.state:{width}}  {each.patch.name}")
        for place in each.places:
            click.echo(f"{'':{width}}    {place}")


def run_submit(
    path: Path,
    pin: str | None,
    remote: str | None,
    fork: str | None,
    *,
    send: bool,
    fetch: bool,
    series: str | None = None,
    **options: Any,
) -> None:
    """Show what would be sent, or send it: as pull requests, or as branches of `fork`.

    Of one of the `series`: it, with those that it needs.
    """
    from graft.stack import submit

    if fork and (given := [name for name, value in options.items() if value and name != "force"]):
        shown = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{shown} is for pull requests, and --fork makes none", "one of the two")
    with _patches(path, pin, series) as found:
        plan = submit.plan(path, found, remote=remote, fetch=fetch, root=ROOT)
        if fork:
            _run_fork(plan, fork, send, options["force"])
        elif send:
            _send(plan, options)
        else:
            with submit.prepare(plan, plan.pulls(), show) as made:
                _show_pull_requests(plan, made)
            click.echo("\nnothing was sent; the same command with --send sends it")


def _show_pull_requests(plan: Plan, made: Export) -> None:
    pulls = plan.pulls()
    count = len(made.commits)
    click.echo(f"\n{plan.repository}, onto {plan.base}: {count} pull requests")
    for at, each in enumerate(e for e in made.outcomes if e.commit):
        pull = pulls.get(each.patch.name)
        click.echo(f"\n{at + 1}. {plan.url(pull.number) if pull else 'a new pull request'}")
        for line in each.patch.message.rstrip("\n").split("\n"):
            click.echo(f"   {line}".rstrip())


def _send(plan: Plan, options: dict[str, Any]) -> None:
    from graft.stack import ghstack_session as session

    done = session.send(plan, session.connect(), session.Options(**options))
    width = max((len(each.what) for each in done.sent), default=0)
    for each in done.sent:
        click.echo(f"{each.what:{width}}  {each.url}  {each.patch.subject}")
    orphans = [f"{url} is of no patch any more: close it" for url in done.orphans]
    _say_recorded(plan, orphans + [_of_leftover(plan, each) for each in done.leftovers])


def _of_leftover(plan: Plan, branches: str) -> str:
    where, name = plan.remote.host, plan.remote.name
    return (
        f"{branches} is of an interrupted submission; where "
        f"https://{where}/{plan.repository}/pulls?q=head:{branches}/head shows nothing: "
        f"git -C {plan.checkout.shown} push {name} --delete {branches}/base {branches}/head"
    )


def _run_fork(plan: Plan, name: str, send: bool, force: bool) -> None:
    from graft.stack import fork as forks
    from graft.stack import submit

    fork = forks.find(plan, name)
    if send:
        pushed, orphans = forks.send(plan, fork, force=force)
    else:
        with submit.prepare(plan, show=show) as made:
            pushed, orphans = forks.pushes(plan, fork, made), []
    for at, each in enumerate(pushed):
        what = f"{each.what}, " if each.what else ""
        click.echo(f"\n{at + 1}. {each.patch.subject}  ({what}branch {each.branch})")
        click.echo(f"   open     {each.compare}")
        if at:
            click.echo(f"   it alone {each.alone}")
    if send:
        here = plan.checkout.shown
        _say_recorded(
            plan,
            [
                f"of no patch any more: git -C {here} push {name} --delete {each}"
                for each in orphans
            ],
        )
    else:
        click.echo(f"\nnothing was pushed; the same command with --send pushes to {name}")


def _say_recorded(plan: Plan, notes: Iterable[str]) -> None:
    for note in notes:
        click.echo(f"note: {note}")
    click.echo(f"recorded in patches/{plan.stack.pin.name}: commit it")
