"""What `graft explain` does with its options."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rich.console import Console

from graft.cli import options
from graft.errors import GraftError, UsageError
from graft.lab import devices
from graft.lab import explain as explaining
from graft.lab import explain_screen as screen
from graft.stack.trees import tree


def explain(
    prefix: Path,
    case: str | None,
    *,
    gpu: str | None,
    shape: str | None,
    dtype: str,
    dynamic: bool,
    file: Path | None,
    every_kernel: bool,
) -> int:
    """Compile stock and patched, print what differs.

    Returns 1 where a kernel of the patched torch compiles at no configuration.
    """
    from graft import cases
    from graft.lab import devices

    # First what can be wrong with the command, then what takes time.
    sizes = None if shape is None else parse_shape(shape)
    described = options.described_gpu(gpu) if gpu else None
    case = case or explaining.DEFAULT_CASE
    cases.find(case)
    pythons = tree.pythons(prefix)
    console = screen.console()
    if described is None and explaining.real_gpu() is None:
        described = explaining.DEFAULT_GPU
        others = ", ".join(key for key in devices.DEVICES if key != described)
        console.print(
            f"no GPU that torch can use here: compiled offline for an {described} "
            f"(--gpu for {others})",
            soft_wrap=True,
        )
    with screen.progress(Console(stderr=True)) as progress:
        report = explaining.explain(
            pythons,
            case,
            shape=sizes,
            dtype=dtype,
            gpu=described,
            dynamic=dynamic,
            progress=progress,
        )
    screen.show(report, console, every_kernel)
    if file is not None:
        file.write_text(json.dumps(report.to_json(), indent=1) + "\n")
        console.print(f"written: {file}")
    return 1 if report.patched.uncompilable else 0


def check(prefix: Path, case: str | None, dtype: str) -> int:
    """Compare what is compiled offline with the real GPU; returns 1 where they differ."""
    names = [case] if case else explaining.SHIPPED
    pythons = tree.pythons(prefix)
    try:
        devices.present()
    except GraftError as wrong:
        wrong.next = f"graft explain{f' {case}' if case else ''} --gpu H200"
        raise
    with screen.progress(Console(stderr=True)) as progress:
        checks = explaining.check(pythons, names, dtype=dtype, progress=progress)
    screen.show_checks(checks, explaining.real_gpu() or "", screen.console())
    return 0 if all(each.is_same for each in checks) else 1


def list_cases() -> int:
    """Print each case with its default shape; returns 0."""
    from graft import cases

    console = screen.console()
    for case in cases.load_all().values():
        size = " x ".join(map(str, case.default_shape))
        console.print(f"{case.name:28} {size:>16}  {case.summary}", highlight=False)
    return 0


def parse_shape(text: str) -> tuple[int, ...]:
    """`32768,768` or `32768x768`. Raises UsageError for anything else."""
    if not re.fullmatch(r"\d+([,x]\d+)*", text):
        raise UsageError(
            f"a shape is sizes with commas, as in 32768,768; got {text!r}",
            next="graft explain rms_norm_backward --shape 32768,768",
        )
    sizes = tuple(int(size) for size in re.split("[,x]", text))
    if 0 in sizes:
        raise UsageError(f"a shape has no size 0; got {text!r}")
    return sizes
