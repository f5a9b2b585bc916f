"""A patched tree as one file: the changed files, their licence texts, and an installer.

Links do not travel, so a host without this repository gets a zip that Python runs: it makes the
same tree of the torch that is there (`installer`).
"""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from pathlib import Path

from graft.errors import GraftError, refused
from graft.places import ROOT
from graft.stack import pins
from graft.stack.git import NULL_BLOB
from graft.stack.pins import Pin
from graft.stack.trees.bases import Base
from graft.stack.trees.tree import Tree

MODULES = (
    "__init__",
    "errors",
    "places",
    "stack/__init__",
    "stack/git",
    "stack/patches",
    "stack/pins",
    "stack/series",
    "stack/trees/__init__",
    "stack/trees/bases",
    "stack/trees/caches",
    "stack/trees/inplace",
    "stack/trees/installer",
    "stack/trees/source",
    "stack/trees/tree",
)
"""What the installer needs of this tool: the standard library does the rest."""

_MAIN = """\
import sys
if not (3, 11) <= sys.version_info[:2]:
    sys.exit("error: this needs Python 3.11 or newer, and runs in %d.%d" % sys.version_info[:2])
from graft.stack.trees.installer import main
sys.exit(main(sys.argv[1:]))
"""


def licences(base: Base) -> dict[str, bytes]:
    """The licence texts that came with the base's torch, by file name.

    Raises GraftError if there are none: its files may not be passed on without them.
    """
    found: dict[str, bytes] = {}
    for site in base.site_dirs:
        for info in site.glob("torch-*.dist-info"):
            for pattern in ("licenses/**/*", "LICENSE*", "NOTICE*"):
                for file in sorted(info.glob(pattern)):
                    if file.is_file():
                        found.setdefault(file.name, file.read_bytes())
    if "LICENSE" not in found:
        raise GraftError(
            f"torch in {base.torch_dir} came without its LICENSE (looked in torch-*.dist-info), "
            "and its files may not be passed on without it",
            next=f"pip install --force-reinstall --no-deps torch=={base.version.split('+')[0]}",
        )
    return found


def write(tree: Tree, pin: Pin, output: Path | None = None) -> Path:
    """Write the pack of a verified tree; the same tree gives the same bytes. Returns its path.

    The default name is ``graft-<pin>-<stack hash>.pyz``, here. Raises GraftError for a compiled
    tree, a torch without its licence, and a folder that takes no file.
    """
    if tree.compiled:
        raise GraftError(
            f"{tree.prefix} is a compiled checkout, which a pack does not carry",
            next="./build.sh --prefix DIR (a tree of links), then graft pack --prefix DIR",
        )
    output = output or Path(f"graft-{pin.name}-{tree.stack_hash[:12]}.pyz")
    entries = {"__main__.py": _MAIN.encode(), "pin.toml": pins.render(pin).encode()}
    for name in MODULES:
        entries[f"graft/{name}.py"] = (ROOT / "src" / "graft" / f"{name}.py").read_bytes()
    for path, blob in tree.files.items():
        if blob != NULL_BLOB:
            entries[f"files/{path}"] = (tree.site_packages / path).read_bytes()
    for name, text in licences(tree.base).items():
        entries[f"licences/torch/{name}"] = text
    for name in ("LICENSE", "NOTICE"):
        if (ROOT / name).exists():
            entries[f"licences/graft/{name}"] = (ROOT / name).read_bytes()
    entries["pack.json"] = json.dumps(
        {
            "pin": pin.name,
            "patches": list(tree.patches),
            "stack_hash": tree.stack_hash,
            "files": dict(sorted(tree.files.items())),
        },
        indent=1,
    ).encode()
    aside = output.with_name(output.name + ".new")
    try:
        aside.write_bytes(b"#!/usr/bin/env python3\n" + _zip(entries))
        aside.chmod(0o755)
        aside.replace(output)
    except OSError as wrong:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise refused(wrong, output, f"graft pack -o DIR/{output.name}") from wrong
    return output


def _zip(entries: dict[str, bytes]) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for name, data in sorted(entries.items()):
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            archive.writestr(info, data)
    return held.getvalue()
