"""The stack as pull requests, with ghstack: one a patch, updated by the next submission.

ghstack finds the pull request of a commit by lines in its message. They come from
``submitted.toml`` and go back there. A session may end anywhere: each pull request is recorded
when it is made, each update before it starts, and the next session asks the remote what it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graft.errors import GraftError
from graft.stack import Patch, journal, submit, trailers
from graft.stack.checkout import last_words
from graft.stack.export import Export
from graft.stack.git import GitFailed
from graft.stack.submit import Plan
from graft.stack.submitted import Pull

try:
    import ghstack.config
    import ghstack.github
    import ghstack.github_real
    import ghstack.shell
    import ghstack.submit
except ModuleNotFoundError as missing:  # an optional dependency: only this module needs it
    raise GraftError(
        f"graft submit --send needs ghstack, and it is not whole ({missing})",
        "pip install 'ghstack>=0.18,<0.19', or graft submit CHECKOUT --fork REMOTE, without it",
    ) from missing


@dataclass(frozen=True)
class Connection:
    """GitHub, as ghstack reaches it, and as whom; reviewers and labels are comma-separated."""

    username: str
    github: ghstack.github.GitHubEndpoint
    host: str = "github.com"
    reviewer: str | None = None
    label: str | None = None


@dataclass(frozen=True)
class Options:
    """How to send: as ghstack's options of the same names."""

    message: str | None = None
    update_fields: bool = False
    draft: bool = False
    force: bool = False
    reviewer: str | None = None
    label: str | None = None


@dataclass(frozen=True)
class Sent:
    """What became of one patch: `what` is ``created``, ``updated`` or ``unchanged``."""

    patch: Patch
    what: str
    number: int
    url: str


@dataclass(frozen=True)
class Session:
    """What a submission did: each patch in order.

    `orphans` are the pages of pull requests whose patch is gone. `leftovers` are branches
    (``gh/me/3``) that an interrupted submission pushed and made no pull request of.
    """

    sent: tuple[Sent, ...]
    orphans: tuple[str, ...]
    leftovers: tuple[str, ...]


def connect() -> Connection:
    """GitHub as ``~/.ghstackrc`` or ``gh`` says; else ghstack asks.

    Raises GraftError where it gets no answer.
    """
    try:
        config = ghstack.config.read_config()
    except Exception as failed:  # EOFError where no one is there to ask, and whatever requests has
        raise GraftError(
            f"ghstack is not set up: {failed}", "ghstack auth (or gh auth login)"
        ) from failed
    github = ghstack.github_real.RealGitHubEndpoint(
        oauth_token=config.github_oauth,
        proxy=config.proxy,
        github_url=config.github_url,
        max_retries=config.max_retries,
        initial_backoff_seconds=config.initial_backoff_seconds,
    )
    return Connection(
        config.github_username, github, config.github_url, config.reviewer, config.label
    )


def send(plan: Plan, connection: Connection, options: Options | None = None) -> Session:
    """Make or update the pull requests, and record them.

    Raises GraftError, saying what was done before and recorded, when GitHub or the remote refuses;
    the next call goes on from there.
    """
    if plan.remote.host != connection.host:
        raise GraftError(
            f"remote {plan.remote.name} is on {plan.remote.host}, and ghstack is set up for "
            f"{connection.host}",
            f"ghstack config github_url {plan.remote.host}, or --remote OTHER",
        )
    with journal.alone(plan.root):
        before = set(plan.pulls())
        said = io.StringIO()
        sender = _Sender(plan, connection, options or Options(), said)
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                return asyncio.run(sender.run())
        except GitFailed as failed:
            raise _stopped(plan, failed, before) from failed
        except GraftError:
            raise
        except Exception as failed:  # ghstack has no exception of its own, and aiohttp has many
            raise _stopped(plan, failed, before) from failed


def _stopped(plan: Plan, failed: Exception, before: set[str]) -> GraftError:
    reason = str(failed).strip().partition("\n")[0] or type(failed).__name__
    if isinstance(failed, GitFailed):
        refused = "refused the push" if reason.startswith("git push") else "cannot be read"
        reason = f"{plan.remote.name} {refused}: {last_words(failed.words)}"
    made = [f"#{pull.number}" for name, pull in plan.pulls().items() if name not in before]
    done = f"; {', '.join(made)} had been made, and is recorded" if made else ""
    return GraftError(
        f"the submission to {plan.repository} stopped: {reason}{done}",
        "fix it, then the same command: it goes on from there",
    )


@dataclass(frozen=True)
class _Known:
    """A pull request that is recorded and open: its record, and its branches (``gh/me/3``)."""

    pull: Pull
    branches: str
    has_orig: bool


