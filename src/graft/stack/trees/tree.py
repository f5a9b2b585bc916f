"""A patched tree: an environment whose torch is the base's, but for the files that patches change.

``build/`` is a venv. Its site-packages holds ``torch/``, where every folder on the way to a changed
file is real, every changed file is real, and everything else is a link into the base; the base's
other packages follow on the path. Nothing is ever written through a link.

Standard library and git alone: this runs where nothing else is installed.
"""

from __future__ import annotations

import configparser
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from graft.errors import FULL, READ_ONLY, GraftError, UsageError
from graft.places import ROOT
from graft.stack import FileChange, Patch, Stack, files_hash, pins
from graft.stack.git import NULL_BLOB, blob_id, git
from graft.stack.pins import Pin
from graft.stack.trees import caches, source
from graft.stack.trees.bases import Base, probe

__all__ = ["Base", "Layout", "Tree", "build", "clean", "load", "probe", "pythons", "verify"]

FORMAT = 1
"""Of the manifest and of what `build` makes; a tree of another format is made anew."""

MANIFEST = "graft.json"

# Location-independent: a tree may be moved, and is made aside and renamed.
_SCRIPT = """\
#!/bin/sh
'''exec' "$(dirname -- "$(readlink -f -- "$0")")/python" "$0" "$@"
' '''
{body}
"""

_ENTRY_POINT = """\
import sys
from {module} import {first}
sys.exit({attr}())"""

_GRAFT = """\
import sys
sys.path.insert(0, {src!r})
try:
    from graft.cli import main
except ModuleNotFoundError as missing:
    if missing.name not in ("click", "rich"):
        raise
    sys.exit(
        f"error: graft's commands need {{missing.name}}, which this Python does not have\\n"
        "next: ./build.sh ... --wheels DIR, with a folder that has its wheel "
        "(or pip install it into the base)"
    )
main()"""


@dataclass(frozen=True)
class Tree:
    """A patched tree as its manifest describes it.

    `files` maps each changed path to its blob id (forty zeros: removed); `patches` are the names
    of those that made it; `recipe` identifies everything that it was made from. Where `compiled`,
    torch is PyTorch's own build of the checkout ``base.source`` (`compiled`). `wheels` is the
    folder of wheels that went into it.
    """

    prefix: Path
    base: Base
    pin: str
    patches: tuple[str, ...]
    stack_hash: str
    files: Mapping[str, str]
    recipe: str
    compiled: bool = False
    wheels: Path | None = None

    @property
    def python(self) -> Path:
        """The Python that imports the patched torch."""
        return self.prefix / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """The tree's own site-packages folder."""
        return self.prefix / self.base.site

    @property
    def torch_dir(self) -> Path:
        """The patched package."""
        return self.site_packages / "torch"

    @property
    def cache_dir(self) -> Path:
        """Where its Python caches, unless the user says otherwise."""
        return caches.folder(self.stack_hash)


@dataclass(frozen=True)
class Layout:
    """What is real and what is a link in a tree's site-packages. Paths are relative to it.

    `links` maps a path to the text of its link; `files` are the changed files that exist.
    """

    folders: frozenset[str]
    links: Mapping[str, str]
    files: frozenset[str]


def layout(base: Base, files: Mapping[str, str]) -> Layout:
    """How a tree of `base` with these changed files (path to blob id) has to look.

    Links go through ``<prefix>/base`` (and ``<prefix>/source``), the only absolute ones, so they
    are short and a tree may be moved.
    """
    sources = source.python_files(base.source) if base.source else frozenset()
    folders = {"torch"}
    for path in (*files, *sources):
        folders.update(str(parent) for parent in PurePosixPath(path).parents if parent.name)
    links: dict[str, str] = {}
    for folder in sorted(folders):
        up = "../" * (len(PurePosixPath(base.site).parts) + len(PurePosixPath(folder).parts))
        for name in _names(base.torch_dir.parent / folder):
            path = f"{folder}/{name}"
            if path not in folders and path not in files and name != "__pycache__":
                links[path] = f"{up}base/{path.removeprefix('torch/')}"
    for path in sources - files.keys():
        up = "../" * (len(PurePosixPath(base.site).parts) + len(PurePosixPath(path).parts) - 1)
        links[path] = f"{up}source/{path.removeprefix('torch/')}"
    there = {path for path, blob in files.items() if blob != NULL_BLOB}
    return Layout(frozenset(folders), links, frozenset(there))


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


