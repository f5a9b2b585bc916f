"""A git repository with a commit a patch: the released files first, then the stack.

Patches are read into it with ``git am`` and written from it with ``git format-patch``, one the
inverse of the other.

A wheel has none of PyTorch's test files, so the released form of an upstream test that a patch
changes may be absent. Such a commit holds its hunks as text instead, in ``<test file>.hunks``, and
the text goes back into the patch byte for byte: the commit can be amended, moved and dropped, and
the hunks stay with it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from graft.errors import GraftError
from graft.stack import Patch, trailers
from graft.stack.git import FORMAT_PATCH_FLAGS, IDENTITY, NULL_BLOB, blob_id, git

BRANCH = "stack"
HUNKS = ".hunks"
_EXCLUDE = "__pycache__/\n*.pyc\n.pytest_cache/\n.hypothesis/\n"
_MEND = "git checkout the patch file as it was (only graft refresh writes them)"


@dataclass(frozen=True)
class Change:
    """What a commit does to one file; a blob id is forty zeros where there is no file."""

    path: str
    mode: str
    old_blob: str
    new_blob: str


@dataclass(frozen=True)
class Repo:
    """The repository in the folder `path`: the commit `pristine`, then the stack's commits."""

    path: Path
    pristine: str

    def git(self, *args: str, input: str | bytes | None = None) -> str:
        """Run git here; paths are printed as they are."""
        return git("-c", "core.quotePath=false", *args, cwd=self.path, input=input)

    def id(self, what: str = "HEAD") -> str:
        """The id of a commit or tree. Raises GraftError where there is none."""
        return self.git("rev-parse", "--verify", "-q", what).strip()

    def commits(self, head: str = "HEAD") -> list[str]:
        """Those after the pristine one, oldest first."""
        return self.git("rev-list", "--reverse", f"{self.pristine}..{head}").split()

    def message(self, commit: str) -> str:
        """The whole message without what ghstack wrote into it, ending with one newline."""
        return trailers.strip(self.git("log", "-1", "--format=%B", commit)).strip("\n") + "\n"

    def files(self, commit: str) -> dict[str, str]:
        """Path -> blob id of every file of `commit`."""
        entries = self.git("ls-tree", "-r", "-z", commit).split("\0")[:-1]
        split = (entry.split("\t", 1) for entry in entries)
        return {path: info.split()[2] for info, path in split}

    def read(self, blob: str) -> bytes:
        """A file's bytes, by blob id or ``commit:path``."""
        return encode(self.git("cat-file", "blob", blob))

    def changes(self, commit: str, parent: str) -> list[Change]:
        """The files in which `commit` differs from `parent`."""
        fields = self.git("diff-tree", "-r", "-z", "--no-renames", "--raw", parent, commit)
        pairs = fields.split("\0")[:-1]
        found = []
        for info, path in zip(pairs[::2], pairs[1::2], strict=True):
            _, mode, old, new, _ = info.split()
            found.append(Change(path, mode, old, new))
        return found

    def commit(self, tree: str, parent: str, message: str) -> str:
        """A commit by no one in particular: what comes out depends on the content alone."""
        return self.git("commit-tree", tree, "-p", parent, "-F", "-", input=message).strip()

    def export(
        self, commits: Iterable[str], messages: Mapping[str, str] | None = None
    ) -> list[bytes]:
        """Each commit as the text of a patch file, hunks of absent files put back.

        `messages` has those that are not the commit's own.
        """
        parent, texts = self.pristine, []
        for commit in commits:
            message = (messages or {}).get(commit) or self.message(commit)
            again = self.commit(self.id(f"{commit}^{{tree}}"), parent, message)
            text = self.git("format-patch", *FORMAT_PATCH_FLAGS, "--stdout", "-1", again)
            texts.append(encode(_put_back(self, text, again)))
            parent = again
        return texts

    def with_files(self, new: Mapping[str, tuple[int, bytes]]) -> str:
        """The head of a chain in which each path has the given bytes from the given commit on.

        `new` maps a path to (index of the first commit that has it so, its bytes). No later commit
        may touch the path. Nothing is merged: each commit's tree is its own with that one file
        replaced.
        """
        blobs = {
            path: (since, self.git("hash-object", "-w", "--stdin", input=data).strip())
            for path, (since, data) in new.items()
        }
        parent = self.pristine
        with tempfile.TemporaryDirectory(prefix="graft-index-") as aside:
            env = {"GIT_INDEX_FILE": str(Path(aside) / "index")}
            for at, commit in enumerate(self.commits()):
                git("read-tree", commit, cwd=self.path, env=env)
                for path, (since, blob) in blobs.items():
                    if at >= since:
                        entry = f"100644,{blob},{path}"
                        git("update-index", "--add", "--cacheinfo", entry, cwd=self.path, env=env)
                tree = git("write-tree", cwd=self.path, env=env).strip()
                parent = self.commit(tree, parent, self.message(commit))
        return parent


