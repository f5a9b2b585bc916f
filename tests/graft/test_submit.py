"""graft submit: with the real ghstack, its own fake of GitHub, and a bare repository to push to."""

from __future__ import annotations

import io
import os
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hosted
import pytest
import standin
from click.testing import CliRunner, Result
from hosted import CAP, SPLIT, TILES, Hosted, amended, make_hosted
from tinytorch import CONFIG, SCHEDULER, snapshot

from graft import stack
from graft.cli import export_command, graft
from graft.errors import GraftError, UsageError
from graft.places import ROOT
from graft.stack import Status, fork, ghstack_session, journal, refresh, submit, submitted, trailers
from graft.stack.git import git
from graft.stack.submitted import Branch, Pull, Submitted
from graft.stack.trees import bases


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Hosted]:
    made = make_hosted(tmp_path)
    before = (snapshot(made.checkout / "torch"), _where(made.checkout))
    yield made
    assert (snapshot(made.checkout / "torch"), _where(made.checkout)) == before
    assert not (made.checkout / ".git/worktrees").exists()
    assert not (made.checkout / ".git/graft").exists()


def _where(checkout: Path) -> tuple[str, ...]:
    asked = (("symbolic-ref", "HEAD"), ("rev-parse", "HEAD"), ("status", "--porcelain"))
    return tuple(git(*each, cwd=checkout) for each in asked)


def numbers(session: ghstack_session.Session) -> list[tuple[str, int]]:
    return [(each.what, each.number) for each in session.sent]


# --- sessions ------------------------------------------------------------------------------------


def test_first_submission(there: Hosted) -> None:
    assert numbers(there.send()) == [("created", 500), ("created", 501), ("created", 502)]
    pulls = there.pulls()
    for number, (message, files) in zip((500, 501, 502), (CAP, SPLIT, TILES), strict=True):
        title, _, body = message.partition("\n\n")
        assert pulls[number].title == title
        assert pulls[number].body.endswith(body.rstrip("\n"))
        assert f"* __->__ #{number}" in pulls[number].body
        assert "source-id" not in pulls[number].body
        assert there.patch_of(number) == set(files)
    data = tomllib.loads(submitted.file(there.pin, there.root).read_text())
    table = data["pull_requests"]["pytorch/pytorch"]
    assert [table[patch.name]["number"] for patch in there.stack.patches] == [500, 501, 502]
    tree = there.git("rev-parse", "gh/me/2/head^{tree}").strip()
    assert table["split-the-rows-of-a-step.patch"] == {"number": 501, "source_id": tree}
    shown = [patch.status for patch in there.stack.patches]
    assert shown == [Status("ours", f"pytorch#{n}") for n in (500, 501, 502)]
    author = there.git("log", "-1", "--format=%an <%ae>", "gh/me/1/orig").strip()
    assert author == "A User <user@example.org>"


def test_the_next_submission_updates_the_same_pull_requests(there: Hosted) -> None:
    there.send()
    assert numbers(there.send()) == [("unchanged", 500), ("unchanged", 501), ("unchanged", 502)]
    again = amended(SPLIT, {"torch/_inductor/scheduler.py": SCHEDULER.replace("5\n", "555\n")})
    there.series(CAP, again, TILES)
    done = there.send(message="Split further")
    assert numbers(done) == [("unchanged", 500), ("updated", 501), ("updated", 502)]
    assert "return 555\n" in there.git("show", "gh/me/2/head:torch/_inductor/scheduler.py")
    assert "Split further" in there.git("log", "-1", "--format=%s", "gh/me/2/head")
    assert there.patch_of(502) == set(TILES[1])
    assert set(there.pulls()) == {500, 501, 502}


def test_reordered(there: Hosted) -> None:
    there.send()
    there.series(TILES, CAP, SPLIT)
    assert numbers(there.send()) == [("updated", 502), ("updated", 500), ("updated", 501)]
    for number, (_, files) in ((502, TILES), (500, CAP), (501, SPLIT)):
        assert there.patch_of(number) == set(files)
    assert "* __->__ #501\n* #500\n* #502\n" in there.pulls()[501].body