class _Sender:
    def __init__(
        self, plan: Plan, connection: Connection, options: Options, said: io.StringIO
    ) -> None:
        self.plan, self.connection, self.options = plan, connection, options
        self.github, self.said = connection.github, said

    async def run(self) -> Session:
        try:
            known, orphans = await self._settle()
            pulls = {name: each.pull for name, each in known.items()}
            with submit.prepare(self.plan, pulls) as made:
                sent = await self._send(made, known)
                return Session(tuple(sent), tuple(orphans), self._leftovers())
        finally:
            if isinstance(self.github, ghstack.github_real.RealGitHubEndpoint):
                await self.github.aclose()

    # --- what an earlier session left ---

    async def _settle(self) -> tuple[dict[str, _Known], list[str]]:
        """The recorded pull requests as the remote has them, and those that have no patch."""
        self._fetch(f"gh/{self.connection.username}/*")
        recorded = {**self.plan.pulls(), **await self._adopt()}
        wanted = {patch.name for patch in self.plan.to_send}
        gone = recorded.keys() - self.plan.stack.names
        found: dict[str, tuple[Pull, str]] = {}
        orphans: list[str] = []
        kept = dict(recorded)
        for name, pull in recorded.items():
            if name not in wanted and name not in gone:
                continue
            info = await self._pull_request(pull.number)
            is_open = info["state"] == "open"
            if name in wanted:
                if not is_open:
                    raise self._closed(name, pull)
                found[name] = (pull, str(info["head"]["ref"]).removesuffix("/head"))
            elif is_open:
                orphans.append(self.plan.url(pull.number))
            else:
                del kept[name]
        users = {branches.split("/")[1] for _, branches in found.values()}
        for user in sorted(users - {self.connection.username}):
            self._fetch(f"gh/{user}/*")
        known = {name: self._compare(pull, at) for name, (pull, at) in found.items()}
        kept.update((name, each.pull) for name, each in known.items())
        self._record(kept)
        return known, orphans

    async def _adopt(self) -> dict[str, Pull]:
        """Pull requests that were made, and of which the process that made them heard no more.

        Their branch has no ``orig``; their title is a patch's that has no pull request yet.
        """
        recorded = self.plan.pulls()
        new = {p.subject: p.name for p in self.plan.to_send if p.name not in recorded}
        found = {}
        for branches in self._leftovers() if new else ():
            head = f"{self.plan.repository.partition('/')[0]}:{branches}/head"
            path = f"repos/{self.plan.repository}/pulls?state=open&head={head}"
            for info in await self.github.arest("get", path):
                if (name := new.pop(str(info["title"]), None)) is not None:
                    ref = f"refs/remotes/{self.plan.remote.name}/{branches}/head"
                    found[name] = Pull(int(info["number"]), self._tree(ref))
        return found

    async def _pull_request(self, number: int) -> Mapping[str, Any]:
        path = f"repos/{self.plan.repository}/pulls/{number}"
        try:
            info: Mapping[str, Any] = await self.github.arest("get", path)
        except ghstack.github.NotFoundError as missing:
            raise GraftError(
                f"{self.plan.repository} has no pull request #{number}, or none for this token",
                f"fix patches/{self.plan.stack.pin.name}/submitted.toml, or ghstack auth",
            ) from missing
        return info

    def _closed(self, name: str, pull: Pull) -> GraftError:
        where = f"patches/{self.plan.stack.pin.name}"
        return GraftError(
            f"{self.plan.url(pull.number)} of {name} is closed",
            f"if it landed, write 'in RELEASE' behind {name} in {where}/series; if another is to "
            f"be opened, remove its table from {where}/submitted.toml",
        )

    def _fetch(self, pattern: str) -> None:
        name = self.plan.remote.name
        spec = f"+refs/heads/{pattern}:refs/remotes/{name}/{pattern}"
        self.plan.checkout.as_user("fetch", "-q", "--prune", "--no-write-fetch-head", name, spec)

    def _compare(self, pull: Pull, branches: str) -> _Known:
        """An update that came to its end, though its session did not, counts as done."""
        checkout = self.plan.checkout
        orig = checkout.ref(f"refs/remotes/{self.plan.remote.name}/{branches}/orig")
        if orig is None:
            return _Known(pull, branches, False)
        message = checkout.git("log", "-1", "--format=%B", orig)
        there = trailers.source_id(message)
        if there == pull.coming and there is not None:
            pull = replace(pull, source_id=there)
        comment = trailers.comment_id(message) or pull.comment_id
        return _Known(replace(pull, coming=None, comment_id=comment), branches, True)

    # --- this one ---

    async def _send(self, made: Export, known: Mapping[str, _Known]) -> list[Sent]:
        patches = {each.commit: each.patch for each in made.outcomes if each.commit}
        trees = {p.name: self._tree(commit) for commit, p in patches.items()}
        new = [patch for patch in patches.values() if patch.name not in known]
        for commit, patch in patches.items():
            # A session that ended after it made a pull request has not pushed the branch by which
            # ghstack knows it again.
            if patch.name in known and not known[patch.name].has_orig:
                to = f"refs/heads/{known[patch.name].branches}/orig"
                self.plan.checkout.as_user("push", "-q", self.plan.remote.name, f"{commit}:{to}")
        pulls = dict(self.plan.pulls())
        for name, each in known.items():
            if name in trees and trees[name] != each.pull.source_id:
                pulls[name] = replace(each.pull, coming=trees[name])
        self._record(pulls)

        def created(number: int) -> None:
            patch = new.pop(0)
            pulls[patch.name] = Pull(number, trees[patch.name])
            self._record(pulls)

        submitter = self._submitter(made, _Recorder(self.github, created))
        await submitter.initialize()
        headers = await submitter.parse_revs()
        would_send = [str(each.commit_id) for each in reversed(headers) if not each.boundary]
        submit.check_exact(made, would_send, f"{self.plan.remote.name}/{submitter.base}")
        metas = await submitter.run()
        sent = []
        for meta in metas:
            patch = patches[str(meta.elab_diff.diff.oid)]
            number = int(meta.number)
            pulls[patch.name] = Pull(number, trees[patch.name], None, meta.elab_diff.comment_id)
            what = "created" if meta.what == "Created" else "updated"
            what = "unchanged" if meta.what.startswith("Skipped") else what
            sent.append(Sent(patch, what, number, self.plan.url(number)))
        self._record(pulls)
        return sent

    def _tree(self, commit: str) -> str:
        return self.plan.checkout.git("rev-parse", f"{commit}^{{tree}}").strip()

    def _leftovers(self) -> tuple[str, ...]:
        """A pull request's last branch is ``orig``: a head without one has none."""
        mine = f"refs/remotes/{self.plan.remote.name}/gh/{self.connection.username}/"
        listed = self.plan.checkout.git("for-each-ref", "--format=%(refname)", mine).split()
        heads = {ref.removesuffix("/head") for ref in listed if ref.endswith("/head")}
        whole = {ref.removesuffix("/orig") for ref in listed if ref.endswith("/orig")}
        return tuple(f"gh/{ref.partition('/gh/')[2]}" for ref in sorted(heads - whole))

    def _record(self, pulls: Mapping[str, Pull]) -> None:
        sent = self.plan.sent()
        if pulls or self.plan.repository in sent.pulls:
            self.plan.record(sent.with_pulls(self.plan.repository, pulls))

    def _submitter(self, made: Export, github: ghstack.github.GitHubEndpoint) -> Any:
        owner, _, name = self.plan.repository.partition("/")
        return ghstack.submit.Submitter(
            msg=self.options.message,
            username=self.connection.username,
            github=github,
            update_fields=self.options.update_fields,
            sh=_Shell(str(made.folder), self.said),
            repo_owner_opt=owner,
            repo_name_opt=name,
            force=self.options.force,
            draft=self.options.draft,
            github_url=self.connection.host,
            remote_name=self.plan.remote.name,
            base_opt=self.plan.base,
            reviewer=self.options.reviewer or self.connection.reviewer,
            label=self.options.label or self.connection.label,
        )