# --- patches to files ----------------------------------------------------------------------------


def apply(stack: Stack, base: Base, scratch: Path) -> dict[str, bytes]:
    """Apply the stack's changes under torch/ to copies in `scratch`; return the changed files.

    A removed file is missing from the answer. Raises GraftError naming patch, file, hunk and lines
    when a patch does not apply, applies with an offset, or leaves other bytes than its ``index``
    line says.
    """
    package = base.torch_dir.parent
    for path in stack.tree_files:
        if (package / path).exists():
            copy = scratch / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((package / path).read_bytes())
    for patch in stack.patches:
        changes = [change for change in patch.files if change.in_tree]
        for change in changes:
            _check_hunks(patch, change, scratch)
        if changes:
            _git_apply(patch, scratch)
        for change in changes:
            _check_blob(patch, change, scratch)
    return {
        path: (scratch / path).read_bytes()
        for path, blob in stack.tree_files.items()
        if blob != NULL_BLOB
    }


def _git_apply(patch: Patch, scratch: Path) -> None:
    try:
        # Without a ceiling git would find the repository around the scratch folder, print
        # 'Skipped patch' for every file of it, and exit 0.
        git(
            "apply",
            "--whitespace=nowarn",
            "--include=torch/*",
            "-",
            cwd=scratch,
            input=patch.text,
            env={"GIT_CEILING_DIRECTORIES": str(scratch.resolve().parent)},
        )
    except GraftError as wrong:
        if "failed in" not in wrong.message:
            raise
        words = wrong.message.partition(f"{scratch}: ")[2]
        raise GraftError(f"{patch.name} does not apply: {words}", _FIX) from wrong


_ELSEWHERE = "./build.sh --prefix DIR, with a folder that you can write"
_FIX = "graft edit, fix the commit, then graft refresh"


def _check_hunks(patch: Patch, change: FileChange, scratch: Path) -> None:
    path = scratch / change.path
    if change.is_new:
        if path.exists():
            raise GraftError(f"{patch.name} makes {change.path}, which is there already", _FIX)
        return
    if not path.exists():
        raise GraftError(f"{patch.name} changes {change.path}, which is not there", _FIX)
    lines = path.read_bytes().decode("utf-8", "surrogateescape").split("\n")
    for number, hunk in enumerate(change.hunks, 1):
        start, expected = hunk.old_start - 1, list(hunk.old_lines)
        if not expected or lines[start : start + len(expected)] == expected:
            continue
        where = f"{change.path}, hunk {number} at line {hunk.old_start}"
        elsewhere = [
            at
            for at in range(len(lines) - len(expected) + 1)
            if lines[at : at + len(expected)] == expected
        ]
        if elsewhere:
            nearest = min(elsewhere, key=lambda at: abs(at - start))
            raise GraftError(
                f"{patch.name} applies only with an offset: {where}, whose lines stand at line "
                f"{nearest + 1} (offset {nearest - start})",
                _FIX,
            )
        found = lines[start : start + len(expected)]
        found += [""] * (len(expected) - len(found))
        shown = [
            f"\n  line {start + 1 + i}: expected {want!r}, found {have!r}"
            for i, (want, have) in enumerate(zip(expected, found, strict=True))
            if want != have
        ]
        more = f"\n  and {len(shown) - 4} more lines" if len(shown) > 4 else ""
        raise GraftError(f"{patch.name} does not apply: {where}:{''.join(shown[:4])}{more}", _FIX)


