"""A hook of mkdocs.yml: what pages link to outside of docs/ becomes part of the site.

In the site, files of docs/ are at the top, and all others have their path in the repository.
Sources become pages that show them. So a link that works on a code host works in the site, and
`mkdocs build --strict` reports those that do not.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)\s#]+)")
LANGUAGES = {".cpp": "cpp", ".h": "cpp", ".py": "python"}


def linked(page: str, link: str) -> str | None:
    """The path in the repository of what a page of the repository links to, if it exists."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return path if (ROOT / path).is_file() else None


def in_site(path: str) -> str:
    """The path in the site of a file of the repository."""
    if Path(path).suffix in LANGUAGES:
        path += ".md"
    return path.removeprefix("docs/")


def file(path: str, config: MkDocsConfig) -> File:
    """A file of the repository, for the site."""
    if language := LANGUAGES.get(Path(path).suffix):
        source = (ROOT / path).read_text()
        text = f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n````{language}\n{source}````\n"
        return File.generated(config, in_site(path), content=text)
    return File.generated(config, in_site(path), abs_src_path=str(ROOT / path))


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the files that pages link to, and those that these link to."""
    pages = [f"docs/{page.src_uri}" for page in files.documentation_pages()]
    for page in pages:  # which grows
        for link in LINK.findall((ROOT / page).read_text()):
            path = linked(page, link)
            if path and files.get_file_from_path(in_site(path)) is None:
                files.append(file(path, config))
                if path.endswith(".md"):
                    pages.append(path)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between files of the repository into links between files of the site."""
    at = page.file.src_uri
    of_docs = page.file.generated_by is None
    source = f"docs/{at}" if of_docs else at

    def replaced(link: re.Match[str]) -> str:
        path = linked(source, link[1])
        return posixpath.relpath(in_site(path), posixpath.dirname(at) or ".") if path else link[1]

    return LINK.sub(replaced, markdown)
