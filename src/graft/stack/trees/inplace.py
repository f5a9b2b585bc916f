"""An installed torch patched in place, and given its own files back.

Originals and a record are kept beside the package before the first file is replaced; each file is
replaced by a rename, so a reader sees the old bytes or the new, and hard links of package caches
are left alone. An interrupted run can be repeated or undone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from graft.errors import GraftError, UsageError
from graft.stack import files_hash, pins
from graft.stack.git import NULL_BLOB, blob_id
from graft.stack.pins import Pin
from graft.stack.trees.bases import Base
from graft.stack.trees.tree import explaining

FOLDER = "graft_in_place"
"""Beside the torch package: record.json and originals/."""

UNDO = "python3 PACK --undo --python {python}"


def record_dir(base: Base) -> Path:
    """Where originals and record of a patched torch are."""
    return base.torch_dir.parent / FOLDER


def install(base: Base, pin: Pin, files: Mapping[str, str], contents: Mapping[str, bytes]) -> bool:
    """Replace the base's files by `contents`. False if that was done before.

    Raises GraftError, with nothing changed, when the base is not the pin's, is patched with
    another stack, or is made of links; and, with everything put back, when a write fails.
    """
    package, held = base.torch_dir.parent, record_dir(base)
    _refuse_links(base, files)
    if held.exists():
        _check_same_stack(base, files)
        if not _differing(package, files):
            return False
    else:
        pins.check_base(pin, base)
        clashes = [p for p in files if p not in pin.files and (package / p).exists()]
        if clashes:
            raise GraftError(f"{package} already has {', '.join(clashes)}, which torch does not")
        with explaining(held):
            _keep_originals(package, held, files)
    try:
        with explaining(package):
            for path, blob in files.items():
                if blob == NULL_BLOB:
                    (package / path).unlink(missing_ok=True)
                else:
                    _replace(package / path, contents[path])
        verify(base, pin, files)
    except GraftError:
        undo(base)
        raise
    return True


def undo(base: Base) -> int:
    """Give the base its own files back; returns how many. Other files are left alone.

    Raises GraftError, with nothing changed, when it is not patched or one of the files has been
    changed since.
    """
    package, held = base.torch_dir.parent, record_dir(base)
    record = _read_record(base)
    changed = []
    for path, (old, new) in record.items():
        found = _blob(package / path)
        if found not in (old, new):
            changed.append(path)
    if changed:
        raise GraftError(
            f"{', '.join(changed)} in {package} changed since it was patched; nothing was undone",
            next=f"restore them by hand ({held}/originals has what was there), then again",
        )
    with explaining(package):
        for path, (old, _) in record.items():
            if old != NULL_BLOB:
                _replace(package / path, (held / "originals" / path).read_bytes())
        for path, (old, _) in record.items():
            if old == NULL_BLOB:
                _remove(package / path)
        shutil.rmtree(held)
    return len(record)


def verify(base: Base, pin: Pin, files: Mapping[str, str]) -> None:
    """Raise GraftError, naming each file, unless the base is patched with just these files."""
    _check_same_stack(base, files)
    package = base.torch_dir.parent
    problems = [f"{path} differs" for path in _differing(package, files)]
    untouched = {path: blob for path, blob in pin.files.items() if path not in files}
    problems += [f"{path} differs" for path in _differing(package, untouched)]
    if problems:
        raise GraftError(
            f"torch in {base.torch_dir} is not what it was patched to be: {'; '.join(problems)}",
            next=UNDO.format(python=base.python),
        )


def _differing(package: Path, files: Mapping[str, str]) -> list[str]:
    return [path for path, blob in files.items() if _blob(package / path) != blob]


def _blob(path: Path) -> str:
    return blob_id(path.read_bytes()) if path.is_file() else NULL_BLOB


def _refuse_links(base: Base, files: Mapping[str, str]) -> None:
    package = base.torch_dir.parent
    for path in files:
        for part in [path, *(str(parent) for parent in PurePosixPath(path).parents)][:-1]:
            if (package / part).is_symlink():
                raise UsageError(
                    f"{package / part} is a link; --in-place changes an installed torch only",
                    next=f"--python PY, with the Python of {(package / part).resolve().parent}",
                )


def _read_record(base: Base) -> dict[str, tuple[str, str]]:
    try:
        record = json.loads((record_dir(base) / "record.json").read_text("utf-8"))
    except FileNotFoundError as missing:
        raise GraftError(
            f"torch in {base.torch_dir} is not patched in place (there is no {record_dir(base)})"
        ) from missing
    return {path: (old, new) for path, (old, new) in record.items()}


def _check_same_stack(base: Base, files: Mapping[str, str]) -> None:
    there = {path: new for path, (_, new) in _read_record(base).items()}
    if there != dict(files):
        raise GraftError(
            f"torch in {base.torch_dir} is patched with stack {files_hash(there)[:12]}; expected "
            f"{files_hash(files)[:12]}",
            next=UNDO.format(python=base.python) + ", then again",
        )


def _keep_originals(package: Path, held: Path, files: Mapping[str, str]) -> None:
    aside = held.with_name(f"{FOLDER}.new")
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir()
    for path in files:
        if (package / path).is_file():
            kept = aside / "originals" / path
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(package / path, kept)
    record = {path: [_blob(package / path), blob] for path, blob in sorted(files.items())}
    (aside / "record.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    aside.rename(held)


def _replace(path: Path, data: bytes) -> None:
    mode = path.stat().st_mode & 0o7777 if path.exists() else 0o644
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.graft")
    aside.write_bytes(data)
    aside.chmod(mode)
    os.replace(aside, path)


def _remove(path: Path) -> None:
    """Remove a file that the stack made, its bytecode, and folders that this leaves empty."""
    path.unlink(missing_ok=True)
    cache = path.parent / "__pycache__"
    for bytecode in cache.glob(f"{path.stem}.*.pyc"):
        bytecode.unlink()
    for folder in (cache, path.parent):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