def test_dropped(there: Hosted) -> None:
    there.send()
    there.series(CAP, TILES)
    done = there.send()
    assert numbers(done) == [("unchanged", 500), ("updated", 502)]
    assert done.orphans == ("https://github.com/pytorch/pytorch/pull/501",)
    there.pulls()[501].closed = True
    assert there.send().orphans == ()
    assert set(there.plan().pulls()) == {patch.name for patch in there.stack.patches}


def test_added_in_the_middle(there: Hosted) -> None:
    there.series(CAP, TILES)
    there.send()
    there.series(CAP, SPLIT, TILES)
    assert numbers(there.send()) == [("unchanged", 500), ("created", 502), ("updated", 501)]
    assert there.patch_of(502) == set(SPLIT[1])
    assert there.patch_of(501) == set(TILES[1])


def test_upstream_goes_on(there: Hosted) -> None:
    there.send()
    there.push_main({"torch/_inductor/scheduler.py": "# one line more\n" + SCHEDULER})
    with submit.prepare(there.plan()) as made:
        assert [each.state for each in made.outcomes] == ["clean", "moved", "clean"]
    assert [each.what for each in there.send().sent] == ["updated"] * 3
    assert there.patch_of(501) == {"torch/_inductor/scheduler.py"}


def test_what_upstream_has_is_left_out(there: Hosted) -> None:
    there.send()
    there.push_main({"torch/_inductor/scheduler.py": SCHEDULER.replace("return 5\n", "return 6\n")})
    with pytest.raises(GraftError, match="1 of 3 patches do not apply to origin/main"):
        there.send()
    there.series(CAP, SPLIT, TILES, behind=("", "  # ours; in 2.14.0", ""))
    there.pulls()[501].closed = True
    assert [each.number for each in there.send().sent] == [500, 502]
    assert there.plan().pulls()["split-the-rows-of-a-step.patch"].number == 501
    there.pulls()[501].closed = False
    there.series(CAP, SPLIT, TILES, behind=("", "  # ours; in 2.15.0", ""))
    with pytest.raises(GraftError, match="1 of 3 patches do not apply"):
        there.send()  # upstream's main says that it is 2.14.0


def test_a_repository_that_has_ghstack_comment(there: Hosted) -> None:
    there.push_main({".github/ghstack_direct": ""})
    there.send()
    entries = there.plan().pulls()
    assert all(entry.comment_id for entry in entries.values())
    assert there.pulls()[501].baseRefName == "gh/me/1/head"
    there.series(CAP, amended(SPLIT, {"torch/_inductor/scheduler.py": SCHEDULER * 2}), TILES)
    assert numbers(there.send()) == [("unchanged", 500), ("updated", 501), ("updated", 502)]
    ids = {name: entry.comment_id for name, entry in there.plan().pulls().items()}
    assert ids == {name: entry.comment_id for name, entry in entries.items()}


def test_titles_and_texts_are_updated_when_asked(there: Hosted) -> None:
    there.send()
    there.series((CAP[0].replace("costs", "takes"), CAP[1]), SPLIT, TILES)
    there.send()
    assert "Each read costs registers" in there.pulls()[500].body
    there.send(update_fields=True)
    assert "Each read takes registers" in there.pulls()[500].body
    assert "source-id" not in there.pulls()[500].body


def test_labels_and_drafts(there: Hosted) -> None:
    there.send(label="module: inductor, topic: not user facing", reviewer="someone")
    assert there.pulls()[500].labels == ["module: inductor", "topic: not user facing"]
    assert there.pulls()[500].reviewers == ["someone"]


# --- what goes wrong -----------------------------------------------------------------------------


