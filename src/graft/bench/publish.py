"""`graft bench publish`: what README and docs/measured.md show, of the stack as it is.

Each part of `bench/publish.toml` is a run of `graft bench` of its own, into `.graft/publish/`,
where a run that was cut goes on. A whole one is copied to `bench/results`: until then, what is
there stays as it was. The same command goes on, from one host to another too if the folder goes
with it.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from graft.bench import parts, results, tables
from graft.bench.parts import Kept, Part
from graft.errors import GraftError, UsageError, nearest
from graft.places import ROOT
from graft.processes import ended_by_sigterm
from graft.stack.pins import DEFAULT_PIN
from graft.stack.trees import tree

# A run that is cut writes its result and ends its workers; one that does not is killed.
_TO_END_S, _TO_KILL_S = 15.0, 30.0
# The command that stops by itself.
_STOPS = "graft bench models"
# What a run takes until its first point: with less than that left, none is begun.
_LEAST_S = 30.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class State:
    """A part, its result in `bench/results`, and what of a new one is in `.graft/publish`."""

    part: Part
    shown: Kept | None
    under_way: Kept | None
    fresh: bool

    def __str__(self) -> str:
        """`stale: stack 3eb9d8515142, 2026-11-23; of a new one 20 rows`."""
        if self.shown is None:
            said = "not measured"
        else:
            said = f"stack {self.shown.stack_hash[:12]}, {self.shown.date}"
            notes = [] if self.shown.complete else ["not all points"]
            notes += [] if self.shown.command else ["another command"]
            notes += [f"without {label}" for label in self.shown.absent]
            if self.shown.same_code:
                notes.append(f"the same code in {self.shown.same_code[:12]}")
            said = ", ".join([f"{'fresh' if self.fresh else 'stale'}: {said}", *notes])
        if self.under_way and not (self.fresh and self.under_way.complete):
            whole = " (all)" if self.under_way.complete else ""
            rows = "row" if self.under_way.points == 1 else "rows"
            said += f"; of a new one {self.under_way.points} {rows}{whole}"
        return said


def folder(root: Path = ROOT) -> Path:
    """Where parts are measured."""
    return root / ".graft" / "publish"


def work_of(result: str | Path, root: Path = ROOT) -> Path:
    """Where the run that becomes a result is under way."""
    return folder(root) / Path(result).name


def state(part: Part, stack_hash: str, root: Path = ROOT) -> State:
    """How far a part is, as files say. What is under way counts if it is of `stack_hash`."""
    shown = parts.kept(root / part.result, part.command, root)
    work = work_of(part.result, root)
    found = [parts.kept(path, part.command, root) for path in (work, results.part_of(work))]
    of_it = [each for each in found if each and each.command and each.stack_hash == stack_hash]
    under_way = max(of_it, key=lambda each: (each.complete, each.points), default=None)
    return State(part, shown, under_way, bool(shown and shown.is_of(stack_hash)))


def begin(
    work: Path, measured: results.Result, rows: Sequence[results.Row], stack_hash: str
) -> None:
    """Begin the run `work` with `rows` of the result `measured`, whose code is that of the stack.

    Each says of which stack and day it is. What was under way of another run is forgotten.
    """
    of = {"stack": measured["stack_hash"], "date": measured["date"]}
    kept = [{**row, "measured": row.get("measured", of)} for row in rows]
    _forget(work)
    results.save({**measured, "stack_hash": stack_hash, "complete": False, "rows": kept}, work)


def choose(names: Sequence[str], published: parts.Published) -> list[Part]:
    """The parts called `names`, in the order of the list; all without a name.

    Raises UsageError for a name that is none.
    """
    known = {part.name for part in published.parts}
    for name in names:
        if name not in known:
            raise UsageError(
                f"bench/publish.toml has no part {name!r}{nearest(name, known)}",
                "graft bench publish --list",
            )
    return [part for part in published.parts if not names or part.name in names]


def listed(stack_hash: str, root: Path = ROOT) -> str:
    """One line a part: minutes, and how far it is; then how long what is not fresh takes."""
    states = [state(part, stack_hash, root) for part in parts.load(root).parts]
    width = max(len(each.part.name) for each in states)
    lines = [f"{each.part.name:{width}}  {each.part.minutes:4.1f} min  {each}" for each in states]
    left = sum(each.part.minutes for each in states if not each.fresh)
    total = sum(each.part.minutes for each in states)
    lines.append(f"{left:.1f} of {total:.1f} minutes are to be measured; stack {stack_hash[:12]}")
    return "\n".join(lines)


def publish(
    prefix: Path,
    names: Sequence[str] = (),
    *,
    again: bool = False,
    seconds: float | None = None,
    peers: Path | None = None,
    gpus: Callable[[], Sequence[str]],
    say: Say,
    root: Path = ROOT,
) -> bool:
    """Measure the parts called `names` that are not fresh, all without a name; False if cut.

    `again` measures fresh ones too, and discards what is under way; to go on with that, the same
    call without it. `seconds` is when to stop. `gpus` names the GPUs
    that there are. Raises UsageError for a part that is none, GraftError for a tree of another
    stack than patches/, for no GPU or another one, and for parts that failed, after the others.
    """
    begin = time.monotonic()
    published = parts.load(root)
    chosen = choose(names, published)
    there = tree.load(prefix)
    check_tree(there, root)
    hash = there.stack_hash
    if again:
        for part in chosen:
            _forget(work_of(part.result, root))
    todo = []
    for part in chosen:
        at = state(part, hash, root)
        whole = at.under_way is not None and at.under_way.complete
        if at.fresh and not again and (whole or not at.under_way):
            say(f"{part.name}: {at}")
        elif whole:
            _adopt(part, root, say)
        else:
            todo.append(part)
    write_tables(root, say)  # whatever becomes of the rest
    if todo:
        _check_gpu(gpus(), published.gpu, todo)
    failed = []
    for at_part, part in enumerate(todo):
        left = None if seconds is None else seconds - (time.monotonic() - begin)
        if left is not None and left < _LEAST_S:
            return _cut(todo[at_part:], hash, root, say)
        say(f"{part.name}: {part.minutes} minutes, by bench/publish.toml")
        began = time.monotonic()
        ended = _measure(there.prefix, part, hash, left, peers, root)
        say(f"{part.name}: {ended} after {(time.monotonic() - began) / 60:.1f} minutes")
        at = state(part, hash, root)
        if at.under_way and at.under_way.complete and ended != "failed":
            _adopt(part, root, say)
        elif ended == "cut" or (ended == "done" and left is not None and at.under_way):
            return _cut(todo[at_part:], hash, root, say)
        else:
            failed.append(part)
            say(f"{part.name}: failed; {part.result} is as it was")
    write_tables(root, say)
    if failed:
        names = " ".join(part.name for part in failed)
        raise GraftError(
            f"of {len(todo)} parts {len(failed)} failed, and say why above: {names}",
            command(failed),
        )
    return True


def command(of: Sequence[Part]) -> str:
    """What measures the parts `of`."""
    return f"graft bench publish{''.join(f' --part {part.name}' for part in of)}"


def write_tables(root: Path, say: Say) -> None:
    """Write the tables that are stale."""
    for page, _, due in list(tables.stale(root)):
        page.write_text(due)
        say(f"{page.relative_to(root)}: tables written")


def check_tree(there: tree.Tree, root: Path, pin: str = DEFAULT_PIN) -> None:
    """Raise GraftError where a tree is not what patches/ says for `pin`."""
    due = parts.tree_hash(root, pin)
    if due is not None and there.stack_hash != due:
        raise GraftError(
            f"{there.prefix} has stack {there.stack_hash[:12]} and patches/ {due[:12]}: what is"
            " published is of patches/",
            "./build.sh" if pin == DEFAULT_PIN else f"./build.sh --pin {pin}",
        )


def _check_gpu(found: Sequence[str], wanted: str, todo: Sequence[Part]) -> None:
    names = " ".join(part.name for part in todo)
    if not found:
        raise GraftError(
            f"timing needs a CUDA GPU, and none answers here; not measured: {names}",
            "graft bench publish --list, and graft bench publish where there is one",
        )
    other = [name for name in found if name != wanted]
    if other:
        raise GraftError(
            f"bench/publish.toml is of {wanted}, and here is {other[0]}; not measured: {names}",
            "graft bench CASES --out FILE, for figures of this GPU",
        )


def _measure(
    prefix: Path, part: Part, hash: str, left: float | None, peers: Path | None, root: Path
) -> str:
    """Run a part, or the rest of it, for `left` seconds at most: done, cut or failed."""
    work = work_of(part.result, root)
    work.parent.mkdir(parents=True, exist_ok=True)
    # What another stack, or another command, has left there.
    for path in (work, results.part_of(work)):
        found = parts.kept(path, part.command)
        if found is None or found.stack_hash != hash or not found.command:
            path.unlink(missing_ok=True)
    limit = None if left is None else max(1.0, left - _TO_END_S)
    command = argv(prefix, part, work, peers)
    if limit is not None and part.command.startswith(_STOPS):
        # It begins nothing that it would not end; what takes no such option loses a point.
        command += ["--seconds", str(max(1, int(limit - _TO_END_S)))]
    with _child(command) as child:
        try:
            return "failed" if child.wait(limit) else "done"
        except subprocess.TimeoutExpired:
            return "cut"


def argv(prefix: Path, part: Part, out: Path, peers: Path | None) -> list[str]:
    """The command line of a part, which writes `out`."""
    given = f" --peers {shlex.quote(str(peers))}" if peers else ""
    command = part.command.replace(" --peers DIR", given)
    words = shlex.split(command)[1:]
    return [*graft(prefix), *words, "--out", str(out)]


def graft(prefix: Path) -> list[str]:
    """How a tree's `graft` is called."""
    return [str(prefix / "bin" / "graft")]


