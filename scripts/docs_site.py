"""What `mkdocs.yml` needs beside the pages in docs/: the pages are written for a code host, where links lead to any file.

A file of the repository that a page links to is a page of the site, below `repository/`: Markdown as it is, the rest as code.
The quickstart is that of the README. Nothing here knows which pages there are.
"""

from __future__ import annotations

import pathlib
import posixpath
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
QUICKSTART = "Ten lines to the first token"
QUICKSTART_LINK = "README.md#ten-lines-to-the-first-token"
PICTURES = (".png", ".svg", ".jpg")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".service": "ini", ".conf": "ini"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the quickstart and, one after the other, all files that pages link to."""
    files.append(File.generated(config, "quickstart.md", content=quickstart((ROOT / "README.md").read_text())))
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages() if not file.generated_by]
    waiting += ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        uri = site_uri(path)
        if path.endswith(PICTURES):
            if not path.startswith("docs/"):
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
        elif files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, content=as_page(path)))
        if path.endswith(".md"):
            new = {target for target in linked_files(path) if target not in seen}
            seen |= new
            waiting += sorted(new)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return LINK.sub(lambda link: site_link(link[0], page.file.src_uri), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return re.sub(r"<code>(--[\w-]+)</code>", r'<code class="option">\1</code>', html)


def quickstart(readme: str) -> str:
    section = readme.split(f"\n## {QUICKSTART}\n", 1)[1].split("\n## ", 1)[0]
    return f"# Quickstart\n{section}"


def as_page(path: str) -> str:
    """A file of the repository as Markdown."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    name = pathlib.PurePath(path)
    language = "dockerfile" if name.name.startswith("Dockerfile") else LANGUAGES.get(name.suffix, "text")
    return f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n```` {language}\n{text.rstrip()}\n````\n"


def linked_files(path: str) -> list[str]:
    """Files of the repository that a page of it links to."""
    targets = LINK.findall((ROOT / path).read_text())
    found = [repository_path(target, path) for target in targets if not is_elsewhere(target)]
    return [target for target in found if (ROOT / target).is_file()]


def is_elsewhere(target: str) -> bool:
    return target.startswith(("#", "http:", "https:", "mailto:"))


def repository_path(target: str, page: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target.split("#", 1)[0]))


def site_uri(path: str) -> str:
    """Where a file of the repository is in the site's sources."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith((".md", *PICTURES)) else f"repository/{path}.md"


def source_of(uri: str) -> str:
    """The file of the repository that a page of the site was made from."""
    if uri == "quickstart.md":
        return "README.md"
    return uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"


def site_link(target: str, uri: str) -> str:
    """A link of the page at `uri`, as written for the repository, to where it leads in the site."""
    if is_elsewhere(target):
        return target
    path = repository_path(target, source_of(uri))
    anchor = target[len(target.split("#", 1)[0]) :]
    if path + anchor == QUICKSTART_LINK:
        there, anchor = "quickstart.md", ""
    elif (ROOT / path).is_dir():
        there = site_uri("README.md")  # where the tree is
    else:
        there = site_uri(path)
    return posixpath.relpath(there, posixpath.dirname(uri) or ".") + anchor
