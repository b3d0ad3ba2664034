"""The commands. Their libraries are in the extra `cli`, which `airflow` includes: executors need none of them."""

import sys
from importlib.util import find_spec

if find_spec("typer") is None:
    sys.exit(
        "Error: the libraries of headrace's commands are not installed. Install headrace[cli] or headrace[airflow]."
    )
