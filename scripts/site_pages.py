"""A hook of mkdocs.yml: the pages at the repository's root, and the files that pages link to, become part of the site.

So a link such as ../maxtext_lite/train.py leads somewhere in the repository and on the site alike.
"""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""The pages at the root, and what they are called on the site."""
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def target_of(page: Path, link: str) -> str | None:
    """The path on the site of a page's link target; None: the site does not have it."""
    path = (page.parent / link).resolve()
    if not path.exists() or not path.is_relative_to(REPOSITORY):
        return None
    name = path.relative_to(REPOSITORY).as_posix()
    if name in ROOT_PAGES:
        return ROOT_PAGES[name]
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return f"repository/{name}/index.md" if path.is_dir() else f"repository/{name}" + ("" if path.suffix else ".txt")


def _on_the_site(page: Path) -> str:
    """A page's text with links to the site's own paths; dead links stay, and mkdocs reports them."""
    text = page.read_text(encoding="utf-8")
    return LINK.sub(lambda link: target_of(page, link[1]) or link[1], text)


def on_files(files, config):
    """Adds the pages of the root, and the files and directories that any page links to."""
    from mkdocs.structure.files import File

    for name, on_site in ROOT_PAGES.items():
        files.append(File.generated(config, on_site, content=_on_the_site(REPOSITORY / name)))
    pages = [*(REPOSITORY / name for name in ROOT_PAGES), *(REPOSITORY / "docs").glob("*.md")]
    linked = {
        (target_of(page, link), (page.parent / link).resolve())
        for page in pages
        for link in LINK.findall(page.read_text(encoding="utf-8"))
    }
    for target, path in sorted(
        (target, path) for target, path in linked if target and target.startswith("repository/")
    ):
        content = path.read_text(encoding="utf-8") if path.is_file() else _listing(config, files, path)
        if files.get_file_from_path(target) is None:
            files.append(File.generated(config, target, content=content))
    return files


def _listing(config, files, directory: Path) -> str:
    """A page of a directory's files, which it adds to the site."""
    from mkdocs.structure.files import File

    names = sorted(path.name for path in directory.iterdir() if path.is_file())
    for name in names:
        target = f"repository/{directory.name}/{name}"
        files.append(File.generated(config, target, content=(directory / name).read_text(encoding="utf-8")))
    return f"# {directory.name}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)


def on_page_markdown(markdown, page, config, files):
    """The page with its links to the repository changed to files on the site."""
    source = page.file.abs_src_path
    return _on_the_site(Path(source)) if source and Path(source).is_relative_to(REPOSITORY / "docs") else markdown
