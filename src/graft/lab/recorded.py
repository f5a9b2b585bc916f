"""An operation or a device function of a kernel, by the calls of the builder that it came down to.

What Triton's front end makes of `x + 1` (casts, splats, an addition) depends on the types of its
tensors and on the values of everything else. The interpreter works it out for each operation of
each program, which takes ten times as long as numpy takes to add two small blocks. Here the first
time is recorded, as calls of the builder on handles; the next time, with the same types and values,
the calls alone are made. A device function, as the combining function of a reduction, is recorded
whole.

Functions whose calls cannot be told apart by types and values, or whose results are no tensors, go
Triton's way every time; so do those that branch on what a tensor holds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import triton.language as tl
from triton.runtime.interpreter import TensorHandle

_MOST_CONSTANT_ELEMENTS = 1024  # of a constant that is kept: an index of a narrow block
_MOST = 50_000  # operations that are remembered
_PLAIN = frozenset({int, float, bool, str, type(None)})
_ASKS = ("program", "print", "assert", "atomic", "barrier")  # no constants, whatever they are given

_numbers: dict[Any, int] = {}
_nothing = object()


class Unknown(Exception):
    """An argument that does not say by its type, or its value, what will be made of it."""


def number(type_: Any) -> int:
    """A number for a type: the same for equal types; kept on the type's object."""
    key: Any
    if type_.is_block():
        key = (number(type_.element_ty), type_.shape)
    elif type_.is_ptr():
        key = (number(type_.element_ty), type_.address_space, type_.const)
    else:
        key = type_.name
    found: int = _numbers.setdefault(key, len(_numbers) + 1)
    type_.recorded_number = found
    return found


def _key(value: Any) -> Any:
    kind = type(value)
    if kind is tl.constexpr:
        return ("constexpr", _key(value.value))
    if kind is float:
        return repr(value)  # -0.0 is 0.0, and NaN is not NaN
    if kind in _PLAIN:
        return (kind, value)
    if kind in (tuple, list, tl.tuple):
        return (kind, *map(_key, value))
    if kind is slice:
        return (kind, _key(value.start), _key(value.stop), _key(value.step))
    if isinstance(value, tl.dtype):
        return (kind, number(value))
    raise Unknown


