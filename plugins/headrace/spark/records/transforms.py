"""Loads and calls the user's functions: transforms, the state's update, functions of foreach_batch outputs.

The version of their code, which an attempt records, is a hash over their sources, and headrace's version. The sources
are found by following import statements, not by the modules that this process has imported. So the version is equal on
every machine, and whether one process runs all of a batch's outputs or each output has its own process.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import headrace
from headrace.errors import Failure, HeadraceError
from headrace.stream import STATE_STEP
from headrace.stream.model import load_reference

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headrace.stream import Output, State, Stream


Transform = Callable[..., Any]

# Parameters of outputs' transforms in a stream with state: the table, and its changed rows.
STATE_FRAMES = ("state", "changes")
# A parameter of a foreach_batch output's function: the records that do not decode.
UNDECODABLE = "undecodable"


class TransformError(HeadraceError):
    """The transform cannot be called with the stream's inputs, or does not return what the outputs need."""

    failure = Failure.CODE


@dataclass(frozen=True, slots=True)
class BatchContext:
    """The batch's properties for a transform, which gets them in a parameter named ``batch``.

    The batch covers the data interval ``[batch_time - interval, batch_time)``; with a window the records are those of
    ``[window_start, batch_time)``. ``attempt`` counts from 1. ``parameters`` are the stream's, overridden by those of
    the DAG run. ``target`` is the name of a replay, "" for the stream itself.
    """

    stream: str
    batch_time: datetime
    interval: timedelta
    attempt: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    window_start: datetime | None = None
    target: str = ""

    @classmethod
    def of(
        cls,
        stream_name: str,
        batch_time_ms: int,
        interval_ms: int,
        attempt: int,
        *,
        parameters: Mapping[str, Any] | None = None,
        window_ms: int | None = None,
        target: str = "",
    ) -> BatchContext:
        """The context of a batch; ``window_ms`` is the length of its window, if it has one."""
        return cls(
            stream_name,
            _datetime(batch_time_ms),
            timedelta(milliseconds=interval_ms),
            attempt,
            dict(parameters or {}),
            None if window_ms is None else _datetime(batch_time_ms - window_ms),
            target,
        )


def _datetime(time_ms: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=time_ms)


def load_transform(stream: Stream, output: Output | None = None) -> Transform | None:
    """Load an output's transform, or the stream's if there is no output; None if there is none. See `load_function`."""
    reference = stream.transform if output is None else stream.transform_of(output)
    return None if reference is None else load_function(stream, reference, "transform")


def load_function(stream: Stream, reference: str, what: str) -> Callable[..., Any]:
    """Import "module:function" with ``spark.py_files`` on the path; its modules are pickled by value for executors.

    So they need not be importable there, and workers of a warm application, which keep imported modules, run the
    current code. ``what`` is the function's role in the definition, for error texts. Raises StreamDefinitionError if
    the function cannot be found, TransformError if it is not a function or a file of ``py_files`` is missing.
    """
    roots = add_py_files(stream)
    function = load_reference(reference, what)
    if not callable(function):
        raise TransformError(f"The {what} {reference} is a {type(function).__name__}, not a function.")
    for module in _own_modules(reference.partition(":")[0], roots):
        _travel_by_value(module)
    return function


def load_foreach(stream: Stream, output: Output, reference: str) -> Callable[..., Any]:
    """Import one of the output's functions as a transform, and check that it takes a DataFrame and a batch.

    Raises StreamDefinitionError or TransformError.
    """
    function = load_function(stream, reference, f"function of output {output.id!r}")
    signature = inspect.signature(function)
    more = {UNDECODABLE: None} if UNDECODABLE in signature.parameters else {}
    try:
        signature.bind(None, None, **more)
    except TypeError:
        raise TransformError(
            f"The function {reference} of output {output.id!r} takes ({', '.join(signature.parameters)}).",
            remedy="It must take the batch's DataFrame and its context: def write(frame, batch).",
        ) from None
    return function


def add_py_files(stream: Stream, *, may_be_missing: bool = False) -> list[Path]:
    """Put the local files of ``spark.py_files`` on this process's path and return their paths.

    An archive or a folder comes first. The folder of a ``.py`` file comes last: other files in it (it may be the folder
    of DAGs) must not replace installed modules of their name.

    Raises TransformError if one does not exist; not if it ``may_be_missing``, as on an executor of another host,
    which got it with the application and has it on its path.
    """
    # spark-submit has already fetched files with a URL and put them on the path.
    roots = [Path(name).resolve() for name in stream.spark.py_files if "://" not in name]
    for path in roots:
        if may_be_missing and not path.exists():
            continue
        if not path.exists():
            raise TransformError(f"spark.py_files names {path}, which does not exist on this machine.")
        is_file = path.suffix == ".py"
        entry = str(path.parent if is_file else path)
        if entry not in sys.path:
            sys.path.insert(len(sys.path) if is_file else 1, entry)
    return roots


