"""Upstream's test files: from a checkout, a sparse clone in the user's cache, or by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from graft.errors import GraftError, UsageError, nearest
from graft.places import user_cache
from graft.stack import Stack, commits
from graft.stack.git import git
from graft.stack.pins import Pin

REMOTE = "https://github.com/pytorch/pytorch"


def in_upstream(file: str) -> str:
    """``test_x.py`` or ``inductor/test_x.py`` -> ``test/inductor/test_x.py``.

    Raises UsageError for what is no name of a Python file.
    """
    path = PurePosixPath(file)
    if len(path.parts) == 1:
        path = PurePosixPath("test/inductor") / path
    elif path.parts[0] != "test":
        path = PurePosixPath("test") / path
    if path.suffix != ".py" or ".." in path.parts:
        raise UsageError(f"{file} is not one of PyTorch's test files; expected test_NAME.py")
    return str(path)


def copy(paths: Sequence[Path], folder: Path) -> list[str]:
    """Copy test files by themselves into `folder`/test/inductor; their paths below `folder`.

    Lines end as the pin's do, whatever the copy's end in: else no hunk would apply to them.

    Raises UsageError for one that is not there.
    """
    wanted = []
    for path in paths:
        if not path.is_file():
            raise UsageError(f"there is no file {path}", "graft upstream-tests --file PATH")
        wanted.append(f"test/inductor/{path.name}")
        (folder / wanted[-1]).parent.mkdir(parents=True, exist_ok=True)
        (folder / wanted[-1]).write_bytes(path.read_bytes().replace(b"\r\n", b"\n"))
    return wanted


def _folders(wanted: Sequence[str]) -> list[str]:
    return sorted({str(PurePosixPath(path).parent) for path in wanted})


def unpack(checkout: Path, pin: Pin, wanted: Sequence[str], folder: Path) -> None:
    """Copy the folders of `wanted`, as committed: the files import from their neighbours.

    Raises UsageError for a file that the pin's commit has not.

    Blob by blob, because `git archive` would fetch the whole of a checkout that is blob-less.
    """
    listed = git("ls-tree", "-r", "-z", pin.commit, *_folders(wanted), cwd=checkout).split("\0")
    entries = [entry.partition("\t") for entry in listed if entry.startswith("100")]
    blobs = {path: info.split()[2] for info, _, path in entries}
    for path in wanted:
        if path not in blobs:
            raise UsageError(f"PyTorch {pin.version} has no {path}{nearest(path, blobs)}")
    asked = "".join(f"{blob}\n" for blob in blobs.values())
    answer = commits.encode(git("cat-file", "--batch", cwd=checkout, input=asked))
    at = 0
    for path in blobs:
        start = answer.index(b"\n", at) + 1  # after "<blob> blob <size>"
        at = start + int(answer[at:start].split()[2])
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(answer[start:at])
        at += 1


def cache_folder(pin: Pin) -> Path:
    """Where the fetched tests of a pin are kept."""
    return user_cache() / f"pytorch-{pin.commit[:12]}"


def fetch(pin: Pin, wanted: Sequence[str], say: Callable[[str], None]) -> Path:
    """A checkout, at the pin's commit, of the folders of `wanted` alone; fetched if it is not here.

    A fetch that was interrupted is taken up again. Raises GraftError, saying what to give instead,
    when there is no network.
    """
    folder = cache_folder(pin)
    config = ("-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=30")
    try:
        if not (folder / ".git").exists():
            folder.mkdir(parents=True, exist_ok=True)
            git("init", "-q", cwd=folder)
        git("config", "remote.origin.url", REMOTE, cwd=folder)
        head = git("rev-parse", "HEAD", cwd=folder, check=False).strip()
        if head != pin.commit or not all((folder / path).is_dir() for path in _folders(wanted)):
            say(f"fetching {' '.join(_folders(wanted))} of {pin.commit[:12]} from {REMOTE}")
            shallow = ("--depth", "1", "--filter=blob:none", "--no-tags")
            git(*config, "fetch", "-q", *shallow, "origin", pin.commit, cwd=folder)
            git("sparse-checkout", "set", "--no-cone", *_folders(wanted), cwd=folder)
            git(*config, "checkout", "-q", "--detach", pin.commit, cwd=folder)
    except (GraftError, OSError) as failed:
        raise GraftError(
            f"the tests of PyTorch {pin.version} are not here and could not be fetched: {failed}",
            f"graft upstream-tests --checkout DIR (a PyTorch checkout at {pin.commit}), or "
            "--file PATH (a test file of that commit)",
        ) from failed
    return folder


def _refuses(
    folder: Path, head: str, path: str, part: str, refused: dict[str, list[str]], patch: str
) -> bool:
    """Whether the file `path` is another than the one that `part` of `patch` changes."""
    ceiling = {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    try:
        git("apply", "--check", "-", cwd=folder, input=head + part, env=ceiling)
    except GraftError:
        refused.setdefault(path, []).append(patch)
        return True
    return False


def apply(
    stack: Stack, folder: Path, refused: dict[str, list[str]] | None = None
) -> dict[str, list[str]]:
    """Apply what the stack changes in upstream's own tests; which patches changed which file.

    Raises GraftError for a patch that does not apply to the files of `folder`; with `refused` it
    is added there instead, by file, and the file stays as it is.
    """
    upstreams = commits.absent_files(stack.patches, ())
    changed: dict[str, list[str]] = {}
    for patch in stack.patches:
        head, parts = commits.sections(patch.text.decode("utf-8", "surrogateescape"))
        kept = [
            (path, part)
            for path, part in parts
            if path in upstreams and path.startswith("test/") and (folder / path).exists()
        ]
        if refused is not None:
            kept = [each for each in kept if not _refuses(folder, head, *each, refused, patch.name)]
        if not kept:
            continue
        ceiling = {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
        text = head + "".join(part for _, part in kept)
        try:
            git("apply", "-", cwd=folder, input=text, env=ceiling)
        except GraftError as failed:
            raise GraftError(
                f"{patch.name} does not apply to {', '.join(path for path, _ in kept)}: "
                f"{failed.message}",
                f"give the files of PyTorch at {stack.pin.commit}",
            ) from failed
        for path, _ in kept:
            changed.setdefault(path, []).append(patch.name)
    return changed
