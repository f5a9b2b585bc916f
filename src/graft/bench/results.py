"""Result files: what was measured, as data; and the journal that makes a run resumable.

A result file is one JSON object, a row a line:

- `schema`, `pin`, `stack_hash`, `patches`, `date` (UTC), `commands` (without machine paths);
- `clock`: rounds, samples a round, whether contenders compile one after the other, or share what
  is compiled and tuned;
- `contenders`: by label, what ran: impl, knobs, versions, or `absent` and why;
- `gpus`: by index, name, driver, SMs, L2, bytes of the flush, copy bandwidth (spread, 1e9 B/s),
  or `error`;
- `rows`: case, group, shape, dtype, gpu, `bytes` that must move, `limit_us` (bytes over the copy
  bandwidth), `times` by label, `speedup` by label over the first contender (spread over rounds),
  for a training step `generated` (`graft.bench.kernel_groups`);
  of a point of an earlier stack with the same code `measured`: its `stack` and `date`;
- a time: `us` (median, q1, q3, n), `sol` (limit over median), `kernels`, `memops`, `mix_order`,
  `generated_kernels`, `code` (a hash of what was compiled), `compile_s`, `peak_bytes`, `outputs`
  (errors), for a training step `triton_us` and `rest_us`, `launched_us` (as the host launches it),
  `gpu_busy` (the share of that in which its kernels run) and `captured`; or `error` {kind,
  message}; or `absent`.
- `complete`: whether every point asked for has its row.

A name that ends in `.gz` is of a compressed one.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from graft.bench import shapes
from graft.errors import GraftError
from graft.places import ROOT

SCHEMA = 1

Row = dict[str, Any]
Result = dict[str, Any]

# What two runs have to agree on for their rows to stand in one file.
IDENTITY = ("schema", "pin", "stack_hash", "clock", "contenders", "libraries")

_FIELDS: Mapping[str, type] = {
    "schema": int,
    "pin": str,
    "stack_hash": str,
    "date": str,
    "commands": list,
    "clock": dict,
    "contenders": dict,
    "gpus": list,
    "rows": list,
    "complete": bool,
}
_ROW_FIELDS: Mapping[str, type] = {"case": str, "shape": list, "dtype": str, "times": dict}


def named(root: Path = ROOT) -> dict[str, Path]:
    """The results of `graft bench` in `bench/results`, by the names of their files."""
    found = sorted((root / "bench" / "results").glob("*.json*"))
    return {name(path): path for path in found if path.name.endswith((".json", ".json.gz"))}


def name(path: Path) -> str:
    """A result file's, without what it ends in."""
    return path.name.removesuffix(".gz").removesuffix(".json")


def key(row: Row) -> str:
    """The point of a row, as `graft.bench.plan.Point.key` writes it."""
    return f"{row['case']} {shapes.text(tuple(row['shape']))} {row['dtype']}"


def earlier(data: Result) -> dict[str, str]:
    """The stacks that points of a result were measured with before, and their days."""
    found = (row["measured"] for row in data.get("rows", ()) if "measured" in row)
    return {of["stack"]: of["date"] for of in found}


def load(path: Path) -> Result:
    """Read and check a result file.

    The journal of a run that was cut (`OUT.part`) is read as the result that it has so far.
    Raises GraftError naming the file and what is wrong with it: not there, cut off in the
    middle, of another schema, a field that is missing.
    """
    try:
        text = read_text(path)
    except EOFError:
        raise GraftError(
            f"{path}: cut off in the middle of what is compressed",
            next=f"git checkout {path.name}, or another copy of it",
        ) from None
    except OSError as error:
        part = part_of(path)
        raise GraftError(
            f"{path}: {error.strerror or error}",
            next=f"{part}, which holds what was measured before the run was cut"
            if part.exists()
            else f"graft bench CASES --out {path}",
        ) from None
    if path.suffix == ".part":
        return _load_part(path, text)
    try:
        data = json.loads(text)
    except ValueError as error:
        # of a file that is none of ours, nothing that writes over it
        anew = f"{path} --again" if '"schema"' in text else "FILE"
        raise GraftError(
            f"{path}: cut off or damaged ({error}); a result file is one JSON object",
            next=f"another copy of it, or graft bench CASES --out {anew}",
        ) from None
    validate(data, str(path))
    return dict(data)


