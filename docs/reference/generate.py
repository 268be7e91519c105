"""Writes the reference pages that come from docstrings; `--check` only compares. Run from anywhere."""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from pathlib import Path

from wbridge import config, errors, settings

FOLDER = Path(__file__).parent
ALWAYS = (errors.WBridgeError, Exception)


SETTINGS_HEAD = """\
# Settings

All settings are fields of `wbridge.Config`. The first source that has a value wins: arguments, then the
variable `WBRIDGE_` + the name in capitals, then a TOML file (`wbridge config --toml`), then the default.
Lists are separated by commas in variables. `wbridge config` shows the values here and where each comes from.

Job-wide settings are decided by the coordinator, and every worker adopts them.

| setting | default | unit | job-wide | meaning |
|---|---|---|---|---|
"""

VARIABLES_HEAD = """
| variable | meaning |
|---|---|
"""

ERRORS_HEAD = """\
# Errors

Every error that wbridge raises on purpose is a `WBridgeError`. A message says what happened, to whom, and
what to do.

| error | is also | meaning |
|---|---|---|
"""


def settings_page() -> str:
    """Return the table of all settings: names, defaults and units from the code, meanings from docstrings."""
    meanings = docstrings(ast.parse(inspect.getsource(config.Config)))
    page = SETTINGS_HEAD
    for row in settings.describe(config.Config(), {}):
        scope = "yes" if row.name in config.JOB_WIDE else ""
        value = f"`{row.value}`" if row.value else "empty"
        page += f"| `{row.name}` | {value} | {row.unit} | {scope} | {meanings[row.name]} |\n"
    page += VARIABLES_HEAD
    return page + "".join(f"| `{name}` | {text} |\n" for name, text in settings.ENVIRONMENT_ONLY.items())


def errors_page() -> str:
    """Return the table of all public errors with the first paragraph of their docstrings."""
    page = ERRORS_HEAD
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.WBridgeError):
            bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__ if base not in ALWAYS)
            meaning = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
            page += f"| `{name}` | {bases} | {meaning} |\n"
    return page


def docstrings(module: ast.Module) -> dict[str, str]:
    """Return the string below each annotated field of the first class."""
    body = module.body[0].body if isinstance(module.body[0], ast.ClassDef) else []
    texts = {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            texts[ast.unparse(field.target)] = ast.literal_eval(below.value).replace("\n", " ")
    return texts


PAGES = {"settings.md": settings_page, "errors.md": errors_page}


def main(arguments: list[str]) -> int:
    """Write the pages, or with `--check` return 1 and name those that are out of date."""
    stale = [name for name, page in PAGES.items() if (FOLDER / name).read_text() != page()]
    if "--check" in arguments:
        print(f"out of date: {', '.join(stale)}; run docs/reference/generate.py" if stale else "up to date")
        return 1 if stale else 0
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