class _Shell(ghstack.shell.Shell):
    """ghstack's shell. Where the remote refuses, it says why: `said` is what commands print to.

    A push is all or nothing: half of one would leave branches that nothing knows of.
    """

    def __init__(self, cwd: str, said: io.StringIO) -> None:
        super().__init__(cwd=cwd)
        self.said = said

    async def agit(self, *args: str, **options: Any) -> Any:
        if args[0] not in ("push", "fetch"):
            return await super().agit(*args, **options)
        before = self.said.tell()
        if args[0] == "push":
            args = ("push", "--atomic", *args[1:])
        try:
            return await super().agit(*args, **options)
        except RuntimeError as refused:
            raise GitFailed(f"git {args[0]}", self.said.getvalue()[before:]) from refused


class _Recorder(ghstack.github.GitHubEndpoint):
    """GitHub, and a call for each pull request that it makes, as it makes it.

    ghstack makes them one after the other, in the order of the stack.
    """

    def __init__(
        self, github: ghstack.github.GitHubEndpoint, created: Callable[[int], None]
    ) -> None:
        self.github, self.created = github, created

    async def arest(self, method: str, path: str, **values: Any) -> Any:
        answer = await self.github.arest(method, path, **values)
        if method == "post" and path.endswith("/pulls"):
            self.created(int(answer["number"]))
        return answer

    async def graphql(self, query: str, **values: Any) -> Any:
        return await self.github.graphql(query, **values)

    async def get_head_ref(self, **values: Any) -> str:
        return str(await self.github.get_head_ref(**values))

    def push_hook(self, refs: Sequence[str]) -> None:
        self.github.push_hook(refs)
