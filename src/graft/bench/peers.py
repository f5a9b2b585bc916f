"""Other libraries' kernels for the cases: Liger-Kernel, QuACK, Helion.

All are optional. One that is missing is absent, one of another version than this module was
written for is named and left out. `--peers DIR` gives wheels by a folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.errors import GraftError

Kernel = Callable[..., Callable[[], Any]]  # inputs of the case -> what is timed


@dataclass(frozen=True)
class Peer:
    """A library: its distribution's name, the module that it installs, the version expected."""

    distribution: str
    module: str
    version: str


PEERS: Mapping[str, Peer] = {
    "liger": Peer("liger-kernel", "liger_kernel", "0.8.5"),
    "quack": Peer("quack-kernels", "quack", "0.6.5"),
    "helion": Peer("helion", "helion", "1.4.0"),
}


def version(name: str) -> str | None:
    """The installed version of a peer, or None."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(PEERS[name].distribution)
    return None


def absence(name: str) -> str | None:
    """Why a peer cannot run here, or None: not installed, another version, or its import fails."""
    peer = PEERS[name]
    found = version(name)
    if found is None:
        return f"{peer.distribution} is not installed"
    if found != peer.version:
        return f"{peer.distribution} {found} is installed, {peer.version} expected"
    try:
        importlib.import_module(peer.module)
    except Exception as error:  # whatever a library's import raises
        return f"{peer.distribution} {found} does not import: {type(error).__name__}: {error}"
    return None


def unpack(wheels: Path, into: Path) -> Path:
    """Unpack a folder of wheels below `into`, once for each content, and return the folder.

    What a peer needs must be among the wheels or installed. Raises GraftError for a folder
    without wheels, or for one that is no wheel.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise GraftError(
            f"{wheels} holds no wheels", next=f"pip download --no-deps -d {wheels} liger-kernel"
        )
    key = hashlib.sha256()
    for file in files:
        key.update(f"{file.name} {file.stat().st_size}\n".encode())
    target = into / key.hexdigest()[:16]
    if target.exists():
        return target
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into, prefix=".") as aside:
        made = Path(aside) / "made"
        for file in files:
            try:
                with zipfile.ZipFile(file) as wheel:
                    wheel.extractall(made)
            except zipfile.BadZipFile:
                raise GraftError(f"{file} is no wheel: it cannot be unzipped") from None
        for data in made.glob("*.data/*lib"):  # purelib and platlib belong at the top
            for path in data.iterdir():
                path.rename(made / path.name)
        with contextlib.suppress(OSError):  # another run made it meanwhile
            made.rename(target)
    return target


def kernel(name: str, case: str, autotune: bool = False) -> Kernel | None:
    """A peer's kernel for a case, or None where it has none.

    Call it with the case's inputs; it returns what is to be timed. `autotune` lets Helion
    search for a configuration, in place of taking the one its heuristic names.
    """
    if name == "helion":
        from graft.bench import helion_kernels

        return helion_kernels.bind(case, autotune)
    return {"liger": _LIGER, "quack": _QUACK}[name].get(case)


def _liger_rms_norm_backward(x: Any, dy: Any, weight: Any, rstd: Any) -> Callable[[], Any]:
    from liger_kernel.ops.rms_norm import rms_norm_backward
    from liger_kernel.ops.utils import calculate_settings

    block, warps = calculate_settings(x.shape[1])
    rstd = rstd.reshape(-1)
    llama = 0  # casting mode: only the inverse rms is fp32
    # In place, as Liger runs by default: dx overwrites the gradient, here a copy of it. The
    # first run is right and is the one that is checked; the values of later ones do not matter.
    dy = dy.clone()
    return lambda: rms_norm_backward(
        dy, x, weight, rstd, 0.0, llama, block, warps, in_place=True, row_mode=None
    )


def _liger_layer_norm_backward(
    x: Any, dy: Any, weight: Any, bias: Any, mean: Any, rstd: Any
) -> Callable[[], Any]:
    from liger_kernel.ops.layer_norm import layer_norm_backward

    mean, rstd = mean.reshape(-1), rstd.reshape(-1)
    return lambda: layer_norm_backward(dy, x, weight, bias, mean, rstd)


def _liger_layer_norm_nobias_backward(
    x: Any, dy: Any, weight: Any, mean: Any, rstd: Any
) -> Callable[[], Any]:
    from liger_kernel.ops.layer_norm import layer_norm_backward

    mean, rstd = mean.reshape(-1), rstd.reshape(-1)
    return lambda: layer_norm_backward(
        dy, x, weight, None, mean, rstd, needs_dw=True, needs_db=False
    )[:2]


def _liger_softmax(x: Any) -> Callable[[], Any]:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return lambda: LigerSoftmaxFunction.apply(x)


def _liger_rms_norm(x: Any, weight: Any) -> Callable[[], Any]:
    from liger_kernel.ops.rms_norm import rms_norm_forward

    return lambda: rms_norm_forward(x, weight, 1e-5, 0.0, "llama", None)[0]


def _liger_layer_norm(x: Any, weight: Any, bias: Any) -> Callable[[], Any]:
    from liger_kernel.ops.layer_norm import layer_norm_forward

    return lambda: layer_norm_forward(x, weight, bias, 1e-5)[0]


def _quack_rms_norm_backward(x: Any, dy: Any, weight: Any, rstd: Any) -> Callable[[], Any]:
    from quack.rmsnorm import rmsnorm_bwd

    rstd = rstd.reshape(-1)
    return lambda: rmsnorm_bwd(x, weight, dy, rstd)[:2]


def _quack_layer_norm_backward(
    x: Any, dy: Any, weight: Any, bias: Any, mean: Any, rstd: Any
) -> Callable[[], Any]:
    from quack.rmsnorm import layernorm_bwd

    mean, rstd = mean.reshape(-1), rstd.reshape(-1)
    return lambda: layernorm_bwd(x, weight, dy, rstd, mean, has_bias=True)


def _quack_layer_norm_nobias_backward(
    x: Any, dy: Any, weight: Any, mean: Any, rstd: Any
) -> Callable[[], Any]:
    from quack.rmsnorm import layernorm_bwd

    mean, rstd = mean.reshape(-1), rstd.reshape(-1)
    return lambda: layernorm_bwd(x, weight, dy, rstd, mean, has_bias=False)[:2]


def _quack_rms_norm(x: Any, weight: Any) -> Callable[[], Any]:
    from quack.rmsnorm import rmsnorm_fwd

    return lambda: rmsnorm_fwd(x, weight, eps=1e-5)[0]


def _quack_softmax(x: Any) -> Callable[[], Any]:
    from quack.softmax import softmax_fwd

    return lambda: softmax_fwd(x)


_LIGER: Mapping[str, Kernel] = {
    "rms_norm_backward": _liger_rms_norm_backward,
    "layer_norm_backward": _liger_layer_norm_backward,
    "layer_norm_nobias_backward": _liger_layer_norm_nobias_backward,
    "rms_norm": _liger_rms_norm,
    "layer_norm": _liger_layer_norm,
    "softmax": _liger_softmax,
}

_QUACK: Mapping[str, Kernel] = {
    "rms_norm_backward": _quack_rms_norm_backward,
    "layer_norm_backward": _quack_layer_norm_backward,
    "layer_norm_nobias_backward": _quack_layer_norm_nobias_backward,
    "rms_norm": _quack_rms_norm,
    "softmax": _quack_softmax,
}
