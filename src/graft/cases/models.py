"""The models of `graft bench models`: other people's, with random weights.

They are in `bench/models.toml`. `catalogue` reads what there is; `case` makes a training step of
one, which needs its library. No weights are loaded, and nothing is downloaded.
"""

from __future__ import annotations

import functools
import importlib
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from graft.cases.case import Case, Shape
from graft.errors import GraftError, UsageError, nearest
from graft.places import ROOT

FILE = ROOT / "bench" / "models.toml"
GROUPS = ("tuned", "held_out", "unseen")
LIBRARIES = ("transformers", "timm")
# Labels that a loss leaves out, as transformers and torch have them.
_NO_LABEL = -100
# Of a masked language model's tokens, the share that is to be guessed: BERT's.
_MASKED = 0.15
_IMAGE_CHANNELS, _TIMM_CLASSES = 3, 1000


@dataclass(frozen=True)
class Model:
    """A model of the catalogue; the fields are those of `bench/models.toml`."""

    name: str
    group: str
    kind: str
    make: str
    batch: str
    shape: Shape
    sizes: Mapping[str, Any] = field(default_factory=dict)
    dropout: bool = False
    cost_s: float = 100.0

    @property
    def library(self) -> str:
        return self.make.partition(".")[0]

    @property
    def what(self) -> str:
        """The class or the model, as its library calls it."""
        return self.make.partition(".")[2]


@functools.cache
def catalogue(file: Path = FILE) -> Mapping[str, Model]:
    """Every model, by name, in the file's order. Raises GraftError for what is no catalogue."""
    out = {}
    for name, entry in tomllib.loads(file.read_text()).items():
        try:
            model = Model(name=name, **{**entry, "shape": tuple(entry["shape"])})
        except (KeyError, TypeError) as error:
            raise GraftError(f"{file}: [{name}]: {error}") from None
        for what, known in (
            ("group", GROUPS),
            ("library", LIBRARIES),
            ("batch", tuple(BATCHES)),
        ):
            if getattr(model, what) not in known:
                raise GraftError(
                    f"{file}: [{name}]: {what} {getattr(model, what)!r}; one of {', '.join(known)}"
                )
        out[name] = model
    return out


def select(names: Sequence[str], group: str | None = None) -> list[Model]:
    """The models that `names` mean (all, where there is none), of `group` alone where given.

    Raises UsageError for a name that means none.
    """
    known = catalogue()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(
            f"unknown model {unknown[0]!r}{nearest(unknown[0], known)}",
            next="graft bench models --list",
        )
    chosen = [known[name] for name in names or known]
    found = [model for model in chosen if group in (None, model.group)]
    if not found:
        raise UsageError(f"none of {', '.join(names)} is {group}", next="graft bench models --list")
    return found


def case(model: Model) -> Case:
    """Its training step: forward and loss under bf16 autocast. Imports its library."""
    make, loss = BATCHES[model.batch]
    if model.library == "transformers":
        _config(model)
    else:
        imported(model.library)
    return Case(
        name=model.name,
        summary=f"training step of {model.make}, bf16 autocast",
        fn=loss,
        inputs=lambda shape, dtype, device: make(model, shape, device),
        shapes={"default": [model.shape]},
        dtypes=("bf16",),
        model=lambda device: build(model, device),
        whole_batch=True,
        dropout=model.dropout,
    )


def build(model: Model, device: torch.device) -> torch.nn.Module:
    """The model on `device`, with random weights, in training mode."""
    with torch.device(device):
        if model.library == "timm":
            timm = imported("timm")
            sizes = {name: _tuples(value) for name, value in model.sizes.items()}
            made: torch.nn.Module = timm.create_model(model.what, pretrained=False, **sizes)
        else:
            made = getattr(imported("transformers"), model.what)(_config(model))
    return made.to(device).train()