def _check_blob(patch: Patch, change: FileChange, scratch: Path) -> None:
    path = scratch / change.path
    found = blob_id(path.read_bytes()) if path.exists() else NULL_BLOB
    if found != change.new_blob:
        raise GraftError(
            f"{patch.name} leaves {change.path} with blob {found[:12]}, and its index line says "
            f"{change.new_blob[:12]}: it was made for another version of the file, or edited "
            "by hand",
            _FIX,
        )


# --- making --------------------------------------------------------------------------------------


def recipe(base: Base, pin: Pin, stack_hash: str, patches: Iterable[str], extra: str = "") -> str:
    """SHA-256 of everything that a tree is made from, but for the bytes of the base's files."""
    made_from = {
        "format": FORMAT,
        "base": base.as_json(),
        "pin": pins.render(pin),
        "stack": stack_hash,
        "patches": list(patches),
        "tool": str(ROOT),
        "extra": extra,
    }
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def build(base: Base, stack: Stack, prefix: Path, wheels: Path | None = None) -> Tree:
    """Make the patched tree at `prefix`, in place of one that may be there.

    `wheels` is a folder of wheels of what the base lacks, installed into the tree only.
    Raises GraftError when the base is not the pin's, a patch does not apply, `prefix` is something
    else than a tree, another build is running, or the file system refuses; whatever was there
    before is still there then.
    """
    with locked(prefix):
        return build_locked(base, stack, prefix, wheels)


