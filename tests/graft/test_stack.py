"""A series and its patch files are read as git wrote them, and refused where git would misread."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tinytorch import CAP, SECOND, TORCH, make_patches, make_pin, make_root

from graft import stack
from graft.errors import GraftError
from graft.stack import Patch, pins
from graft.stack.git import FORMAT_PATCH_FLAGS, NULL_BLOB, blob_id, git

LONG = (
    "[inductor] A subject well over seventy-six columns, with an é, because mail headers fold\n\n"
    "  Indented, then 'diff' and -- dashes.\n\n> quoted\nFrom here on: text.\n"
)


def patch_of(tmp_path: Path, *commits: object) -> Patch:
    text = make_patches(tmp_path, commits)[-1]  # type: ignore[arg-type]
    return Patch("x.patch", tmp_path / "x.patch", text)


def test_a_patch_is_read_as_git_wrote_it(tmp_path: Path) -> None:
    patch = patch_of(tmp_path, CAP)
    patch.check()
    assert patch.subject == "[inductor] Cap the reads"
    assert patch.message == CAP[0]
    changes = {change.path: change for change in patch.files}
    assert set(changes) == set(CAP[1])
    config = changes["torch/_inductor/config.py"]
    assert config.old_blob == blob_id(TORCH[config.path].encode())
    assert config.new_blob == blob_id((CAP[1][config.path] or "").encode())
    assert not config.is_new
    assert config.in_tree
    assert changes["torch/_inductor/reads.py"].is_new
    assert not changes["test/inductor/test_reads.py"].in_tree
    [hunk] = changes["torch/_inductor/scheduler.py"].hunks
    assert hunk.old_lines[3] == "    return 5"
    assert hunk.old_start == 19


@pytest.mark.parametrize("message", [LONG, "[inductor] Only a subject\n"])
def test_a_message_is_the_one_that_git_am_reads(tmp_path: Path, message: str) -> None:
    patch = patch_of(tmp_path, (message, {"torch/functional.py": "x\n"}))
    patch.check()
    assert patch.message == message
    upstream = tmp_path / "upstream"
    git("checkout", "-q", "HEAD~1", cwd=upstream)
    git("am", "-k", cwd=upstream, input=patch.text)
    assert git("log", "-1", "--format=%B", cwd=upstream).rstrip("\n") + "\n" == message


@pytest.mark.parametrize("line", ["diff -u a b", "---", "--- a/file", "Index: x", "---  "])
def test_a_line_that_git_would_misread_is_refused(tmp_path: Path, line: str) -> None:
    message = f"[inductor] Subject\n\nBefore\n{line}\nAfter\n"
    patch = patch_of(tmp_path, (message, {"torch/functional.py": "x\n"}))
    with pytest.raises(GraftError, match="reads as the end of the message") as caught:
        patch.check()
    assert repr(line.rstrip()) in caught.value.message.replace("  '", "'")
    # It is no idle fear: git am drops what follows.
    upstream = tmp_path / "upstream"
    git("checkout", "-q", "HEAD~1", cwd=upstream)
    git("am", "-k", cwd=upstream, input=patch.text, check=False)
    assert "After" not in git("log", "-1", "--format=%B", cwd=upstream)


def test_lines_that_only_look_alike_are_allowed() -> None:
    assert stack.misread_line("diff of a and b\n----\n-- x\n--- \n---- a\nFrom x to y\n") == "--- "
    assert stack.misread_line("diff of a and b\n----\n-- x\n---- a\nFrom x to y\n") is None
    assert stack.misread_line("From me Sat Nov 21 10:59:01 2026") is not None


def test_content_that_looks_like_a_diff_is_content(tmp_path: Path) -> None:
    before = "-- a\n-- b\n@@ -1 +1 @@\ndiff --git a/x b/x\n"
    after = "++ a\n-- b\n@@ -1 +1 @@\ndiff --git a/y b/y\n"
    commits = [
        ("one", {"torch/functional.py": before}),
        ("two", {"torch/functional.py": after, "torch/nn/__init__.py": "x = 1\n"}),
    ]
    patch = patch_of(tmp_path, *commits)
    patch.check()
    assert [change.path for change in patch.files] == [
        "torch/functional.py",
        "torch/nn/__init__.py",
    ]


def test_missing_newlines_and_empty_files_are_read(tmp_path: Path) -> None:
    files = {"torch/functional.py": "no newline", "torch/_inductor/empty.py": ""}
    patch = patch_of(tmp_path, ("one", {"torch/nn/__init__.py": "a"}), ("two", files))
    changes = {change.path: change for change in patch.files}
    assert changes["torch/_inductor/empty.py"].new_blob == blob_id(b"")
    assert changes["torch/_inductor/empty.py"].hunks == ()
    assert changes["torch/functional.py"].new_blob == blob_id(b"no newline")


def test_a_removal_has_no_blob_afterwards(tmp_path: Path) -> None:
    patch = patch_of(tmp_path, ("drop", {"torch/_inductor/codegen/simd.py": None}))
    [change] = patch.files
    assert change.is_deleted
    assert change.new_blob == NULL_BLOB


def edited(patch: Patch, old: str, new: str) -> Patch:
    assert old.encode() in patch.text
    return Patch(patch.name, patch.path, patch.text.replace(old.encode(), new.encode()))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("From 0000", "from 0000", "is not what git format-patch writes"),
        ("\nSubject: ", "\nTitle: ", "has no Subject|more than one commit"),
        ("new file mode 100644", "new file mode 100755", "another mode than 100644"),
        ("new file mode 100644", "rename from torch/x.py", "renames"),
        ("new file mode 100644", "GIT binary patch", "as a binary file"),
        ("a/torch/_inductor/reads.py b/torch/_inductor/reads.py", "a/c10/x.h b/c10/x.h", "c10/x.h"),
        ("a/torch/_inductor/reads.py b/", "a/other b/", "a file line of an unexpected form"),
        ("@@ -0,0 +1,2 @@", "@@ -0,0 +1,9 @@", "ends early"),
        (" 100644\n--- a/torch/_inductor/scheduler.py", " 100644\n---", None),
    ],
)
def test_what_a_patch_may_not_hold(tmp_path: Path, old: str, new: str, says: str | None) -> None:
    patch = edited(patch_of(tmp_path, CAP), old, new)
    if says is None:
        patch.check()
        return
    with pytest.raises(GraftError, match=f"x.patch .*({says})") as caught:
        patch.check()
    assert caught.value.next


def test_a_short_index_line_is_refused(tmp_path: Path) -> None:
    patch = patch_of(tmp_path, CAP)
    short = re.sub(rb"index ([0-9a-f]{10})[0-9a-f]{30}\.\.", rb"index \1..", patch.text)
    with pytest.raises(GraftError, match="no line 'index <40 digits>"):
        Patch("x.patch", patch.path, short).check()


# --- series --------------------------------------------------------------------------------------


def test_a_series_is_loaded_in_its_order(tmp_path: Path) -> None:
    root = make_root(tmp_path, [CAP, SECOND])
    series = root / "patches/v2.11.0/series"
    series.write_text("# a comment\n\n" + series.read_text())
    loaded = stack.load(pins.load(root=root), root)
    assert [patch.subject for patch in loaded.patches] == [
        "[inductor] Cap the reads",
        "[inductor] Count differently",
    ]
    assert set(loaded.new_files) == {"torch/_inductor/reads.py", "test/inductor/test_reads.py"}
    assert "test/inductor/test_reads.py" not in loaded.tree_files
    stack.check_copies(loaded, root)


def test_no_series_is_an_empty_stack(tmp_path: Path) -> None:
    loaded = stack.load(make_pin(), tmp_path)
    assert loaded.patches == ()
    assert loaded.tree_files == {}
    stack.check_copies(loaded, tmp_path)


def test_the_hash_is_of_the_tree_alone(tmp_path: Path) -> None:
    one = stack.load(make_pin(), make_root(tmp_path / "1", [CAP]))
    files = {**CAP[1], "test/inductor/test_reads.py": "other = 1\n"}
    reworded = stack.load(make_pin(), make_root(tmp_path / "2", [("Other words", files)]))
    both = stack.load(make_pin(), make_root(tmp_path / "3", [CAP, SECOND]))
    merged = {**CAP[1], **SECOND[1]}
    squashed = stack.load(make_pin(), make_root(tmp_path / "4", [("At once", merged)]))
    assert one.hash == reworded.hash
    assert both.hash == squashed.hash
    assert one.hash != both.hash


def test_a_line_without_a_file_and_a_file_without_a_line(tmp_path: Path) -> None:
    root = make_root(tmp_path, [CAP, SECOND])
    folder = root / "patches/v2.11.0"
    series = folder / "series"
    series.write_text("patch-0.patch\npatch-l.patch\n")
    with pytest.raises(GraftError, match=r"names patch-l\.patch.*did you mean patch-1\.patch"):
        stack.load(make_pin(), root)
    series.write_text("patch-0.patch\n")
    with pytest.raises(GraftError, match=r"patch-1\.patch has no line in patches/v2\.11\.0/series"):
        stack.load(make_pin(), root)
    series.write_text("patch-0.patch\npatch-1.patch\npatch-0.patch\n")
    with pytest.raises(GraftError, match=r"names patch-0\.patch twice"):
        stack.load(make_pin(), root)


def test_a_file_that_the_pin_does_not_list(tmp_path: Path) -> None:
    with pytest.raises(GraftError) as caught:
        make_root(tmp_path, [("x", {"torch/functional.py": "y = 1\n"})])
    assert "patch-0.patch changes torch/functional.py, which pins/v2.11.0.toml" in str(caught.value)
    assert caught.value.next is not None
    assert "refresh" in caught.value.next


def test_a_new_file_outside_the_layout(tmp_path: Path) -> None:
    with pytest.raises(GraftError, match="makes torch/new.py; new files belong under"):
        make_root(tmp_path, [("x", {"torch/new.py": "y = 1\n"})])


def test_an_upstream_test_may_change_without_the_pin(tmp_path: Path) -> None:
    root = make_root(tmp_path, [("x", {"test/inductor/test_old.py": "OLD = 2\n"})])
    loaded = stack.load(make_pin(), root)
    assert loaded.tree_files == {}
    stack.check_copies(loaded, root)


def test_copies_are_held_against_the_last_patch(tmp_path: Path) -> None:
    root = make_root(tmp_path, [CAP, SECOND])
    loaded = stack.load(make_pin(), root)
    overlay = root / "overlay/torch/_inductor"
    (overlay / "stray.py").write_text("")
    (overlay / "__pycache__").mkdir()
    (overlay / "__pycache__" / "reads.pyc").write_text("")
    (root / "tests/inductor/conftest.py").write_text("")
    (root / "tests/inductor/test_stray.py").write_text("")
    (root / "tests/inductor/test_reads.py").unlink()
    (overlay / "reads.py").write_text("def count():\n    return 3\n")
    problems = stack.differing_copies(loaded, root)
    assert [each.partition(" (")[0] for each in problems] == [
        "tests/inductor/test_reads.py is missing",
        "overlay/torch/_inductor/reads.py differs",
        "overlay/torch/_inductor/stray.py is made by no patch",
        "tests/inductor/test_stray.py is made by no patch",
    ]
    with pytest.raises(GraftError, match="made by no patch") as caught:
        stack.check_copies(loaded, root)
    assert caught.value.next is not None
    assert "graft refresh" in caught.value.next


def test_the_shipped_series_loads_and_its_copies_match() -> None:
    for name in pins.names():
        loaded = stack.load(pins.load(name))
        stack.check_copies(loaded)
        for patch in loaded.patches:
            assert patch.text.startswith(b"From " + b"0" * 40), patch.name
    assert "--full-index" in FORMAT_PATCH_FLAGS