def test_a_remote_that_refuses(there: Hosted) -> None:
    there.refuse("*")
    with pytest.raises(GraftError) as caught:
        there.send()
    assert caught.value.message.startswith("the submission to pytorch/pytorch stopped: origin refu")
    assert "policy: refs/heads/gh/me/1/base is not for you" in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.next
    assert there.pulls() == {}
    assert there.plan().pulls() == {}
    assert there.git("for-each-ref", "--format=%(refname)").split() == ["refs/heads/main"]
    there.refuse("")
    assert numbers(there.send()) == [("created", 500), ("created", 501), ("created", 502)]


def test_a_push_that_is_cut_after_the_pull_requests_were_made(there: Hosted) -> None:
    there.refuse("*/orig")
    with pytest.raises(GraftError, match="#500, #501, #502 had been made, and is recorded"):
        there.send()
    assert [pull.number for pull in there.plan().pulls().values()] == [500, 501, 502]
    there.series(CAP, amended(SPLIT, {"torch/_inductor/scheduler.py": SCHEDULER * 2}), TILES)
    there.refuse("")
    assert [each.number for each in there.send().sent] == [500, 501, 502]
    assert numbers(there.send()) == [("unchanged", 500), ("unchanged", 501), ("unchanged", 502)]
    assert set(there.pulls()) == {500, 501, 502}
    assert there.patch_of(501) == {"torch/_inductor/scheduler.py"}


def test_github_breaks_down_between_two_pull_requests(there: Hosted) -> None:
    there.github.fails, there.github.calls_left = ("post", "/pulls"), 1
    with pytest.raises(GraftError, match="502 Bad Gateway; #500 had been made"):
        there.send()
    there.github.fails = None
    done = there.send()
    assert [each.number for each in done.sent] == [500, 501, 502]
    assert done.leftovers == ("gh/me/2", "gh/me/3")
    there.git("update-ref", "-d", "refs/heads/gh/me/2/head")
    there.git("update-ref", "-d", "refs/heads/gh/me/3/head")
    assert there.send().leftovers == ()
    assert [pr.title for pr in there.pulls().values()] == [
        message.partition("\n")[0] for message, _ in (CAP, SPLIT, TILES)
    ]


def test_a_pull_request_whose_making_was_not_heard_of(there: Hosted) -> None:
    there.github.fails, there.github.calls_left = ("post", "/pulls"), 1
    there.github.after = True
    with pytest.raises(GraftError, match="502 Bad Gateway; #500 had been made"):
        there.send()
    assert set(there.pulls()) == {500, 501}
    there.github.fails = None
    assert [each.number for each in there.send().sent] == [500, 501, 502]
    assert numbers(there.send()) == [("unchanged", 500), ("unchanged", 501), ("unchanged", 502)]
    assert there.patch_of(501) == set(SPLIT[1])


def test_an_update_that_is_cut_in_the_push(there: Hosted) -> None:
    there.send()
    there.series(
        amended(CAP, {"torch/_inductor/reads.py": "def count():\n    return 8\n"}), SPLIT, TILES
    )
    there.refuse("*/2/*")
    with pytest.raises(GraftError, match="policy: refs/heads/gh/me/2"):
        there.send()
    assert there.plan().pulls()["split-the-rows-of-a-step.patch"].coming
    there.refuse("")
    assert [each.number for each in there.send().sent] == [500, 501, 502]
    assert numbers(there.send()) == [("unchanged", 500), ("unchanged", 501), ("unchanged", 502)]
    assert all(pull.coming is None for pull in there.plan().pulls().values())


def test_an_update_that_is_cut_after_the_push(there: Hosted) -> None:
    there.send()
    there.series(
        amended(CAP, {"torch/_inductor/reads.py": "def count():\n    return 8\n"}), SPLIT, TILES
    )
    there.github.fails = ("patch", "/pulls/501")
    with pytest.raises(GraftError, match="502 Bad Gateway"):
        there.send()
    there.github.fails = None
    assert numbers(there.send()) == [("unchanged", 500), ("unchanged", 501), ("unchanged", 502)]
    assert all(pull.coming is None for pull in there.plan().pulls().values())