def build_locked(base: Base, stack: Stack, prefix: Path, wheels: Path | None = None) -> Tree:
    """`build`, for a caller that holds the lock already."""
    pins.check_base(stack.pin, base)
    if base.source:
        source.check(base.source, stack.pin)
    prefix = prefix.absolute()
    scratch = work_dir(prefix) / f"{prefix.name}.apply"
    with explaining(prefix):
        scratch.mkdir(parents=True)
        try:
            contents = apply(stack, base, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return make(
        base, stack.pin, stack.tree_files, contents, prefix, [p.name for p in stack.patches], wheels
    )


def make(
    base: Base,
    pin: Pin,
    files: Mapping[str, str],
    contents: Mapping[str, bytes],
    prefix: Path,
    patches: Iterable[str] = (),
    wheels: Path | None = None,
) -> Tree:
    """Make a tree from changed files (`files`: path to blob id, `contents`: path to bytes).

    The caller holds the lock and has checked the base. It is made aside and renamed, so it is
    never there in part.
    """
    prefix = prefix.absolute()
    refuse_foreign(prefix)
    stack_hash, patches = files_hash(files), tuple(patches)
    tree = Tree(
        prefix=prefix,
        base=base,
        pin=pin.name,
        patches=patches,
        stack_hash=stack_hash,
        files=dict(files),
        recipe=recipe(base, pin, stack_hash, patches, wheels_key(wheels)),
        wheels=wheels.absolute() if wheels else None,
    )
    aside = work_dir(prefix) / f"{prefix.name}.new"
    with explaining(prefix):
        try:
            _fill(tree, contents, aside, wheels)
            swap(aside, prefix)
        finally:
            sweep(prefix)
    return tree


def _fill(tree: Tree, contents: Mapping[str, bytes], aside: Path, wheels: Path | None) -> None:
    base = tree.base
    site = make_environment(tree, aside)
    plan = layout(base, tree.files)
    for folder in sorted(plan.folders):
        (site / folder).mkdir()
    for path, target in plan.links.items():
        os.symlink(target, site / path)
    for path in plan.files:
        (site / path).write_bytes(contents[path])
    _check_packages(plan, site)
    _link_bytecode(base, plan, site)
    if wheels:
        _install_wheels(aside, wheels)
    finish_environment(tree, aside)


def make_environment(tree: Tree, aside: Path) -> Path:
    """Make the environment of a tree without its torch; returns its site-packages."""
    site = aside / tree.base.site
    _make_venv(tree.base, aside)
    for name, folder in _anchors(tree.base).items():
        (aside / name).symlink_to(folder)
    (site / "graft_startup.py").write_text(
        caches.startup(tree.base.site_dirs, tree.stack_hash), encoding="utf-8"
    )
    (site / "graft.pth").write_text("import graft_startup\n", encoding="utf-8")
    return site


def finish_environment(tree: Tree, aside: Path) -> None:
    """Write its commands and, last of all, its manifest."""
    write_scripts(aside / "bin", (aside / tree.base.site, *tree.base.site_dirs))
    (aside / ".gitignore").write_text("*\n", encoding="utf-8")
    manifest = {
        "format": FORMAT,
        "recipe": tree.recipe,
        "pin": tree.pin,
        "patches": list(tree.patches),
        "stack_hash": tree.stack_hash,
        "compiled": tree.compiled,
        "base": tree.base.as_json(),
        "files": dict(sorted(tree.files.items())),
        "wheels": str(tree.wheels) if tree.wheels else None,
    }
    (aside / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _make_venv(base: Base, prefix: Path) -> None:
    """A venv without pip, by hand: what `venv` makes holds absolute paths, and may be missing."""
    (prefix / base.site).mkdir(parents=True)
    (prefix / "bin").mkdir()
    short = ".".join(base.python_version.split(".")[:2])
    (prefix / "bin" / "python").symlink_to(base.executable)
    for name in ("python3", f"python{short}"):
        (prefix / "bin" / name).symlink_to("python")
    if not (prefix / "lib64").exists():
        (prefix / "lib64").symlink_to("lib")
    (prefix / "pyvenv.cfg").write_text(
        f"home = {base.executable.parent}\n"
        "include-system-site-packages = false\n"
        f"version = {base.python_version}\n",
        encoding="utf-8",
    )


def _check_packages(plan: Layout, site: Path) -> None:
    """Inductor hashes its source by package: a folder without __init__.py would be left out."""
    for path in plan.files:
        folder = PurePosixPath(path).parent
        if path.endswith(".py") and not (site / folder / "__init__.py").exists():
            raise GraftError(
                f"the stack leaves {path} in a folder without __init__.py, which Inductor's "
                "source hash would miss",
                f"graft edit, add {folder}/__init__.py, then graft refresh",
            )


def _link_bytecode(base: Base, plan: Layout, site: Path) -> None:
    """Give unchanged modules of real folders the base's bytecode, so the first start is no slower.

    Python replaces such a link when it is stale; it does not write through it.
    """
    for folder in plan.folders:
        names = _names(base.torch_dir.parent / folder / "__pycache__")
        if not names:
            continue
        cache = site / folder / "__pycache__"
        cache.mkdir()
        up = "../" * (len(PurePosixPath(base.site).parts) + len(PurePosixPath(folder).parts) + 1)
        inside = folder.removeprefix("torch").strip("/")
        for name in names:
            target = plan.links.get(f"{folder}/{name.partition('.')[0]}.py", "")
            if "/base/" in target:
                os.symlink(
                    f"{up}base/{inside + '/' if inside else ''}__pycache__/{name}", cache / name
                )


def write_scripts(folder: Path, site_dirs: Iterable[Path], root: Path = ROOT) -> None:
    """Write the commands of the packages in `site_dirs` (the first one wins), and graft's own.

    pip's are left out: what is installed into a tree is gone with the next build.
    """
    wanted: dict[str, str] = {}
    for site in site_dirs:
        for file in sorted(site.glob("*.dist-info/entry_points.txt")):
            parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
            parser.optionxform = str  # type: ignore[assignment,method-assign]
            try:
                parser.read(file, encoding="utf-8")
            except configparser.Error:
                continue
            if parser.has_section("console_scripts"):
                for name, value in parser.items("console_scripts"):
                    wanted.setdefault(name, value)
    for name, value in wanted.items():
        module, _, attr = value.partition("[")[0].strip().partition(":")
        if not attr or name.startswith(("pip", "easy_install")) or "/" in name:
            continue
        body = _ENTRY_POINT.format(module=module, first=attr.partition(".")[0], attr=attr)
        _write_script(folder / name, body)
    if (root / "src" / "graft").is_dir():
        _write_script(folder / "graft", _GRAFT.format(src=str(root / "src")))


def _write_script(path: Path, body: str) -> None:
    path.write_text(_SCRIPT.format(body=body), encoding="utf-8")
    path.chmod(0o755)


def wheels_key(wheels: Path | None) -> str:
    """What identifies a folder of wheels: its files' names and sizes."""
    if wheels is None:
        return ""
    files = sorted(wheels.glob("*.whl"))
    return json.dumps([[file.name, file.stat().st_size] for file in files])


def _install_wheels(aside: Path, wheels: Path) -> None:
    from graft.stack.trees import requirements  # only here: it reads pyproject.toml

    wanted = requirements.with_wheel(wheels)
    if not wanted:
        raise UsageError(
            f"{wheels} has no wheel of {', '.join(requirements.names())}",
            next="./build.sh --python PY --offline, without --wheels",
        )
    python = aside / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "--no-index", "--find-links", str(wheels)]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", *wanted]
    env = {**caches.stock_environ(os.environ), "PIP_CONFIG_FILE": os.devnull}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        words = [
            line for line in done.stderr.splitlines() if "ERROR" in line or "No module" in line
        ]
        raise GraftError(
            f"pip could not install {', '.join(wanted)} from {wheels}: "
            f"{' '.join(words) or done.stderr.strip()}",
            next="put the missing wheels there (pip download -d DIR ...), or leave --wheels out",
        )


# --- one build at a time, and nothing half-made --------------------------------------------------


def work_dir(prefix: Path) -> Path:
    """Where a tree is made: beside `prefix`, so that a rename moves it."""
    return prefix.absolute().parent / ".graft"


@contextlib.contextmanager
def locked(prefix: Path, elsewhere: str = _ELSEWHERE) -> Iterator[None]:
    """Hold the lock of `prefix`, and sweep what a killed build left.

    Raises GraftError if another process holds it, and, with `elsewhere` as the command to type,
    where it cannot be written. The lock ends with its process, however it ends.
    """
    work = work_dir(prefix)
    with explaining(prefix, elsewhere):
        work.mkdir(parents=True, exist_ok=True)
        lock = open(work / f"{prefix.name}.lock", "a+", encoding="utf-8")  # noqa: SIM115
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as busy:
            lock.seek(0)
            raise GraftError(
                f"another build of {prefix} is running (process {lock.read().strip() or '?'})",
                next="wait until it has ended, then the same command",
            ) from busy
        lock.seek(0)
        lock.truncate()
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        sweep(prefix)
        yield


def sweep(prefix: Path) -> None:
    """Remove what a build left beside `prefix`. The caller holds the lock."""
    for ending in ("new", "old", "apply"):
        leftover = work_dir(prefix) / f"{prefix.name}.{ending}"
        if leftover.is_dir():
            shutil.rmtree(leftover)


def swap(aside: Path, prefix: Path) -> None:
    """Put the tree made in `aside` where the earlier one is; that one is swept later."""
    old = aside.with_suffix(".old")
    if prefix.exists():
        prefix.rename(old)
    aside.rename(prefix)


def refuse_foreign(prefix: Path) -> None:
    """Raise UsageError if `prefix` is something that a tree may not take the place of."""
    if prefix.is_symlink() or (prefix.exists() and not (prefix / MANIFEST).is_file()):
        if prefix.is_dir() and not prefix.is_symlink() and not any(prefix.iterdir()):
            prefix.rmdir()
            return
        raise UsageError(
            f"{prefix} is there and is not a patched tree (it has no {MANIFEST})",
            next="./build.sh --prefix DIR, with a folder that is not there yet; or remove it",
        )


@contextlib.contextmanager
def explaining(prefix: Path, elsewhere: str = _ELSEWHERE) -> Iterator[None]:
    """Turn what a file system refuses into an error that says what to do.

    `elsewhere` is what to type where a folder cannot be written.
    """
    try:
        yield
    except OSError as wrong:
        where = wrong.filename or prefix
        if wrong.errno in FULL:
            message = f"no space left for {prefix} (while writing {where})"
            follow = "free some (a tree takes 5 MB), or ./build.sh --prefix DIR on another disk"
        elif wrong.errno in READ_ONLY:
            message, follow = f"cannot write {where}: {wrong.strerror}", elsewhere
        else:
            message, follow = f"{wrong.strerror}: {where}", "fix it, then the same command"
        raise GraftError(message, follow) from wrong


# --- reading and checking ------------------------------------------------------------------------


def load(prefix: Path) -> Tree:
    """Read the tree at `prefix`. Raises GraftError when there is none, or none that can be read."""
    prefix = prefix.absolute()
    try:
        data: dict[str, Any] = json.loads((prefix / MANIFEST).read_text("utf-8"))
        if data["format"] != FORMAT:
            raise GraftError(
                f"{prefix} was made by another version of this tool (format {data['format']}, "
                f"expected {FORMAT})",
                next=_rebuild(prefix),
            )
        return Tree(
            prefix=prefix,
            base=Base.from_json(data["base"]),
            pin=data["pin"],
            patches=tuple(data["patches"]),
            stack_hash=data["stack_hash"],
            files=data["files"],
            recipe=data["recipe"],
            compiled=data["compiled"],
            wheels=Path(data["wheels"]) if data.get("wheels") else None,
        )
    except (FileNotFoundError, NotADirectoryError) as missing:
        raise GraftError(
            f"there is no patched tree in {prefix}", next=_rebuild(prefix)
        ) from missing
    except (ValueError, KeyError, TypeError) as damaged:
        raise GraftError(
            f"{prefix / MANIFEST} cannot be read: {damaged!r}", next=_rebuild(prefix)
        ) from damaged


def _rebuild(prefix: Path) -> str:
    return "./build.sh" if prefix == ROOT / "build" else f"./build.sh --prefix {prefix}"


def problems(tree: Tree, pin: Pin) -> list[str]:
    """Everything in which a tree is not what it was made as: base, links, changed files."""
    base, found = tree.base, []
    if not base.torch_dir.is_dir():
        return [f"its base is gone: there is no {base.torch_dir}"]
    found += [f"base: {each}" for each in pins.differing(pin, base.torch_dir)]
    for name, folder in _anchors(base).items():
        link = tree.prefix / name
        if not link.is_symlink() or os.readlink(link) != str(folder):
            found.append(f"{link} does not point to {folder}")
    return found + (_compiled_problems(tree) if tree.compiled else _linked_problems(tree))


def _compiled_problems(tree: Tree) -> list[str]:
    built = tree.base.source
    assert built is not None
    found = (
        [] if tree.torch_dir.resolve() == (built / "torch").resolve() else ["torch is elsewhere"]
    )
    for path, blob in sorted(tree.files.items()):
        file = built / path
        have = blob_id(file.read_bytes()) if file.is_file() else NULL_BLOB
        if have != blob:
            found.append(f"{path} differs (blob {have[:12]}, made as {blob[:12]})")
    return found


def _linked_problems(tree: Tree) -> list[str]:
    base, found = tree.base, []
    plan, site = layout(base, tree.files), tree.site_packages
    for real in sorted(plan.folders):
        if not (site / real).is_dir() or (site / real).is_symlink():
            found.append(f"{real} is not a real folder")
            continue
        for name in _names(site / real):
            path = f"{real}/{name}"
            if name != "__pycache__" and not (
                path in plan.folders or path in plan.links or path in plan.files
            ):
                found.append(f"{path} does not belong there")
    for path, target in plan.links.items():
        try:
            if os.readlink(site / path) != target:
                found.append(f"{path} links elsewhere")
        except OSError:
            found.append(f"{path} is not the link that it was")
    for path in sorted(plan.files):
        file = site / path
        if file.is_symlink() or not file.is_file():
            found.append(f"{path} is missing or not a real file")
        elif (blob := blob_id(file.read_bytes())) != tree.files[path]:
            found.append(f"{path} differs (blob {blob[:12]}, made as {tree.files[path][:12]})")
    return found


def _anchors(base: Base) -> dict[str, Path]:
    anchors = {"base": base.torch_dir}
    if base.source:
        anchors["source"] = base.source / "torch"
    return anchors


def verify(tree: Tree, stack: Stack, start: bool = True) -> None:
    """Raise GraftError, naming each thing, unless base and tree are what pin and series say.

    With `start`, the tree's Python is started too, and has to find the tree's torch.
    """
    rebuild = _rebuild(tree.prefix)
    if tree.pin != stack.pin.name:
        raise GraftError(
            f"{tree.prefix} was made for {tree.pin}, expected {stack.pin.name}", next=rebuild
        )
    if tree.stack_hash != stack.hash:
        raise GraftError(
            f"{tree.prefix} was made by another series (stack {tree.stack_hash[:12]}, "
            f"patches/{stack.pin.name} is {stack.hash[:12]})",
            next=rebuild,
        )
    if tree.base.source and not tree.compiled:
        source.check(tree.base.source, stack.pin)
    found = problems(tree, stack.pin)
    if found:
        more = f"; and {len(found) - 10} more" if len(found) > 10 else ""
        raise GraftError(
            f"{tree.prefix} is not what it was made as: {'; '.join(found[:10])}{more}",
            next=rebuild,
        )
    if start:
        check_start(tree)


def check_start(tree: Tree) -> None:
    """Raise GraftError unless the tree's Python, started as the user would, finds its torch."""
    code = "import importlib.util as u; print(u.find_spec('torch').origin)"
    try:
        done = subprocess.run(
            [str(tree.python), "-c", code],
            cwd=tree.prefix,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as wrong:
        raise GraftError(
            f"cannot run {tree.python}: {wrong.strerror}", next=_rebuild(tree.prefix)
        ) from wrong
    found = done.stdout.strip()
    if done.returncode:
        raise GraftError(
            f"{tree.python} does not start: {done.stderr.strip().splitlines()[-1:]}",
            next=_rebuild(tree.prefix),
        )
    if Path(found) != tree.torch_dir / "__init__.py":
        because = " (PYTHONPATH comes first)" if os.environ.get("PYTHONPATH") else ""
        raise GraftError(
            f"{tree.python} imports torch from {Path(found).parent}{because}; expected "
            f"{tree.torch_dir}",
            next="unset PYTHONPATH, then the same command" if because else _rebuild(tree.prefix),
        )


def is_current(prefix: Path, base: Base, stack: Stack, wheels: Path | None = None) -> bool:
    """Whether `prefix` holds just the tree that `build` would make."""
    try:
        tree = load(prefix)
        names = [patch.name for patch in stack.patches]
        wanted = recipe(base, stack.pin, stack.hash, names, wheels_key(wheels))
        if tree.recipe != wanted:
            return False
        verify(tree, stack)
    except GraftError:
        return False
    return True


def clean(prefix: Path) -> bool:
    """Remove the tree at `prefix`, its caches, and what builds left. False if there was nothing.

    Raises UsageError when `prefix` is something else than a tree, and GraftError where it cannot
    be written.
    """
    prefix = prefix.absolute()
    if not work_dir(prefix).exists() and not prefix.exists():
        return False
    writable = f"make {prefix.parent} writable (chmod u+w), then graft clean --prefix {prefix}"
    with locked(prefix, writable), explaining(prefix, writable):
        there = prefix.exists() or prefix.is_symlink()
        if there:
            if prefix.is_symlink() or not (prefix / MANIFEST).is_file():
                raise UsageError(f"{prefix} is not a patched tree (it has no {MANIFEST})")
            with contextlib.suppress(GraftError):
                shutil.rmtree(load(prefix).cache_dir, ignore_errors=True)
            prefix.rename(work_dir(prefix) / f"{prefix.name}.old")
        sweep(prefix)
    (work_dir(prefix) / f"{prefix.name}.lock").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        work_dir(prefix).rmdir()
    return there


def pythons(prefix: Path) -> dict[str, list[str]]:
    """How to start the stock and the patched Python of the tree at `prefix`.

    Start the stock one with ``caches.stock_environ(os.environ)``.
    """
    tree = load(prefix)
    return {"stock": [str(tree.base.python)], "patched": [str(tree.python)]}
