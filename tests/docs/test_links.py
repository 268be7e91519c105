"""Links inside the project lead somewhere: files exist, and so do the headings they name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def links(document: Path) -> Iterator[str]:
    for match in LINK.finditer(FENCE.sub("", document.read_text())):
        if "://" not in match.group(1):
            yield match.group(1)


def anchors(document: Path) -> set[str]:
    titles = HEADING.findall(FENCE.sub("", document.read_text()))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_resolve(document: Path) -> None:
    broken = []
    for link in links(document):
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_document_is_reachable_from_the_readme() -> None:
    seen: set[Path] = set()
    unread = [ROOT / "README.md"]
    while unread:
        document = unread.pop()
        seen.add(document)
        targets = {(document.parent / link.partition("#")[0]).resolve() for link in links(document)}
        unread += [target for target in targets - seen if target.suffix == ".md" and target.exists()]
    fragments = ROOT / "docs" / "changes"
    missing = {path.relative_to(ROOT).as_posix() for path in DOCUMENTS if fragments not in path.parents}
    assert missing - {path.relative_to(ROOT).as_posix() for path in seen} == set()