def test_what_another_pushed_is_not_overwritten(there: Hosted) -> None:
    there.send()
    message = there.git("log", "-1", "--format=%B", "gh/me/2/orig")
    foreign = trailers.write(message, there.plan().url(501), "f" * 40)
    tree, parent = "gh/me/2/orig^{tree}", "gh/me/1/orig"
    commit = git("commit-tree", tree, "-p", parent, "-m", foreign, cwd=there.bare).strip()
    there.git("update-ref", "refs/heads/gh/me/2/orig", commit)
    there.series(CAP, amended(SPLIT, {"torch/_inductor/scheduler.py": SCHEDULER * 2}), TILES)
    with pytest.raises(GraftError, match="another source has updated GitHub"):
        there.send()
    assert [each.number for each in there.send(force=True).sent] == [500, 501, 502]


def test_a_pull_request_that_was_closed(there: Hosted) -> None:
    there.send()
    there.pulls()[501].closed = True
    with pytest.raises(GraftError, match="pull/501 of split-the-rows.* is closed") as caught:
        there.send()
    assert "series" in (caught.value.next or "")
    path = submitted.file(there.pin, there.root)
    sent = submitted.load(there.pin, there.root)
    pulls = dict(sent.pulls["pytorch/pytorch"])
    del pulls["split-the-rows-of-a-step.patch"]
    path.write_bytes(sent.with_pulls("pytorch/pytorch", pulls).render() or b"")
    assert [each.number for each in there.send().sent] == [500, 503, 502]


