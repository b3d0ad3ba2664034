"""The documentation says what there is: its examples run, its tables are complete, its links lead somewhere."""

from __future__ import annotations

import ast
import configparser
import importlib
import json
import pkgutil
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
import yaml

import headrace
import headrace.stream
from headrace.errors import HeadraceError
from headrace.ledger.model import Model
from headrace.stream import (
    Backpressure,
    BatchTrigger,
    ColumnIds,
    ConsoleOutput,
    DeadLetterTopic,
    ElasticsearchOutput,
    ExecutorAllocation,
    ForeachBatchOutput,
    KafkaInput,
    KafkaOutput,
    KeyIds,
    Limits,
    LocalCopies,
    ParquetOutput,
    ReceiverInput,
    SparkSettings,
    Storage,
    Stream,
    Window,
)

ROOT = Path(__file__).resolve().parents[3]
# The pages of the root, of docs/ and of its folders.
OF_ROOT = [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")]
PAGES = [*OF_ROOT, *sorted((ROOT / "docs").rglob("*.md"))]


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def parsed_code(page: Path) -> Iterator[ast.Module]:
    """The Python of a page, also of blocks within lists. What the page leaves out of a call is ``**more`` here."""
    for block in re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE):
        yield ast.parse(re.sub(r"(?<=[(,\s])(?:\.\.\.|…)(?=\s*[,)])", "**more", textwrap.dedent(block)))


def calls_of_definitions(page: Path) -> Iterator[tuple[ast.Call, Any]]:
    """The calls that make a part of a stream's definition, with the class of the part."""
    for module in parsed_code(page):
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                part = getattr(headrace.stream, node.func.id, None)
                if hasattr(part, "model_fields"):
                    yield node, part


def is_complete(call: ast.Call) -> bool:
    """Whether all that the call names is in `headrace.stream`, and nothing is left out."""
    names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
    return names <= set(dir(headrace.stream))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_definitions_on_a_page_are_valid(page: Path) -> None:
    """Those that are shown as a whole. Of the others, their fields exist."""
    for call, part in calls_of_definitions(page):
        code = ast.unparse(call)
        assert {keyword.arg for keyword in call.keywords} <= {*part.model_fields, None}, code
        if is_complete(call):
            eval(code, dict(vars(headrace.stream)))  # noqa: S307 - our own documentation


def test_most_definitions_on_the_pages_are_shown_as_a_whole() -> None:
    calls = [call for page in PAGES for call, _ in calls_of_definitions(page)]
    assert len(calls) > 50
    assert sum(map(is_complete, calls)) > len(calls) / 2


def data_blocks(page: Path, language: str) -> list[str]:
    blocks = re.findall(rf"^ *```{language}\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for block in blocks]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_settings_on_a_page_can_be_read(page: Path) -> None:
    readers: dict[str, Callable[[str], Any]] = {
        "json": json.loads,
        "toml": tomllib.loads,
        "yaml": yaml.safe_load,
        "ini": configparser.ConfigParser().read_string,
    }
    for language, read in readers.items():
        for block in data_blocks(page, language):
            read(block)


def test_kafkas_client_knows_the_settings_of_the_log_ins() -> None:
    """Files are left out: they are those of the reader's machine. So is the callback, which headrace calls."""
    extras = [json.loads(block) for block in data_blocks(ROOT / "docs" / "guides" / "kafka-log-ins.md", "json")]
    assert len(extras) > 5
    for extra in extras:
        settings = {
            name: value for name, value in extra.items() if not name.endswith(".location") and name != "oauth_cb"
        }
        confluent_kafka.Consumer({**settings, "group.id": "documented"}).close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_page_is_in_the_list_of_its_folder(page: Path) -> None:
    lists = {ROOT / "docs" / "guides": "index.md", ROOT / "docs": "pages.md", ROOT: "README.md"}
    listed = page.parent / lists[page.parent]
    if page == listed == ROOT / "docs" / "guides" / "index.md":
        assert "(guides/index.md)" in (ROOT / "docs" / "pages.md").read_text()
    elif page == listed == ROOT / "docs" / "pages.md":
        assert "(docs/pages.md)" in (ROOT / "README.md").read_text()
    else:
        assert page == listed or f"({page.name})" in listed.read_text()


def test_airflow_reads_every_dag_file_of_the_documentation(tmp_path: Path) -> None:
    """It reads only files with both words in them."""
    file_utils = pytest.importorskip("airflow.utils.file")
    for code in (code for page in PAGES for code in code_blocks(page)):
        # Parts of a file are not tested.
        if "stream_dags(stream)" in code and "import stream_dags" in code:
            file = tmp_path / "example.py"
            file.write_text(code)
            assert file_utils.might_contain_dag(str(file), safe_mode=True), code


@pytest.mark.parametrize("page", ["first-stream.md", "install.md"])
def test_the_tutorials_have_the_readmes_code(page: str) -> None:
    (code,) = code_blocks(ROOT / "README.md")
    assert code in (ROOT / "docs" / page).read_text()


def test_the_readme_is_read_in_one_go() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_the_readmes_first_stream_is_a_dag_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("airflow")
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path / "airflow"))
    text = code_blocks(ROOT / "README.md")[0]
    assert len([line for line in text.splitlines() if line.strip()]) <= 20
    assert "airflow" in text.lower()
    file = tmp_path / "dags" / "orders.py"
    file.parent.mkdir()
    file.write_text(text)
    namespace = {"__file__": str(file), "__name__": "orders"}
    exec(compile(text, str(file), "exec"), namespace)  # noqa: S102 - our own documentation
    stream = namespace["stream"]
    assert isinstance(stream, Stream)
    assert stream.storage.url == str(tmp_path / "orders")
    assert [namespace[name].dag_id for name in ("receiver", "batches")] == ["orders_receiver", "orders_batches"]  # type: ignore[attr-defined]


