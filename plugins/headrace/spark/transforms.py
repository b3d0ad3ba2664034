"""The user's transform: found, made ready to travel, and called."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headrace.stream import Stream

Transform = Callable[..., Any]


class TransformError(HeadraceError):
    """The transform cannot be called with the stream's inputs, or does not return what the outputs need."""


@dataclass(frozen=True, slots=True)
class BatchContext:
    """What a transform may know of its batch: pass it a parameter named ``batch``.

    The batch holds the data interval ``[batch_time - interval, batch_time)``; ``attempt`` counts from 1.
    """

    stream: str
    batch_time: datetime
    interval: timedelta
    attempt: int

    @classmethod
    def of(cls, stream: str, batch_time_ms: int, interval_ms: int, attempt: int) -> BatchContext:
        interval = timedelta(milliseconds=interval_ms)
        return cls(stream, datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=batch_time_ms), interval, attempt)


def load_transform(stream: Stream) -> Transform | None:
    """Import the stream's transform with ``spark.py_files`` on the path; its modules travel to executors by value.

    By value, so that they need not be importable there, and so that a warm application's workers, which keep what they
    imported, run the code of today.
    """
    if stream.transform is None:
        return None
    roots = _add_to_path(stream.spark.py_files)
    transform = stream.load_transform()
    for module in _own_modules(stream.transform.partition(":")[0], roots):
        _travel_by_value(module)
    return transform


def check_transform(stream: Stream) -> None:
    """Find the transform as a batch would, with ``spark.py_files``, and see that it takes the stream's inputs.

    Raises StreamDefinitionError or TransformError. It is not called: there is no Spark here.
    """
    transform = load_transform(stream)
    if transform is not None:
        batch = BatchContext.of(stream.name, 0, stream.batch_interval_ms, 1)
        arguments(transform, {source.id: None for source in stream.inputs}, batch)


def apply_transform(
    transform: Transform | None, inputs: Mapping[str, DataFrame], outputs: tuple[str, ...], batch: BatchContext
) -> dict[str, DataFrame]:
    """The DataFrame of each output: the transform's, or the one input where there is no transform.

    The transform gets its inputs as keyword arguments by their ids ("-" written "_"); one alone also as its first
    argument, whatever that is called. It returns a DataFrame for all outputs, or a mapping from output ids to one each.
    """
    if transform is None:
        (result,) = inputs.values()
        return dict.fromkeys(outputs, result)
    positional, keywords = arguments(transform, inputs, batch)
    returned = transform(*positional, **keywords)
    if isinstance(returned, Mapping):
        if set(returned) != set(outputs):
            raise TransformError(
                f"The transform returned DataFrames for {sorted(returned)}, the outputs are {sorted(outputs)}.",
                remedy="Return one for each output's id, or one DataFrame for all.",
            )
        by_output = dict(returned)
    else:
        by_output = dict.fromkeys(outputs, returned)
    for name, frame in by_output.items():
        _check_frame(name, frame)
    return by_output


def arguments(
    transform: Transform, inputs: Mapping[str, Any], batch: BatchContext
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How to call ``transform``; raises TransformError when its parameters do not fit the inputs."""
    signature = inspect.signature(transform)
    parameters = signature.parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {name.replace("-", "_"): frame for name, frame in inputs.items()}
    extra = {"batch": batch} if "batch" in parameters and "batch" not in named else {}
    positional: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {**named, **extra}
    first = next(iter(parameters.values()), None)
    if not takes_any and len(named) == 1 and first is not None and first.name not in {*named, "batch"}:
        positional, keywords = tuple(named.values()), extra
    try:
        signature.bind(*positional, **keywords)
    except TypeError:
        raise TransformError(
            f"The transform takes ({', '.join(parameters)}), the stream's inputs are ({', '.join(named)}).",
            remedy="Name its parameters by the inputs' ids.",
        ) from None
    return positional, keywords


def _check_frame(output: str, frame: object) -> None:
    from pyspark.sql import DataFrame

    if not isinstance(frame, DataFrame):
        raise TransformError(
            f"The transform returned a {type(frame).__name__} for output {output!r}, not a DataFrame.",
            remedy="Return the DataFrame that it made.",
        )


def _add_to_path(py_files: tuple[str, ...]) -> list[Path]:
    roots = []
    for name in py_files:
        if "://" in name:
            # spark-submit has fetched it and put it on the path already.
            continue
        path = Path(name)
        if not path.exists():
            raise TransformError(f"spark.py_files names {name}, which does not exist on this machine.")
        roots.append(path.resolve())
        entry = str(path.parent if path.suffix == ".py" else path)
        if entry not in sys.path:
            sys.path.insert(1, entry)
    return roots


def _own_modules(transform_module: str, roots: list[Path]) -> list[ModuleType]:
    """The transform's module, and all that was imported from ``py_files``."""
    found = [sys.modules[transform_module]]
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file is not None and module not in found and any(Path(file).is_relative_to(root) for root in roots):
            found.append(module)
    return [module for module in found if module.__name__.partition(".")[0] not in ("headrace", "pyspark")]


def _travel_by_value(module: ModuleType) -> None:
    from pyspark import cloudpickle

    if module.__name__ != "__main__":
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
