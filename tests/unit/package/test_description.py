"""The long description of the package: README.md for readers who do not have the repository."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
ADDRESS = "https://code.example/team/headrace"


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def metadata_of(build: ModuleType, **given: object) -> dict:
    metadata = {"version": "1.2.3", **given}
    build.ReleaseMetadata(str(ROOT), {}).update(metadata)
    return metadata


def test_a_link_to_a_file_becomes_absolute(build: ModuleType) -> None:
    text = "See [time](docs/time.md#late), [the log](docs/log.md) and [a picture](https://x.example/y)."
    assert build.links_for_readers_elsewhere(text, f"{ADDRESS}/blob/v1.2.3") == (
        f"See [time]({ADDRESS}/blob/v1.2.3/docs/time.md#late), [the log]({ADDRESS}/blob/v1.2.3/docs/log.md) "
        "and [a picture](https://x.example/y)."
    )


def test_without_an_address_a_link_to_a_file_becomes_text(build: ModuleType) -> None:
    text = "See [time](docs/time.md#late), [docs/log.md](docs/log.md), [below](#below) and [x](https://x.example/y)."
    assert build.links_for_readers_elsewhere(text, None) == (
        "See time (docs/time.md), docs/log.md, [below](#below) and [x](https://x.example/y)."
    )


def test_an_image_links_to_the_releases_file_or_is_left_out(build: ModuleType) -> None:
    """Without an address it is left out."""
    text = "Before ![a stream](docs/images/x.png) after"
    release = f"{ADDRESS}/blob/v1.2.3"
    absolute = f"Before ![a stream]({release}/docs/images/x.png?raw=true) after"
    assert build.links_for_readers_elsewhere(text, release) == absolute
    assert build.links_for_readers_elsewhere(text, None) == "Before  after"


@pytest.mark.parametrize("address", [ADDRESS, ADDRESS + "/", None])
def test_no_link_of_the_description_is_relative(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    if address is None:
        monkeypatch.delenv(build.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(build.VARIABLE, address)
    text = metadata_of(build)["readme"]["text"]
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert all(re.match("https?://|#", target) for target in targets)
    assert [target for target in targets if target.startswith(f"{ADDRESS}/blob/v1.2.3/")] or address is None


def test_the_urls_are_those_of_the_release(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.VARIABLE, ADDRESS)
    urls = metadata_of(build)["urls"]
    assert urls["Documentation"] == f"{ADDRESS}/tree/v1.2.3/docs"
    assert all(url.startswith(ADDRESS) for url in urls.values())


def test_a_package_without_an_address_names_none(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(build.VARIABLE, raising=False)
    assert metadata_of(build)["urls"] == {}
    assert metadata_of(build)["authors"] == []


@pytest.mark.parametrize(
    ("given", "authors"),
    [
        (ADDRESS, []),
        (f"Ada Lovelace ({ADDRESS}/)", [{"name": "Ada Lovelace"}]),
        (
            f"The headrace team <team@code.example> ({ADDRESS})",
            [{"name": "The headrace team", "email": "team@code.example"}],
        ),
    ],
)
def test_one_setting_gives_the_author_and_the_links(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, given: str, authors: list[dict[str, str]]
) -> None:
    monkeypatch.setenv(build.VARIABLE, given)
    metadata = metadata_of(build)
    assert metadata["authors"] == authors
    assert metadata["urls"]["Homepage"] == ADDRESS


def test_a_setting_of_another_form_is_refused(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.VARIABLE, "Ada Lovelace, code.example")
    with pytest.raises(ValueError, match="Its form is 'Name <mail>"):
        metadata_of(build)


def test_a_wheel_keeps_what_its_source_distribution_says(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(build.VARIABLE, raising=False)
    given = {"readme": {"text": "as released"}, "urls": {"Source": ADDRESS}, "authors": [{"name": "Ada"}]}
    assert metadata_of(build, **given) == {"version": "1.2.3", **given}
