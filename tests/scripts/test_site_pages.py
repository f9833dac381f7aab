"""Links and anchors of all pages lead somewhere: mkdocs checks that too, where it is installed."""

import importlib.util
import re

import pytest

from tests.source_tree import REPOSITORY

_spec = importlib.util.spec_from_file_location("site_pages", REPOSITORY / "scripts" / "site_pages.py")
assert _spec is not None
assert _spec.loader is not None
site_pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(site_pages)

PAGES = [*(REPOSITORY / name for name in site_pages.ROOT_PAGES), *sorted((REPOSITORY / "docs").glob("*.md"))]


def anchors(page):
    """The slugs of a page's headings; those in blocks of code are none."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_anchor_leads_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link, anchor in re.findall(r"\]\((?![a-z]+:)([^)#\s]*)#?([^)\s]*)\)", text):
        target = (page.parent / link).resolve() if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


@pytest.mark.parametrize(
    ("page", "link", "target"),
    [
        ("docs/running.md", "data.md", "data.md"),
        ("docs/running.md", "../CONTRIBUTING.md", "contributing.md"),
        ("docs/running.md", "../configs/base.yml", "repository/configs/base.yml"),
        ("docs/library.md", "../examples", "repository/examples/index.md"),
        ("README.md", "docs/images/rampup.svg", "images/rampup.svg"),
        ("README.md", "LICENSE", "repository/LICENSE.txt"),
        ("README.md", "nothing.md", None),
        ("README.md", "../elsewhere", None),
    ],
)
def test_a_link_of_the_repository_has_its_place_on_the_site(page, link, target):
    assert site_pages.target_of(REPOSITORY / page, link) == target