def read_text(path: Path) -> str:
    """A file's text, also of a compressed one (`.gz`). Raises OSError, and EOFError for a part."""
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def part_of(out: Path) -> Path:
    """The journal beside a result file."""
    return out.with_name(out.name + ".part")


def _load_part(path: Path, text: str) -> Result:
    head: Result = {}
    rows: dict[str, Row] = {}
    for entry in _entries(text):
        if "schema" in entry:
            validate(entry, str(path))
            head = {**entry, **_known(entry, head)}
        else:
            _fields(entry, _ROW_FIELDS, f"{path}: row")
            rows[key(entry)] = entry
    if not head:
        raise GraftError(f"{path}: no journal of a run: it has no head")
    out = {**head, "complete": False, "rows": list(rows.values())}
    validate(out, str(path))
    return out


def _entries(text: str) -> list[dict[str, Any]]:
    """Heads and rows of a journal; a line that a kill cut off is left out."""
    out = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            out.append(json.loads(line))
    return out


def _known(ours: Result, earlier: Result) -> dict[str, Any]:
    """GPUs and contenders of two heads of one file, `ours` the later.

    A head without GPUs is of a run that has not found out yet.
    """
    if not earlier:
        return {}
    if not ours["gpus"]:
        return {name: earlier[name] for name in ("gpus", "contenders")}
    gpus = {gpu["index"]: gpu for gpu in (*earlier["gpus"], *ours["gpus"])}
    return {"gpus": [gpus[index] for index in sorted(gpus)]}


def validate(data: Any, where: str) -> None:
    """Raise GraftError unless `data` is a result of this schema."""
    if not isinstance(data, dict):
        raise GraftError(f"{where}: expected a JSON object, found {type(data).__name__}")
    if data.get("schema") != SCHEMA:
        raise GraftError(
            f"{where}: schema {data.get('schema')!r}, expected {SCHEMA}",
            next="graft bench CASES --out FILE --again",
        )
    _fields(data, _FIELDS, where)
    for i, row in enumerate(data["rows"]):
        _fields(row, _ROW_FIELDS, f"{where}: row {i}")
        unknown = set(row["times"]) - set(data["contenders"])
        if unknown:
            raise GraftError(f"{where}: row {i} has a time of {unknown.pop()}, no contender")
        for label, time in row["times"].items():
            if not {"us", "error", "absent"} & set(time):
                raise GraftError(f"{where}: row {i}, {label}: no time, no error, not absent")


def _fields(data: Any, fields: Mapping[str, type], where: str) -> None:
    for name, kind in fields.items():
        if not isinstance(data, dict) or not isinstance(data.get(name), kind):
            found = data.get(name) if isinstance(data, dict) else data
            raise GraftError(f"{where}: {name} is {found!r}, expected {kind.__name__}")


def render(data: Result) -> str:
    """A result as text: sorted by nothing, one row a line, so that a diff shows rows."""
    head = {name: value for name, value in data.items() if name != "rows"}
    rows = ",\n".join(f"  {json.dumps(row)}" for row in data["rows"])
    text = json.dumps(head, indent=1)
    assert text.endswith("\n}")
    return text[:-2] + ',\n "rows": [\n' + rows + "\n ]\n}\n"


