"""What ghstack writes at the end of a commit's message, so that it knows the commit again.

A patch file never has it: which pull request a patch is differs from repository to repository, and
is kept beside the patches (`graft.stack.submitted`).
"""

from __future__ import annotations

import re

_LINE = re.compile(
    r"\n*^(?:ghstack-source-id: .*|ghstack-comment-id: .*"
    r"|Pull[- ]Request(?:[- ]resolved)?: https?://\S+/pull/\d+[ \t]*)$",
    re.MULTILINE,
)
_SOURCE_ID = re.compile(r"^ghstack-source-id: (\S+)", re.MULTILINE)
_COMMENT_ID = re.compile(r"^ghstack-comment-id: (\d+)", re.MULTILINE)


def strip(message: str) -> str:
    """`message` without ghstack's lines; the same where it has none."""
    return _LINE.sub("", message)


def write(message: str, url: str, source_id: str, comment_id: int | None = None) -> str:
    """`message` with the lines that tell ghstack which pull request (`url`) it is.

    `source_id` is the tree that the pull request was last brought to, `comment_id` its comment
    about the stack, where the repository has ghstack write one.
    """
    lines = [f"ghstack-source-id: {source_id}"]
    if comment_id is not None:
        lines.append(f"ghstack-comment-id: {comment_id}")
    lines.append(f"Pull-Request: {url}")
    body = strip(message).rstrip("\n")
    return f"{body}\n\n" + "".join(f"{line}\n" for line in lines)


def source_id(message: str) -> str | None:
    """The tree that ghstack noted; None where it noted none."""
    found = _SOURCE_ID.search(message)
    return found[1] if found else None


def comment_id(message: str) -> int | None:
    """The comment that ghstack noted; None where it noted none."""
    found = _COMMENT_ID.search(message)
    return int(found[1]) if found else None
