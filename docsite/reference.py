"""The reference pages of the site, generated from the source: modules, configuration, commands, the REST API."""

from __future__ import annotations

from collections.abc import Callable

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from docsite.commands import commands_page
from docsite.rest import rest_page
from headrace.get_provider_info import get_provider_info


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for name, page in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=page()))
    return files


def stream_page() -> str:
    """The classes of a definition."""
    from headrace import stream

    classes = sorted(name for name in stream.__all__ if name[0].isupper() and name[1].islower())
    text = "The classes of a stream's definition. [The definition of a stream](../stream.md) explains them.\n"
    first = [name for name in ("Stream", "KafkaInput", "ElasticsearchOutput") if name in classes]
    rest = [name for name in classes if name not in first and name != "Output"]
    return _page("headrace.stream", text, [f"headrace.stream.{name}" for name in (*first, *rest)])


def dags_page() -> str:
    """The DAG factories."""
    names = ("stream_dags", "receiver_dag", "batch_dag", "replay_dag")
    text = "Factories of DAGs. [Operators, sensors, DAGs](../operators.md) explains them.\n"
    return _page("headrace.dags", text, [f"headrace.dags.{name}" for name in names])


def listeners_page() -> str:
    """The base class of listeners, and their events."""
    from headrace import listeners

    first = ["StreamListener", "StatsReport", "StreamEvent", "BatchInfo"]
    names = [*first, *(name for name in listeners.__all__ if name not in first)]
    text = "The base class of listeners, and the events that they get. [Listeners](../listeners.md) explains them.\n"
    return _page("headrace.listeners", text, [f"headrace.listeners.{name}" for name in names])


def receiver_page() -> str:
    """The base class of custom receivers."""
    from headrace import receiver

    text = "The base class of custom receivers. [Custom receivers](../receivers.md) explains it.\n"
    return _page("headrace.receiver", text, [f"headrace.receiver.{name}" for name in receiver.__all__])


def of_provider(kind: str, title: str) -> Callable[[], str]:
    """A page of the modules that the provider's info names as ``kind``."""

    def page() -> str:
        modules = [name for group in get_provider_info()[kind] for name in group["python-modules"]]
        return _page(title, "[Operators, sensors, DAGs](../operators.md) explains them.\n", modules)

    return page


def testing_page() -> str:
    """The public test tools."""
    return _page("headrace.testing", "Test tools for packages that build on headrace.\n", ["headrace.testing"])


def configuration_page() -> str:
    """The options of Airflow's configuration, from the provider's info."""
    lines = ["# Configuration", ""]
    for section, entry in get_provider_info()["config"].items():
        lines += [
            f"Options of the section `[{section}]` of Airflow's configuration. Each can be set as an environment "
            f"variable `AIRFLOW__{section.upper()}__<OPTION>`.",
            "",
        ]
        for name, option in entry["options"].items():
            default = f"`{option['default']}`" if option["default"] not in (None, "") else "not set"
            example = f" Example: `{option['example']}`." if option["example"] else ""
            lines += [
                f"## `{name}`",
                "",
                option["description"],
                "",
                f"Type: {option['type']}. Default: {default}.{example} Since {option['version_added']}.",
                "",
            ]
    for entry in get_provider_info()["connection-types"]:
        lines += [f"## Connection type `{entry['connection-type']}`", "", "Fields of the connection's extra:", ""]
        lines += ["| field | meaning |", "| --- | --- |"]
        lines += [f"| `{name}` | {field['description']} |" for name, field in entry["conn-fields"].items()]
        lines += [""]
    return "\n".join(lines)


def _page(title: str, text: str, objects: list[str]) -> str:
    return f"# {title}\n\n{text}\n" + "\n".join(f"::: {name}\n" for name in objects)


PAGES: dict[str, Callable[[], str]] = {
    "commands": commands_page,
    "rest": rest_page,
    "configuration": configuration_page,
    "stream": stream_page,
    "dags": dags_page,
    "listeners": listeners_page,
    "receiver": receiver_page,
    "operators": of_provider("operators", "Operators"),
    "sensors": of_provider("sensors", "Sensors"),
    "testing": testing_page,
}