@contextlib.contextmanager
def _child(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended, as Ctrl-C would, whatever ends this block; SIGTERM is one."""
    with ended_by_sigterm(), subprocess.Popen(command) as child:
        try:
            yield child
        finally:
            if child.poll() is None:
                child.terminate()
                try:
                    child.wait(_TO_KILL_S)
                except subprocess.TimeoutExpired:
                    child.kill()


def _adopt(part: Part, root: Path, say: Say) -> None:
    """Copy a whole result to `bench/results`, so that a reader sees the old one or the new."""
    to = root / part.result
    to.parent.mkdir(parents=True, exist_ok=True)
    aside = to.with_name(f".{to.name}")
    shutil.copyfile(work_of(part.result, root), aside)
    aside.replace(to)
    found = parts.kept(to, part.command)
    without = "".join(f", without {label}" for label in (found.absent if found else ()))
    say(f"{part.name}: {part.result} written{without}")


def _forget(work: Path) -> None:
    work.unlink(missing_ok=True)
    results.part_of(work).unlink(missing_ok=True)


def _cut(left: Sequence[Part], hash: str, root: Path, say: Say) -> bool:
    write_tables(root, say)
    at = state(left[0], hash, root)
    minutes = sum(part.minutes for part in left)
    say(f"stopped; {left[0].name}: {at}")
    say(f"not measured yet: {' '.join(part.name for part in left)}, {minutes:.1f} minutes")
    say("next: the same command")
    return False
