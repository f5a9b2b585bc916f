"""A base: the Python whose installed torch a patched tree is made from. It is never written to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from graft.errors import GraftError, UsageError
from graft.stack.trees import caches

OLDEST, NEWEST = (3, 11), (3, 14)
"""The Python versions that torch 2.11.0 has wheels for and this tool is written in."""

# Runs in any Python from 2.7 on, so that one that is too old can be named instead of crashing.
_PROBE = r"""
import json, os, sys
found = {"python": sys.executable, "python_version": ".".join(map(str, sys.version_info[:3]))}
if sys.version_info >= (3, 11):
    import importlib.util, runpy, sysconfig
    found["executable"] = os.path.abspath(getattr(sys, "_base_executable", None) or sys.executable)
    found["site"] = sysconfig.get_path("purelib", "venv", {"base": "@", "platbase": "@"})[2:]
    found["prefix"] = sys.prefix
    named = ("site-packages", "dist-packages")
    found["site_dirs"] = [p for p in sys.path if os.path.basename(p) in named and os.path.isdir(p)]
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin:
        torch_dir = os.path.dirname(os.path.abspath(spec.origin))
        found["torch_dir"] = torch_dir
        if os.path.exists(os.path.join(torch_dir, "version.py")):
            version = runpy.run_path(os.path.join(torch_dir, "version.py"))
            for key, name in ("version", "__version__"), ("git_version",) * 2, ("cuda",) * 2:
                found[key] = version.get(name)
        if os.path.dirname(torch_dir) not in found["site_dirs"]:
            found["site_dirs"].insert(0, os.path.dirname(torch_dir))
print("graft-probe:" + json.dumps(found))
"""


@dataclass(frozen=True)
class Base:
    """An interpreter and the torch that it has.

    `python` is what one runs; `executable` the interpreter underneath, which a venv's ``python``
    links to; `site` the site-packages folder of a venv of it, relative to the venv. `source` is a
    PyTorch checkout whose Python files stand in for the wheel's (`source`), or None.
    """

    python: Path
    executable: Path
    python_version: str
    site: str
    site_dirs: tuple[Path, ...]
    torch_dir: Path
    version: str
    git_version: str
    cuda: str | None
    source: Path | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads back."""
        data = asdict(self)
        data["site_dirs"] = [str(folder) for folder in self.site_dirs]
        return {key: str(v) if isinstance(v, Path) else v for key, v in data.items()}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Base:
        """The base that `as_json` wrote. Raises KeyError for a missing field."""
        values = {field.name: data[field.name] for field in fields(Base)}
        for key in ("python", "executable", "torch_dir"):
            values[key] = Path(values[key])
        values["site_dirs"] = tuple(Path(folder) for folder in values["site_dirs"])
        values["source"] = Path(values["source"]) if values["source"] else None
        return Base(**values)

    def with_source(self, checkout: Path) -> Base:
        """This base with the Python of a PyTorch checkout."""
        return replace(self, source=checkout)

    def describe(self) -> str:
        """One line: torch, CUDA, Python, and where they are."""
        cuda = f"CUDA {self.cuda}" if self.cuda else "no CUDA"
        source = f", Python files of {self.source}" if self.source else ""
        return f"torch {self.version} ({cuda}), Python {self.python_version}, {self.python}{source}"


def run_probe(python: Path | str) -> dict[str, Any]:
    """What an interpreter says of itself and of its torch; keys as `_PROBE` sets them.

    PYTHONPATH and the cache folders of a patched tree are kept from it. Raises GraftError when it
    cannot be run.
    """
    env = caches.stock_environ(os.environ)
    for name in ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "__PYVENV_LAUNCHER__"):
        env.pop(name, None)
    try:
        done = subprocess.run(
            # A relative path is the user's; the probe runs where nothing can be imported.
            [os.path.abspath(shutil.which(python) or python), "-c", _PROBE],
            cwd="/",
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as wrong:
        raise UsageError(
            f"cannot run {python}: {getattr(wrong, 'strerror', None) or wrong}",
            next="./build.sh --python PY, with the path of a Python 3.11 to 3.14",
        ) from wrong
    for line in done.stdout.splitlines():
        if line.startswith("graft-probe:"):
            found: dict[str, Any] = json.loads(line.partition(":")[2])
            return found
    words = (done.stderr or done.stdout).strip().splitlines()
    raise GraftError(
        f"{python} does not run: {words[-1] if words else f'exit code {done.returncode}'}",
        next="./build.sh --python PY, with the path of a Python 3.11 to 3.14",
    )


def check_python(found: dict[str, Any]) -> None:
    """Raise GraftError if the probed interpreter is too old or too new."""
    major, minor = (int(part) for part in found["python_version"].split(".")[:2])
    if not OLDEST <= (major, minor) <= NEWEST:
        raise GraftError(
            f"{found['python']} is Python {found['python_version']}; expected "
            f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}",
            next="./build.sh --python PY, with the path of such a Python",
        )


def probe(python: Path | str) -> Base:
    """Run `python` once and describe it and its torch.

    Raises GraftError when it cannot be run, is too old, has no torch, or is a patched tree itself.
    """
    found = run_probe(python)
    check_python(found)
    manifest = Path(found["prefix"]) / "graft.json"
    if manifest.exists():
        stock = json.loads(manifest.read_text("utf-8")).get("base", {}).get("python", "PY")
        raise UsageError(
            f"{python} is the Python of a patched tree ({manifest.parent}); expected a stock one",
            next=f"./build.sh --python {stock} --offline",
        )
    if not found.get("torch_dir"):
        raise GraftError(
            f"{found['python']} has no torch",
            next="./build.sh (installs one into .venv), or ./build.sh --python PY --offline with "
            "a Python that has torch 2.11.0",
        )
    if not found.get("version"):
        raise GraftError(
            f"torch in {found['torch_dir']} has no version.py: it is not an installed torch",
            next="./build.sh --python PY --offline, with a Python that has torch 2.11.0",
        )
    return Base(
        python=Path(found["python"]),
        executable=Path(found["executable"]),
        python_version=found["python_version"],
        site=found["site"],
        site_dirs=tuple(Path(folder) for folder in found["site_dirs"]),
        torch_dir=Path(found["torch_dir"]),
        version=found["version"],
        git_version=found.get("git_version") or "",
        cuda=found.get("cuda"),
    )