def check_transform(stream: Stream) -> None:
    """Load every output's transform as a batch does, with ``spark.py_files``, and check that it takes the inputs.

    The state's functions and those of ForeachBatchOutputs are checked in the same way. The functions are not called,
    because there is no Spark session. Raises StreamDefinitionError or TransformError.
    """
    inputs = {source.id: None for source in stream.inputs}
    batch = BatchContext.of(stream.name, 0, stream.batch_interval_ms, 1)
    frames = {} if stream.state is None else dict.fromkeys(STATE_FRAMES)
    if stream.state is not None:
        _check_state(stream, stream.state, inputs, batch)
    for output in stream.outputs:
        transform = load_transform(stream, output)
        if transform is not None:
            arguments(transform, inputs, batch, frames)
        for function in output.functions:
            load_foreach(stream, output, function)


def _check_state(stream: Stream, state: State, inputs: Mapping[str, None], batch: BatchContext) -> None:
    # The same values as the update gets in a batch, see `headrace.spark.state.updating`.
    more = {"state": None}
    if state.window is not None:
        more["leaving"] = None
    if state.timeout is not None:
        more["timing_out"] = None
    arguments(load_function(stream, state.update, "state's update"), inputs, batch, more)
    if state.initial is not None:
        load_function(stream, state.initial, "state's initial table")


def apply_transform(
    transform: Transform | None,
    inputs: Mapping[str, DataFrame],
    outputs: Collection[str],
    batch: BatchContext,
    *,
    more: Mapping[str, Any] | None = None,
    known: Collection[str] | None = None,
) -> dict[str, DataFrame]:
    """The DataFrame of each output: the transform's result, or the only input if there is no transform.

    The transform gets its inputs as keyword arguments by their ids ("-" written as "_"). A single input is passed as
    the first argument if that parameter has another name. The transform returns one DataFrame for all outputs, or a
    mapping from output ids to DataFrames.

    Args:
        outputs: the ids of the outputs to return.
        more: further values, passed by name if the transform has such parameters.
        known: other ids that a returned mapping may have; None allows any.

    Raises:
        TransformError: the parameters do not fit the inputs, or the result does not fit the outputs.
    """
    if transform is None:
        (result,) = inputs.values()
        return dict.fromkeys(outputs, result)
    positional, keywords = arguments(transform, inputs, batch, more)
    returned = transform(*positional, **keywords)
    if isinstance(returned, Mapping):
        unknown = set() if known is None else set(returned) - {*known, *outputs}
        if unknown or not set(outputs) <= set(returned):
            raise TransformError(
                f"The transform returned DataFrames for {sorted(returned)}, the outputs are {sorted(outputs)}.",
                remedy="Return a DataFrame for each output's id, or one DataFrame for all.",
            )
        by_output = {name: returned[name] for name in outputs}
    else:
        by_output = dict.fromkeys(outputs, returned)
    for name, frame in by_output.items():
        _check_frame(name, frame)
    return by_output


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether the function has a parameter of this name; ``**keywords`` does not count."""
    return name in inspect.signature(function).parameters


def arguments(
    transform: Transform, inputs: Mapping[str, Any], batch: BatchContext, more: Mapping[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments for ``transform``; raises TransformError if its parameters do not fit.

    The values of ``more``, and ``batch``, are passed by name if it has such parameters. If an input has the same name,
    the input is passed.
    """
    signature = inspect.signature(transform)
    parameters = signature.parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {name.replace("-", "_"): frame for name, frame in inputs.items()}
    beside = {**(more or {}), "batch": batch}
    extra = {name: value for name, value in beside.items() if name in parameters and name not in named}
    positional: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {**named, **extra}
    first = next(iter(parameters.values()), None)
    if not takes_any and len(named) == 1 and first is not None and first.name not in {*named, *beside}:
        positional, keywords = tuple(named.values()), extra
    try:
        signature.bind(*positional, **keywords)
    except TypeError:
        raise TransformError(
            f"The transform takes ({', '.join(parameters)}), the stream's inputs are ({', '.join(named)}).",
            remedy="Name its parameters like the inputs' ids.",
        ) from None
    return positional, keywords


def _check_frame(output: str, frame: object) -> None:
    from pyspark.sql import DataFrame

    if not isinstance(frame, DataFrame):
        raise TransformError(
            f"The transform returned a {type(frame).__name__} for output {output!r}, not a DataFrame.",
            remedy="Return a DataFrame.",
        )