def make(path: Path, pristine: Mapping[str, bytes], patches: Sequence[Patch]) -> Repo:
    """A new repository in `path`: `pristine` as first commit, then a commit a patch.

    Raises GraftError naming the patch that does not apply, or that leaves other files than its
    blob ids say.
    """
    path.mkdir(parents=True)
    git("init", "-q", "-b", BRANCH, cwd=path)
    settings = {
        "user.name": IDENTITY["NAME"],
        "user.email": IDENTITY["EMAIL"],
        "core.autocrlf": "false",
    }
    for key, value in settings.items():
        git("config", key, value, cwd=path)
    (path / ".git" / "info").mkdir(exist_ok=True)
    (path / ".git" / "info" / "exclude").write_text(_EXCLUDE)
    for name, data in pristine.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    git("add", "-A", "-f", ".", cwd=path)
    git("commit", "-q", "--allow-empty", "-m", "The files as released", cwd=path)
    repo = Repo(path, git("rev-parse", "HEAD", cwd=path).strip())
    absent = absent_files(patches, pristine)
    held: dict[str, str] = {}
    for patch in patches:
        _am(repo, patch, absent, held)
    return repo


def _am(repo: Repo, patch: Patch, absent: Collection[str], held: dict[str, str]) -> None:
    try:
        repo.git("am", "-q", "-k", input=_carry(patch.text, absent, held))
    except GraftError as failed:
        raise GraftError(
            f"{patch.name} does not apply to the files before it: {failed.message}", _MEND
        ) from failed
    there = repo.files("HEAD")
    for change in patch.files:
        found = there.get(change.path, NULL_BLOB)
        if change.path not in absent and found != change.new_blob:
            raise GraftError(
                f"{patch.name} leaves {change.path} with blob {found[:12]}, expected "
                f"{change.new_blob[:12]} (it applies with an offset, or to another file)",
                _MEND,
            )


# --- hunks of files that are not here ------------------------------------------------------------


def absent_files(patches: Iterable[Patch], pristine: Collection[str]) -> set[str]:
    """Upstream's files that `patches` change and `pristine` lacks: tests that no wheel has."""
    made: set[str] = set()
    absent: set[str] = set()
    for patch in patches:
        for change in patch.files:
            if change.is_new:
                made.add(change.path)
            elif change.path not in made and change.path not in pristine:
                absent.add(change.path)
    return absent


def sections(text: str) -> tuple[str, list[tuple[str, str]]]:
    """A patch's header and message, and (path, its part of the diff) for each file.

    Raises GraftError for a file line of another form than ``diff --git a/<path> b/<path>``.
    """
    at = text.find("\ndiff --git ") + 1
    if not at:
        return text, []
    found = []
    for part in re.split(r"(?m)^(?=diff --git )", text[at:])[1:]:
        line = part.partition("\n")[0]
        named = re.match(r"diff --git a/(.+) b/\1\Z", line)
        if not named:
            raise GraftError(f"a diff has a line of an unexpected form: {line!r}")
        found.append((named[1], part))
    return text[:at], found


def encode(text: str) -> bytes:
    """The inverse of how `graft.stack.git` decodes."""
    return text.encode("utf-8", "surrogateescape")


def _carry(text: bytes, absent: Collection[str], held: dict[str, str]) -> bytes:
    """The patch, with what it does to `absent` files held as the text of `.hunks` files.

    `held` is what those files contain so far; it is brought up to date.
    """
    head, parts = sections(text.decode("utf-8", "surrogateescape"))
    done = [
        _replacement(path + HUNKS, held.get(path), part) if path in absent else part
        for path, part in parts
    ]
    held.update((path, part) for path, part in parts if path in absent)
    return encode(head + "".join(done))


def _replacement(path: str, old: str | None, new: str) -> str:
    """The diff that makes `path` from nothing, or replaces the whole of it."""
    old_lines = [] if old is None else old.removesuffix("\n").split("\n")
    new_lines = new.removesuffix("\n").split("\n")
    old_blob = NULL_BLOB if old is None else blob_id(encode(old))
    index = f"index {old_blob}..{blob_id(encode(new))}"
    if old is None:
        head = ["new file mode 100644", index, "--- /dev/null"]
    else:
        head = [f"{index} 100644", f"--- a/{path}"]
    lines = [
        f"diff --git a/{path} b/{path}",
        *head,
        f"+++ b/{path}",
        f"@@ -{int(old is not None)},{len(old_lines)} +1,{len(new_lines)} @@",
        *(f"-{line}" for line in old_lines),
        *(f"+{line}" for line in new_lines),
    ]
    return "\n".join(lines) + "\n"


def _put_back(repo: Repo, text: str, commit: str) -> str:
    """The inverse of `_carry`, for what format-patch gives for `commit`."""
    head, parts = sections(text)
    there = repo.files(commit)
    done: dict[str, str] = {}
    for path, part in parts:
        if not path.endswith(HUNKS):
            done[path] = part
            continue
        if path not in there:
            continue
        carried, upstream = repo.read(there[path]).decode("utf-8"), path.removesuffix(HUNKS)
        if not carried.startswith(f"diff --git a/{upstream} b/{upstream}\nindex "):
            raise GraftError(
                f"{path} is not the hunks of {upstream} as a patch has them",
                "graft edit --source CHECKOUT, to change those hunks",
            )
        done[upstream] = carried
    return head + "".join(part for _, part in sorted(done.items()))
