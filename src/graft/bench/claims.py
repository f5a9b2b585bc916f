"""Comparisons that somebody worded by hand, which the next run makes wrong: there are to be none.

A page compares with a peer by what `graft bench tables` writes from a result file alone, and with
stock too where it gives a ratio. Outside of those blocks and of code, `found` is empty for a page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from graft.bench import plan, tables
from graft.errors import GraftError

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)
# A command, a path or a marker's words; a name alone, as `helion`, is a word of the sentence.
_CODE = re.compile(r"`([^`]+)`")
_NO_NAME = re.compile(r"[\s=/]")
_COMMENT = re.compile(r"<!--.*?-->", re.S)
# A clause ends where a sentence does, or at a semicolon or a colon; a paragraph, at an empty line,
# and at a line of a table or a list.
_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|] ?))")
_CLAUSE = re.compile(r"(?<=[.;:!?])\s+")
_PEER = re.compile(rf"\b(?:{'|'.join(plan.PEERS)}|peers?)\b", re.I)
_STOCK = re.compile(r"\bstock\b", re.I)
_COMPARED = re.compile(
    r"\b(?:faster|fastest|as fast|slower|slowest|as slow|as quick|quicker|times as|ahead of|behind"
    r"|beats?|outperforms?|longer than|as long|(?:less|more) (?:time|than)|better|worse|wins?"
    r"|loses?|\w+'s time)\b",
    re.I,
)
_RATIO = re.compile(
    r"\b\d[\d.]*(?: to \d[\d.]*)?(?: times| ?%|x\b)[^.;]*?\b(?:fast|faster|slow|slower|less|behind"
    r"|ahead|longer|as long)\b",
    re.I,
)
_ROW = re.compile(r"^\s*\|")
_NUMBER = re.compile(r"\d")


def found(text: str) -> Iterator[str]:
    """The clauses of a page that compare with a peer, or give a ratio to stock, in its own words.

    A line of a table that names a peer and a number is one.
    """
    text = tables.BLOCK.sub("\n\n", text)
    text = _COMMENT.sub("", _FENCE.sub("\n\n", text))
    text = _CODE.sub(lambda span: "code" if _NO_NAME.search(span[1]) else span[0], text)
    for paragraph in _PARAGRAPH.split(text):
        row = _ROW.match(paragraph)
        for clause in [paragraph] if row else _CLAUSE.split(" ".join(paragraph.split())):
            peer = _PEER.search(clause)
            if (peer and (_NUMBER if row else _COMPARED).search(clause)) or (
                _STOCK.search(clause) and not row and _RATIO.search(clause)
            ):
                yield clause.strip()


def check(root: Path) -> None:
    """Raise GraftError for the first page that compares by hand."""
    for page in tables.pages(root):
        for clause in found(page.read_text()):
            raise GraftError(
                f"{page.relative_to(root)} compares in words of its own: {clause!r}; what a result"
                " file says, the generator writes",
                "write <!-- table: bench/results/FILE.json view=sentence of=helion to=patched -->,"
                " <!-- /table -->, and graft bench tables",
            )