def imported(name: str) -> Any:
    """A library of models, by its name. Raises what its import raises."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # random weights: there is nothing to ask for
    return importlib.import_module(name)


def _config(model: Model) -> Any:
    """What transformers makes a model of. Keys and values are not kept: nothing is generated."""
    kind = getattr(imported("transformers"), model.what).config_class
    config = kind(**model.sizes)
    if getattr(config, "use_cache", False):
        config.use_cache = False
    return config


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _autocast(like: torch.Tensor) -> torch.autocast:
    return torch.autocast(like.device.type, dtype=torch.bfloat16)


def _loss_of(*names: str, **more: Any) -> Callable[..., torch.Tensor]:
    """The loss that a model of transformers computes of a batch with `names`."""

    def loss(model: Any, *batch: torch.Tensor) -> torch.Tensor:
        with _autocast(batch[0]):
            out: torch.Tensor = model(**dict(zip(names, batch, strict=True)), **more).loss
        return out

    return loss


def _cross_entropy(model: Any, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    with _autocast(images):
        return F.cross_entropy(model(images), classes)


def _tokens(model: Model, shape: Shape, device: torch.device) -> torch.Tensor:
    return torch.randint(_config(model).vocab_size, shape, device=device)


def _next_token(model: Model, shape: Shape, device: torch.device) -> tuple[torch.Tensor, ...]:
    tokens = _tokens(model, shape, device)
    return tokens, tokens.clone()


def _masked(model: Model, shape: Shape, device: torch.device) -> tuple[torch.Tensor, ...]:
    tokens = _tokens(model, shape, device)
    asked = torch.rand(shape, device=device) < _MASKED
    return tokens, tokens.where(asked, torch.full_like(tokens, _NO_LABEL))


def _seq2seq(model: Model, shape: Shape, device: torch.device) -> tuple[torch.Tensor, ...]:
    batch, length, labels = shape
    return _tokens(model, (batch, length), device), _tokens(model, (batch, labels), device)


def _transcript(model: Model, shape: Shape, device: torch.device) -> tuple[torch.Tensor, ...]:
    batch, frames, labels = shape
    bins = _config(model).num_mel_bins
    spectrum = torch.randn(batch, bins, frames, device=device)
    return spectrum, _tokens(model, (batch, labels), device)


def _phonemes(model: Model, shape: Shape, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Sound, and 4 labels a second of 16 kHz; 0 is CTC's blank."""
    batch, samples = shape
    labels = (batch, max(1, samples // 4000))
    return torch.randn(shape, device=device), torch.randint(
        1, _config(model).vocab_size, labels, device=device
    )


def _captions(model: Model, shape: Shape, device: torch.device) -> tuple[torch.Tensor, ...]:
    config = _config(model)
    side = config.vision_config.image_size
    text = torch.randint(config.text_config.vocab_size, shape, device=device)
    return text, torch.randn(shape[0], _IMAGE_CHANNELS, side, side, device=device)


def _images(model: Model, shape: Shape, device: torch.device) -> tuple[torch.Tensor, ...]:
    batch, side = shape
    images = torch.randn(batch, _IMAGE_CHANNELS, side, side, device=device)
    return images, torch.randint(_TIMM_CLASSES, (batch,), device=device)


def _segments(model: Model, shape: Shape, device: torch.device) -> tuple[torch.Tensor, ...]:
    batch, side = shape
    images = torch.randn(batch, _IMAGE_CHANNELS, side, side, device=device)
    return images, torch.randint(_config(model).num_labels, (batch, side, side), device=device)


_Batch = Callable[[Model, Shape, torch.device], tuple[torch.Tensor, ...]]

BATCHES: Mapping[str, tuple[_Batch, Callable[..., torch.Tensor]]] = {
    "next_token": (_next_token, _loss_of("input_ids", "labels")),
    "masked": (_masked, _loss_of("input_ids", "labels")),
    "seq2seq": (_seq2seq, _loss_of("input_ids", "labels")),
    "transcript": (_transcript, _loss_of("input_features", "labels")),
    "phonemes": (_phonemes, _loss_of("input_values", "labels")),
    "captions": (_captions, _loss_of("input_ids", "pixel_values", return_loss=True)),
    "segments": (_segments, _loss_of("pixel_values", "labels")),
    "classes": (_images, _cross_entropy),
}
"""What a batch holds and the loss that is taken of it. The first seven are losses of transformers:
of the next token; of 15 % of the tokens; of an answer; of a recording's text; of a recording's
phonemes, by CTC; of which caption is whose image; of each pixel's class. The last is the cross
entropy of an image's class."""