def save(data: Result, path: Path) -> None:
    """Write a result so that a reader sees the old file or the new one, never a half."""
    validate(data, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    text = render(data).encode()
    # Without a time in it, the same rows are the same bytes.
    aside.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    aside.replace(path)


def same_run(left: Result, right: Result) -> str | None:
    """The first field of IDENTITY in which two results differ, said in words, or None.

    Of a contender, what it runs counts; a peer that is absent on one side does not.
    """
    for name in IDENTITY:
        ours, theirs = left.get(name), right.get(name)
        if name == "contenders":
            ours, theirs = _contenders(ours), _contenders(theirs)
        if ours != theirs:
            return f"{name} is {ours!r} there and {theirs!r} here"
    return None


def _contenders(found: Any) -> dict[str, Any]:
    return {
        label: {name: about.get(name) for name in ("impl", "knobs")}
        for label, about in dict(found or {}).items()
    }


class Journal:
    """Rows as they are measured: appended to `OUT.part` at once, folded into `OUT` at the end.

    Killed at any point, a run loses at most the row that it was measuring: the next run with
    the same `out` reads both files and measures what is missing. Without `out`, nothing is
    written and only the result is built.
    """

    def __init__(self, out: Path | None, head: Result, again: bool = False) -> None:
        """Open the journal for a run that `head` describes (a result without rows).

        `again` discards what is there. Raises GraftError when the files there are of another
        pin, stack, clock or contenders.
        """
        self.head = head
        self._out = out
        self._rows: dict[str, Row] = {}
        self._failed: set[str] = set()  # of an earlier run: to be measured again
        self._earlier: Result | None = None
        self._part = part_of(out) if out else None
        if again and out and self._part:
            out.unlink(missing_ok=True)
            self._part.unlink(missing_ok=True)
        if out and out.exists():
            self._adopt(load(out), out)
        if self._part and self._part.exists():
            self._read_part(self._part)
        self._failed = {
            name
            for name, row in self._rows.items()
            if any("error" in time for time in row["times"].values())
        }
        if self._part:
            self._part.parent.mkdir(parents=True, exist_ok=True)
            self._append_line({**head, "rows": []})

    @property
    def done(self) -> set[str]:
        """Keys of the points that have a row; one with an error counts in the run that made it."""
        return set(self._rows) - self._failed

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def describe(self, found: Mapping[str, Any]) -> None:
        """Keep what a run found out about GPUs and contenders, on disk before this returns.

        Raises GraftError when the rows that are there were measured on another GPU.
        """
        names = {gpu["name"] for gpu in found["gpus"] if "name" in gpu}
        earlier = {gpu["name"] for gpu in (self._earlier or {}).get("gpus", []) if "name" in gpu}
        if earlier and not names <= earlier:
            raise GraftError(
                f"{self._out} was measured on {', '.join(sorted(earlier))},"
                f" and here is {', '.join(sorted(names))}",
                next="another --out, or --again to measure anew",
            )
        self.head = {**self.head, **found}
        if self._part:
            self._append_line({**self.head, "rows": []})

    def append(self, row: Row) -> None:
        """Keep a row, on disk before this returns."""
        self._rows[key(row)] = row
        self._failed.discard(key(row))
        if self._part:
            self._append_line(row)

    def fold(self, changes: Mapping[str, Any], order: Sequence[str]) -> Result:
        """The result of all rows, `order` first; written to `out`, and the part file removed."""
        place = {name: i for i, name in enumerate(order)}
        rows = sorted(self.rows, key=lambda row: place.get(key(row), len(place)))
        result = {**self.head, **changes, "rows": rows}
        if self._earlier:
            result["commands"] = _union(self._earlier["commands"], result["commands"])
            result |= _known(result, self._earlier)
        validate(result, str(self._out or "result"))
        if self._out and self._part:
            save(result, self._out)
            self._part.unlink(missing_ok=True)
        return result

    def _adopt(self, earlier: Result, path: Path) -> None:
        differs = same_run(earlier, self.head)
        if differs:
            raise GraftError(
                f"{path} is of another run: {differs}",
                next=f"another --out, or --again to measure {path.name} anew",
            )
        if self._earlier:
            earlier["commands"] = _union(self._earlier["commands"], earlier["commands"])
            earlier |= _known(earlier, self._earlier)
        self._earlier = earlier
        for row in earlier["rows"]:
            self._rows[key(row)] = row

    def _read_part(self, path: Path) -> None:
        """Each line is a head or a row; one that a kill cut off is the last of its run."""
        for entry in _entries(path.read_text()):
            if "schema" in entry:
                validate(entry, str(path))
                self._adopt(entry, path)
            else:
                _fields(entry, _ROW_FIELDS, f"{path}: row")
                self._rows[key(entry)] = entry

    def _append_line(self, entry: Mapping[str, Any]) -> None:
        assert self._part is not None
        # A line that a kill cut off has no end: start on a new one.
        with self._part.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _union(left: Iterable[Any], right: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys([*left, *right]))