def test_a_number_that_is_not_there(there: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    there.send()

    async def missing(method: str, path: str, **values: object) -> object:
        raise ghstack_session.ghstack.github.NotFoundError("404")

    monkeypatch.setattr(there.github, "arest", missing)
    with pytest.raises(GraftError, match="pytorch/pytorch has no pull request #500"):
        there.send()


def test_nothing_but_the_stack_is_sent(there: Hosted) -> None:
    plan = there.plan()
    with submit.prepare(plan) as made:
        found = submit.made_beyond(made, "refs/remotes/origin/main")
        assert found == list(made.commits)
        with pytest.raises(GraftError, match="4 commits would be sent.*and the stack is 3, 1 of"):
            submit.check_exact(made, submit.made_beyond(made, there.pin.commit), "v2.11.0")
        with pytest.raises(GraftError, match="2 commits would be sent onto main, and the stack"):
            submit.check_exact(made, found[1:], "main")


def test_another_at_work(there: Hosted) -> None:
    with (
        submit.prepare(there.plan()),
        pytest.raises(GraftError, match="another graft export or submit is at work"),
    ):
        there.send()
    with journal.alone(there.root), pytest.raises(GraftError, match="another graft edit"):
        there.send()
    assert there.pulls() == {}


def test_remotes(there: Hosted) -> None:
    git("remote", "rename", "origin", "theirs", cwd=there.checkout)
    assert there.plan().remote.name == "theirs"  # the one that is PyTorch's
    git("remote", "add", "local", "/nowhere/at/all", cwd=there.checkout)
    with pytest.raises(UsageError, match="URL of remote local is not one of a repository"):
        submit.plan(there.checkout, there.stack, remote="local", root=there.root)
    with pytest.raises(UsageError, match=r"has no remote up; it has: local, me, theirs"):
        submit.plan(there.checkout, there.stack, remote="up", root=there.root)
    there.bare.rename(there.bare.with_name("gone"))
    with pytest.raises(GraftError, match="cannot fetch from theirs: fatal: .*does not"):
        there.plan()
    plan = submit.plan(there.checkout, there.stack, fetch=False, root=there.root)
    assert plan.base == "main"
    there.bare.with_name("gone").rename(there.bare)
    git("remote", "rename", "theirs", "origin", cwd=there.checkout)
    elsewhere = replace(there.connection, host="github.example.com")
    with pytest.raises(GraftError, match=r"origin is on github.com, and ghstack is set up for"):
        ghstack_session.send(there.plan(), elsewhere)


def test_ghstack_that_is_not_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GHSTACKRC_PATH", str(tmp_path / "rc"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(GraftError, match="ghstack is not set up") as caught:
        ghstack_session.connect()
    assert caught.value.next == "ghstack auth (or gh auth login)"
    (tmp_path / "rc").write_text(
        "[ghstack]\ngithub_url = github.com\ngithub_oauth = x\ngithub_username = me\n"
        "label = module: inductor\n"
    )
    found = ghstack_session.connect()
    assert (found.username, found.host, found.label) == ("me", "github.com", "module: inductor")


# --- a fork --------------------------------------------------------------------------------------


def push(there: Hosted, *, force: bool = False) -> tuple[list[fork.Pushed], list[str]]:
    plan = there.plan()
    return fork.send(plan, fork.find(plan, "me"), force=force)


def test_branches_of_a_fork(there: Hosted) -> None:
    pushed, orphans = push(there)
    assert [each.what for each in pushed] == ["created"] * 3
    assert orphans == []
    first, second, _ = pushed
    assert first.compare == (
        "https://github.com/pytorch/pytorch/compare/main...me:cap-the-reads-of-a-kernel?expand=1"
    )
    assert second.alone == (
        "https://github.com/me/pytorch/compare/cap-the-reads-of-a-kernel...split-the-rows-of-a-step"
    )
    for (_, files), base, each in zip((CAP, SPLIT), ("main", first.branch), pushed, strict=False):
        git("fetch", "-q", str(there.bare), "+main:main", cwd=there.fork)
        changed = git("diff", "--name-only", f"{base}..{each.branch}", cwd=there.fork).split()
        assert set(changed) == set(files)
    assert "ghstack" not in git("log", "main..tile-both-directions", cwd=there.fork)
    assert there.git("for-each-ref", "--format=%(refname)").split() == ["refs/heads/main"]
    assert [patch.status.upstream for patch in there.stack.patches] == ["not sent"] * 3
    assert [each.what for each in push(there)[0]] == ["unchanged"] * 3
    there.series(CAP, amended(SPLIT, {"torch/_inductor/scheduler.py": SCHEDULER * 2}))
    pushed, orphans = push(there)
    assert [each.what for each in pushed] == ["unchanged", "updated"]
    assert orphans == ["tile-both-directions"]
    git("update-ref", "-d", "refs/heads/tile-both-directions", cwd=there.fork)
    assert push(there)[1] == []


def test_a_fork_that_refuses(there: Hosted) -> None:
    there.refuse("*/split-*", there.fork)
    with pytest.raises(GraftError, match="policy: .*; 2 of 3 branches are there, and recorded"):
        push(there)
    there.refuse("", there.fork)
    assert [each.what for each in push(there)[0]] == ["unchanged", "created", "unchanged"]


def test_a_branch_of_another_is_not_overwritten(there: Hosted) -> None:
    git("push", "-q", str(there.fork), "main:tile-both-directions", cwd=there.checkout)
    with pytest.raises(GraftError, match="has a branch tile-both-directions that graft submit did"):
        push(there)
    listed = git("for-each-ref", "--format=%(refname:short)", cwd=there.fork).split()
    assert listed == ["tile-both-directions"]
    assert [each.what for each in push(there, force=True)[0]] == ["created", "created", "updated"]


def test_a_push_to_a_fork_that_was_not_recorded(there: Hosted) -> None:
    push(there)
    sent = submitted.load(there.pin, there.root)
    branches = dict(sent.branches["me/pytorch"])
    name = "tile-both-directions.patch"
    there.series(CAP, SPLIT, amended(TILES, {"torch/_inductor/codegen/simd.py": "TILES = 8\n"}))
    push(there)
    now = submitted.load(there.pin, there.root).branches["me/pytorch"][name].commit
    # As it is left by a process that was killed in the push.
    branches[name] = replace(branches[name], coming=now)
    with journal.alone(there.root):
        there.plan().record(sent.with_branches("me/pytorch", branches))
    there.series(CAP, SPLIT, amended(TILES, {"torch/_inductor/codegen/simd.py": "TILES = 9\n"}))
    assert [each.what for each in push(there)[0]] == ["unchanged", "unchanged", "updated"]


def test_forks_that_are_none(there: Hosted) -> None:
    plan = there.plan()
    with pytest.raises(UsageError, match="remote origin is pytorch/pytorch; expected a fork of"):
        fork.find(plan, "origin")
    there.fork.rename(there.fork.with_name("gone"))
    with pytest.raises(GraftError, match="cannot reach me: fatal:"):
        push(there)


# --- what is kept --------------------------------------------------------------------------------


def test_the_record_is_read_as_it_was_written(there: Hosted) -> None:
    path = submitted.file(there.pin, there.root)
    sent = Submitted(
        {"pytorch/pytorch": {"a.patch": Pull(1, "t", "u", 3), "b.patch": Pull(2, "v")}, "o/x": {}},
        {"me/pytorch": {"a.patch": Branch("a", "c"), 'q".patch': Branch("b", "d", "e")}},
    )
    text = sent.render()
    assert text is not None
    path.write_bytes(text)
    read = submitted.load(there.pin, there.root)
    assert read.pulls == {"pytorch/pytorch": sent.pulls["pytorch/pytorch"]}
    assert read.branches == sent.branches
    assert read.render() == text
    assert Submitted({}, {"me/pytorch": {}}).render() is None
    for wrong in (
        "number = ",
        "[pull_requests.x.y]\nnumbr = 1\n",
        "[other]\nx = 1\n",
        "pull_requests = 1",
    ):
        path.write_text(wrong)
        with pytest.raises(GraftError, match=r"patches/v2\.11\.0/submitted\.toml"):
            submitted.load(there.pin, there.root)


def test_trailers() -> None:
    message = "[inductor] Cap\n\nWhy.\n\nTest plan: pytest x\n"
    written = trailers.write(message, "https://github.com/pytorch/pytorch/pull/7", "abc", 9)
    assert written == message + (
        "\nghstack-source-id: abc\nghstack-comment-id: 9\n"
        "Pull-Request: https://github.com/pytorch/pytorch/pull/7\n"
    )
    assert (trailers.source_id(written), trailers.comment_id(written)) == ("abc", 9)
    assert trailers.strip(written).rstrip("\n") == message.rstrip("\n")
    landed = message + "Pull Request resolved: https://github.com/pytorch/pytorch/pull/7\n"
    assert trailers.strip(landed).rstrip("\n") == message.rstrip("\n")
    assert trailers.write(written, "https://x.y/a/b/pull/8", "d") == trailers.write(
        message, "https://x.y/a/b/pull/8", "d"
    )
    for kept in (
        "See Pull-Request: it says so.\n",
        "a ghstack-source-id: b\n",
        "Pull-Request: later\n",
    ):
        assert trailers.strip(kept) == kept


@pytest.fixture
def project(origin: tuple[bases.Base, Path], tmp_path: Path) -> standin.Project:
    made = standin.make_project(tmp_path / "project", *origin)
    made.edit()
    for name in ("one", "two"):
        made.commit(f"[inductor] Add {name}\n\nWhy.\n", **{f"_inductor__{name}": f"{name} = 1\n"})
    made.refresh()
    return made


def test_refresh_takes_out_what_ghstack_wrote(project: standin.Project) -> None:
    before = [patch.text for patch in project.stack.patches]
    project.edit()
    url = "https://github.com/pytorch/pytorch/pull/7"
    message = trailers.write("[inductor] Add two\n\nWhy.\n", url, "0" * 40, 5)
    project.git("commit", "-q", "--amend", "-m", message)
    assert project.refresh() == refresh.Refreshed()
    assert [patch.text for patch in project.stack.patches] == before
    project.path("_inductor__two").write_text("two = 2\n")
    project.git("commit", "-q", "-a", "--amend", "-m", message)
    assert project.refresh().written
    assert project.stack.patches[1].message == "[inductor] Add two\n\nWhy.\n"


def test_a_patch_that_is_reworded_keeps_its_pull_request(project: standin.Project) -> None:
    path = submitted.file(project.pin, project.root)
    sent = Submitted({"pytorch/pytorch": {"add-two.patch": Pull(7, "t")}}, {})
    path.write_bytes(sent.render() or b"")
    series = project.root / "patches/v2.11.0/series"
    series.write_text(
        series.read_text().replace(
            "add-two.patch  # ours; not sent", "# Why.\nadd-two.patch  # ours; pytorch#7"
        )
    )
    project.edit()
    project.git("commit", "-q", "--amend", "-m", "[inductor] Add a second\n\nWhy.\n")
    done = project.refresh()
    assert "patches/v2.11.0/submitted.toml" in done.written
    read = submitted.load(project.pin, project.root)
    assert read.pulls == {"pytorch/pytorch": {"add-a-second.patch": Pull(7, "t")}}
    assert "# Why.\nadd-a-second.patch  # ours; pytorch#7\n" in series.read_text()


def test_which_patch_is_which() -> None:
    def made(**texts: str) -> stack.Stack:
        pin = hosted.pins.load()
        head = "From 0\nFrom: x\nSubject: [PATCH] x\n\n"
        return stack.Stack(
            pin,
            tuple(
                stack.Patch(n, Path(n), f"{head}diff --git a/{t} b/{t}\n".encode())
                for n, t in texts.items()
            ),
        )

    renames = refresh.renames
    assert renames(made(a="1", b="2"), made(c="1", b="2")) == {"a": "c"}
    assert renames(made(a="1", b="2"), made(c="3", b="2")) == {"a": "c"}
    assert renames(made(a="1", b="2"), made(c="2", d="1")) == {"a": "d", "b": "c"}
    assert renames(made(a="1", b="2"), made(c="3", d="1")) == {"a": "d", "b": "c"}
    assert renames(made(a="1", b="2"), made(c="3", d="4")) == {}
    assert renames(made(a="1", b="2"), made(b="2")) == {}
    assert renames(made(b="2"), made(a="1", b="2")) == {}


# --- the command ---------------------------------------------------------------------------------


def command(there: Hosted, monkeypatch: pytest.MonkeyPatch, *args: str) -> Result:
    """What the command prints and raises."""
    monkeypatch.setattr(export_command, "ROOT", there.root)
    monkeypatch.setattr(ghstack_session, "connect", lambda: there.connection)
    monkeypatch.chdir(there.checkout.parent)
    return CliRunner().invoke(graft, list(args), standalone_mode=False)


def test_a_dry_run_sends_nothing(there: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    said = command(there, monkeypatch, "submit", "pytorch").output
    assert "1. a new pull request\n   [inductor] Cap the reads of a kernel\n" in said
    assert "   Test plan: python test/inductor/test_reads.py\n" in said
    assert said.endswith("nothing was sent; the same command with --send sends it\n")
    said = command(there, monkeypatch, "submit", "pytorch", "--fork", "me").output
    assert "branch cap-the-reads-of-a-kernel" in said
    assert said.endswith("nothing was pushed; the same command with --send pushes to me\n")
    assert there.pulls() == {}
    assert there.git("for-each-ref", "--format=%(refname)").split() == ["refs/heads/main"]
    assert git("for-each-ref", cwd=there.fork) == ""
    assert not submitted.file(there.pin, there.root).exists()
    there.send()
    said = command(there, monkeypatch, "submit", "pytorch").output
    assert "\n2. https://github.com/pytorch/pytorch/pull/501\n" in said
    options = ("--fork", "me", "--draft", "--label", "x")
    refused = command(there, monkeypatch, "submit", "pytorch", *options).exception
    assert isinstance(refused, UsageError)
    assert "--draft, --label is for pull requests" in refused.message


def test_one_series_leaves_the_others(there: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [patch.name for patch in there.stack.patches]
    heads = ("# series: few reads\n", "# series: row split\n", "# series: tiling; alone\n")
    text = "".join(f"{head}{name}\n" for head, name in zip(heads, names, strict=True))
    stack.series_file(there.pin, there.root).write_text(text)
    said = command(there, monkeypatch, "submit", "pytorch", "--series", "tiling", "--send").output
    assert "Tile both directions" in said
    assert "Split the rows" not in said
    assert len(there.pulls()) == 1
    said = command(
        there, monkeypatch, "submit", "pytorch", "--series", "row split", "--send"
    ).output
    assert "close it" not in said
    assert len(there.pulls()) == 3


def transcript(there: Hosted, monkeypatch: pytest.MonkeyPatch) -> str:
    """The session that docs/upstream.md shows."""
    said: list[str] = []

    def does(line: str) -> None:
        said.append(f"$ {line}")
        done = command(there, monkeypatch, *shlex.split(line)[1:])
        said.extend([done.output.rstrip("\n")] if done.output else [])
        if done.exception:
            assert isinstance(done.exception, GraftError)
            said.append(done.exception.report())
        said.append("")

    does("graft export pytorch")
    does("graft export pytorch --onto origin/main")
    does("graft submit pytorch")
    there.refuse("*/3/*")
    does("graft submit pytorch --send --label 'module: inductor'")
    there.refuse("")
    said.append("# the remote takes it now")
    does("graft submit pytorch --send --label 'module: inductor'")
    said += ["# graft edit: the first patch amended, the other two swapped", "# graft refresh"]
    reads = {"torch/_inductor/reads.py": "def count():\n    return 8\n"}
    there.series(amended(CAP, reads), TILES, SPLIT)
    does("graft submit pytorch --send -m 'Count what is read twice once'")
    said.append("# upstream goes on: it has its own split of rows now, and 2.15.0 will have it")
    there.push_main(
        {
            "torch/_inductor/scheduler.py": SCHEDULER.replace("return 5\n", "return 6\n"),
            "torch/_inductor/config.py": "# What may be set.\n" + CONFIG,
            "version.txt": "2.15.0a0\n",
        }
    )
    does("graft submit pytorch")
    said.append("# patches/v2.11.0/series: split-the-rows-of-a-step.patch  # ours; in 2.15.0")
    there.series(amended(CAP, reads), TILES, SPLIT, behind=("", "", "  # ours; in 2.15.0"))
    does("graft submit pytorch --send -m Rebase")
    said.append("# graft edit: the cap dropped; graft refresh")
    there.series(TILES)
    does("graft submit pytorch --send")
    said.append("# by who may not push to pytorch/pytorch, with a fork as the remote 'me'")
    does("graft submit pytorch --fork me --send")
    return "\n".join(said).rstrip("\n").replace(f"{there.checkout.parent}/", "") + "\n"


def test_the_transcript_in_the_docs(there: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    made = transcript(there, monkeypatch)
    path = ROOT / "docs/upstream.md"
    text = path.read_text("utf-8")
    before, marker, rest = text.partition("<!-- transcript: tests/graft/test_submit.py -->\n```\n")
    assert marker, "docs/upstream.md has no place for the transcript"
    shown, _, after = rest.partition("```\n<!-- /transcript -->\n")
    if os.environ.get("GRAFT_WRITE_TRANSCRIPT"):
        path.write_text(f"{before}{marker}{made}```\n<!-- /transcript -->\n{after}", "utf-8")
        return
    assert shown == made, "GRAFT_WRITE_TRANSCRIPT=1, and this test again, writes it"