class _Recorder:
    """In the place of the builder while one operation is worked out."""

    def __init__(self, builder: Any, handles: list[TensorHandle]) -> None:
        self.builder = builder
        self.slots: list[Any] = list(handles)
        self.constant = [False] * len(handles)
        self.places = {id(handle): i for i, handle in enumerate(handles)}
        self.steps: list[tuple[Callable[..., Any], Any, int]] = []
        self.complete = True

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.builder, name)
        if not callable(member):
            return member

        def call(*args: Any, **kwargs: Any) -> Any:
            result = member(*args, **kwargs)
            self._note(name, member, args, kwargs, result)
            return result

        return call

    def _add(self, value: Any, constant: bool) -> int:
        self.slots.append(value)
        self.constant.append(constant)
        return len(self.slots) - 1

    def result(self, handle: TensorHandle | None) -> int | None:
        """The place of what was returned; None where it was not made here."""
        return self._add(None, True) if handle is None else self.places.get(id(handle))

    def _place(self, value: Any) -> int:
        if isinstance(value, TensorHandle):
            place = self.places.get(id(value))
            if place is None:  # from elsewhere: nobody knows what it depends on
                self.complete = False
                return 0
            return place
        if isinstance(value, (list, tuple)) and any(isinstance(x, TensorHandle) for x in value):
            places = [self._place(x) for x in value]
            at = self._add(None, False)
            self._step(lambda *items: list(items), places, at)
            return at
        return self._add(value, True)

    def _step(self, member: Callable[..., Any], places: list[int], at: int) -> None:
        if len(places) == 1:
            (only,) = places
            self.steps.append((member, lambda slots: (slots[only],), at))
        elif places:
            self.steps.append((member, itemgetter(*places), at))
        else:
            self.steps.append((member, lambda slots: (), at))

    def _note(
        self,
        name: str,
        member: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        places = [self._place(x) for x in args]
        if any(isinstance(x, TensorHandle) for x in kwargs.values()):
            self.complete = False
        constant = all(self.constant[place] for place in places)
        if not isinstance(result, TensorHandle):
            if constant and name.startswith("get_"):
                return  # a type
            if result is not None:
                self.complete = False
                return
        elif constant and not any(word in name for word in _ASKS) and _is_small(result):
            self.places[id(result)] = self._add(result, True)
            return
        at = self._add(result, False)
        if result is not None:
            self.places[id(result)] = at
        called = (lambda *xs: member(*xs, **kwargs)) if kwargs else member
        self._step(called, places, at)


def _is_small(handle: TensorHandle) -> bool:
    data = handle.data
    return data.size <= _MOST_CONSTANT_ELEMENTS or not any(data.strides)


class Operations:
    """The operations of `semantic`'s builder, each by what is known of it."""

    def __init__(self, semantic: Any) -> None:
        self.semantic = semantic
        self.known: dict[Any, Any] = {}
        self.recorder: _Recorder | None = None

    def asks(self, member: Callable[..., Any]) -> Callable[..., Any]:
        """A function that says what a tensor holds: what is made of that cannot be recorded."""

        def asked(value: Any) -> Any:
            if self.recorder is not None:
                self.recorder.complete = False
            return member(value)

        return asked

    def wrap(self, member: Callable[..., Any]) -> Callable[..., Any]:
        """A function of Triton's language, which takes `_semantic`, for a kernel to call."""
        remembered = self.remember(partial(member, _semantic=self.semantic))

        def operation(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            return remembered(*args, **kwargs)

        return operation

    def remember(self, member: Callable[..., Any]) -> Callable[..., Any]:
        """A function of tensors that makes only calls of the builder, for a kernel to call."""
        known, tensor = self.known, tl.tensor

        def operation(*args: Any, **kwargs: Any) -> Any:
            if self.recorder is not None:
                return member(*args, **kwargs)
            key: list[Any] = [member, *kwargs]
            handles: list[Any] = []
            try:
                for value in (*args, *kwargs.values()):
                    if type(value) is tensor:
                        type_ = value.type
                        key.append(type_.recorded_number or number(type_))
                        handles.append(value.handle)
                    else:
                        key.append(_key(value))
            except Unknown:
                return member(*args, **kwargs)
            full = tuple(key)
            found = known.get(full, _nothing)
            if found is None:
                return member(*args, **kwargs)
            if found is _nothing:
                return self._record(full, member, args, kwargs)
            fixed, steps, place, type_ = found
            slots = handles + fixed
            for call, arguments, at in steps:
                slots[at] = call(*arguments(slots))
            if type(place) is int:
                return tensor(slots[place], type_)
            return tuple([tensor(slots[at], each) for at, each in zip(place, type_)])

        return operation

    def _record(
        self, key: Any, member: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if type(x) is tl.tensor]
        if any(type(x.handle) is not TensorHandle for x in tensors):  # a block's pointer
            self.known[key] = None
            return member(*args, **kwargs)
        handles: list[TensorHandle] = []

        def apart(value: Any) -> Any:
            """The same tensor by a handle of its own: two arguments may share one."""
            if type(value) is not tl.tensor:
                return value
            handle = TensorHandle(value.handle.data, value.handle.dtype, value.handle.attr)
            handles.append(handle)
            return tl.tensor(handle, value.type)

        args = tuple(map(apart, args))
        kwargs = {name: apart(value) for name, value in kwargs.items()}
        builder = self.semantic.builder
        recorder = _Recorder(builder, handles)
        self.semantic.builder = self.recorder = recorder
        try:
            result = member(*args, **kwargs)
        finally:
            self.recorder = None
            self.semantic.builder = builder
        if len(self.known) >= _MOST:
            self.known.clear()
        self.known[key] = self._found(recorder, len(handles), result)
        return result

    @staticmethod
    def _found(recorder: _Recorder, inputs: int, result: Any) -> Any:
        results = result if type(result) is tuple else (result,)
        if not recorder.complete or any(type(each) is not tl.tensor for each in results):
            return None
        at = [recorder.result(each.handle) for each in results]
        if None in at:
            return None
        fixed = [
            value if constant else None
            for value, constant in zip(recorder.slots[inputs:], recorder.constant[inputs:])
        ]
        if type(result) is tuple:
            return fixed, recorder.steps, at, [each.type for each in results]
        return fixed, recorder.steps, at[0], result.type
