"""The executors of a receiver job on a cluster: what Spark's own pages say of them, and their processes."""

from __future__ import annotations

import itertools
import json
import urllib.request
from typing import Any

import psutil

from headrace.devstack.state import living_processes


def executors(application: Any) -> dict[str, dict[str, Any]]:
    """What Spark's own pages say of the executors that live, by id."""
    attributes = application.job().attributes
    url = f"{attributes['ui_url']}/api/v1/applications/{attributes['application_id']}/executors"
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - the driver's own page
        return {each["id"]: each for each in json.load(answer) if each["id"] != "driver" and each["isActive"]}


def running(application: Any) -> dict[str, int]:
    """Tasks that run, by executor; it may be a while until Spark's pages have a task that has just begun."""
    return {number: each["activeTasks"] for number, each in executors(application).items()}


def process_of(application: Any, executor_id: str) -> psutil.Process:
    """The JVM of an executor; whose it is stands on its command line."""
    named = {"--app-id": application.job().attributes["application_id"], "--executor-id": executor_id}
    for process in living_processes():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        options = dict(itertools.pairwise(command))
        if all(options.get(option) == value for option, value in named.items()):
            return process
    raise AssertionError(f"there is no executor {executor_id}")