def test_the_tutorials_transform_is_that_of_the_system_tests() -> None:
    transform = code_blocks(ROOT / "docs" / "first-stream.md")[1]
    assert transform.strip() in (ROOT / "tests" / "system" / "orders.py").read_text()


DEFINITION = "".join((ROOT / "docs" / f"{page}.md").read_text() for page in ("stream", "outputs", "receiving"))
"""The pages with the fields of a definition."""

EVERY_PART = [
    Stream,
    KafkaInput,
    ReceiverInput,
    ElasticsearchOutput,
    DeadLetterTopic,
    ConsoleOutput,
    ParquetOutput,
    KafkaOutput,
    ForeachBatchOutput,
    BatchTrigger,
    Window,
    KeyIds,
    ColumnIds,
    Backpressure,
    ExecutorAllocation,
    LocalCopies,
]


@pytest.mark.parametrize("model", EVERY_PART)
def test_every_field_is_documented(model: type) -> None:
    text = DEFINITION
    for field in model.model_fields:  # type: ignore[attr-defined]
        assert field == "kind" or f"`{field}`" in text or f"{field}=" in text, field


@pytest.mark.parametrize("model", [Storage, Limits, SparkSettings])
def test_every_field_is_documented_with_its_class(model: type) -> None:
    text = DEFINITION
    for field in model.model_fields:  # type: ignore[attr-defined]
        assert f"`{model.__name__}.{field}`" in text, field


def test_every_documented_field_exists() -> None:
    text = DEFINITION
    classes = {model.__name__: model for model in (Storage, Limits, SparkSettings)}
    for name, field in re.findall(r"`(Storage|Limits|SparkSettings)\.(\w+)`", text):
        assert field in classes[name].model_fields


def test_every_table_of_the_ledger_is_documented() -> None:
    text = (ROOT / "docs" / "ledger.md").read_text()
    reported = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert reported == set(Model.metadata.tables)


def test_every_documented_make_target_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"make (demo|wordcount|test|[a-z]+)\b(?=`|\n| KEEP)", page.read_text())) <= targets


def test_the_flights_dag_folder_is_found() -> None:
    from examples.demo.stack import dags_folder

    assert dags_folder() == ROOT / "dags"


def names_of(body: Sequence[ast.stmt], prefix: str = "") -> Iterator[str]:
    """The functions and classes of a file, with those inside classes as ``Class.method``."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from names_of(node.body, f"{prefix}{node.name}.")


def test_the_architecture_names_functions_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    links = re.findall(r"\]\(\.\./(plugins/headrace/[^)]+\.py)\)((?:[\s,]+`[A-Za-z_][\w.]*`)*)", text)
    assert len(links) > 60
    for file, named in links:
        names = re.findall(r"`([^`]+)`", named)
        assert names, f"{file} is linked without a function or class"
        unknown = set(names) - set(names_of(ast.parse((ROOT / file).read_text()).body))
        assert not unknown, f"{file} has no {', '.join(sorted(unknown))}"


def errors_of_the_package() -> dict[str, type[HeadraceError]]:
    """By name. Every file of the package with the word "Error" in a class's name is imported."""
    for module in pkgutil.walk_packages(headrace.__path__, "headrace."):
        file = Path(headrace.__path__[0], *module.name.split(".")[1:])
        source = file / "__init__.py" if module.ispkg else file.with_suffix(".py")
        if re.search(r"^class \w+Error\(", source.read_text(), re.MULTILINE):
            importlib.import_module(module.name)
    found, left = {"HeadraceError": HeadraceError}, [HeadraceError]
    while left:
        for kind in left.pop().__subclasses__():
            if kind.__module__.startswith("headrace."):
                found[kind.__name__] = kind
                left.append(kind)
    return found


def test_each_error_has_one_place_on_the_troubleshooting_page() -> None:
    pytest.importorskip("airflow")
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    places = re.findall(r'<a id="(\w+)"></a>`(\w+)`', text)
    assert [place for place in places if place[0] != place[1]] == []
    names = [name for name, _ in places]
    assert sorted(names) == sorted(errors_of_the_package())


def test_the_text_of_an_error_ends_with_its_place() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    for name, kind in errors_of_the_package().items():
        text = str(HeadraceError.__new__(kind, "x"))
        place = re.fullmatch(r"x \((docs/troubleshooting\.md)#(\w+)\)", text)
        assert place and place[2] == name, text
        assert (ROOT / place[1]).exists() and f'<a id="{name}"></a>' in page


def test_a_text_that_repeats_another_error_has_that_ones_place() -> None:
    from headrace.ledger.errors import SchemaError
    from headrace.operators.wal_spark_submit import BatchTaskError

    cause = SchemaError("It is old.", remedy="Bring it up to date.")
    assert str(BatchTaskError(f"The batch failed: {cause}")) == f"The batch failed: {cause}"
    of_several_lines = str(BatchTaskError("It failed:\nline 1\nline 2"))
    assert of_several_lines.splitlines()[-1] == "(docs/troubleshooting.md#BatchTaskError)"


def test_an_error_of_a_user_has_no_place() -> None:
    class ShopError(HeadraceError):
        """Of another package."""

    assert str(ShopError("The shop is closed.", remedy="Come back.")) == "The shop is closed. Come back."