def _own_modules(transform_module: str, roots: list[Path]) -> list[ModuleType]:
    """The transform's module and all modules imported from ``py_files``, without headrace's and pyspark's."""
    modules = [sys.modules[transform_module]]
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file is not None and module not in modules and any(Path(file).is_relative_to(root) for root in roots):
            modules.append(module)
    return [module for module in modules if module.__name__.partition(".")[0] not in ("headrace", "pyspark")]


def _travel_by_value(module: ModuleType) -> None:
    from pyspark import cloudpickle

    if module.__name__ != "__main__":
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]


_DIGITS = 8
_UNKNOWN = "unknown"


def code_version(stream: Stream, steps: Iterable[str]) -> str:
    """The version of the code of these steps (`Stream.steps`): ``flights:to_document 3f9c2a10, headrace 0.1.0``.

    A function's hash covers its module and everything that the module imports, directly or indirectly, from
    ``spark.py_files`` or from its own package; it is "unknown" if there is no source to read. Only the packages that
    contain the module are imported.
    """
    roots = add_py_files(stream)
    references = dict.fromkeys(_references(stream, steps))
    versions = [f"{reference} {_hash(reference.partition(':')[0], roots)}" for reference in references]
    return ", ".join([*versions, f"headrace {headrace.__version__}"])


def tried_with(stream: Stream, steps: Iterable[str]) -> str:
    """A hash of what an attempt at these steps depends on besides its records: the stream's definition and the code.

    Steps that the stream no longer has are ignored, and so are the folders of ``spark.py_files``.
    """
    known = [step for step in steps if step in stream.steps]
    reported = f"{stream.without_folders.to_json()} {code_version(stream, known)}"
    return hashlib.sha256(reported.encode()).hexdigest()[:16]


def _references(stream: Stream, steps: Iterable[str]) -> Iterator[str]:
    for step in steps:
        if step == STATE_STEP:
            if stream.state is not None:
                yield stream.state.update
                yield from [stream.state.initial] if stream.state.initial is not None else []
            continue
        output = stream.output_of_step(step)
        transform = stream.transform_of(output)
        if transform is not None:
            yield transform
        yield from output.functions


def _hash(module: str, roots: Sequence[Path]) -> str:
    sources = _sources(module, roots)
    if module not in sources:
        return _UNKNOWN
    digest = hashlib.sha256()
    for name, source in sorted(sources.items()):
        digest.update(f"{name}\0{len(source)}\0".encode())
        digest.update(source)
    return digest.hexdigest()[:_DIGITS]


def _sources(module: str, roots: Sequence[Path]) -> dict[str, bytes]:
    """The source bytes of the module and of the user's modules that it imports, by module name."""
    sources: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in sources:
            continue
        spec = _spec_in(roots, name)
        if spec is None and name.partition(".")[0] == module.partition(".")[0]:
            spec = _installed(name)
        source = None if spec is None else _bytes(spec)
        if spec is None or source is None:
            continue
        sources[name] = source
        # A package's __init__ runs before its modules do.
        waiting += [parent for parent in [name.rpartition(".")[0]] if parent]
        waiting += _imported(source, name, is_package=spec.submodule_search_locations is not None)
    return sources


def _imported(source: bytes, module: str, *, is_package: bool) -> list[str]:
    """Every name that may be an imported module, from import statements anywhere in the source."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        # Not Python source, for example an extension module: only its bytes are hashed.
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, module, is_package=is_package)
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return names


def _base(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _spec_in(roots: Sequence[Path], name: str) -> importlib.machinery.ModuleSpec | None:
    """The module's spec in ``py_files`` (folders, files, archives); None if it is not there."""
    *parents, last = name.split(".")
    for root in roots:
        if root.suffix == ".py":
            if not parents and root.stem == last:
                return importlib.util.spec_from_file_location(name, root)
            continue
        finder: Any = pkgutil.get_importer(str(root.joinpath(*parents)))
        spec = None if finder is None else finder.find_spec(name)
        if spec is not None and spec.loader is not None:
            return spec  # type: ignore[no-any-return]
    return None


def _installed(name: str) -> importlib.machinery.ModuleSpec | None:
    module = sys.modules.get(name)
    if module is not None and getattr(module, "__spec__", None) is not None:
        return module.__spec__
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _bytes(spec: importlib.machinery.ModuleSpec) -> bytes | None:
    loader: Any = spec.loader
    if spec.origin is None or not hasattr(loader, "get_data"):
        return None
    try:
        return bytes(loader.get_data(spec.origin))
    except OSError:
        return None
