"""Adds pages of other folders, pages generated from the code, and linked files to the site of `make docs`.

mkdocs calls the functions named on_… (mkdocs.yml, hooks).
"""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

import check_table
import import_table
import method_table
import model_table
import module_table
import predictions
import reference_pages
import stage_table
import target_table
from diagrams import drawn
from markdown.extensions.toc import slugify
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent

ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "config/README.md": "config.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Pages of the repository outside docs/, and their paths in the site."""

GENERATED = {
    "reference/settings.md": reference_pages.settings,
    "reference/commands.md": reference_pages.commands,
    "reference/registries.md": reference_pages.registries,
    "reference/interfaces.md": reference_pages.interfaces,
    "measurements.md": reference_pages.measurements,
}
"""Pages made from the code and from the results, and the functions that return their Markdown."""

FILLED = (
    module_table.written,
    stage_table.written,
    import_table.written,
    method_table.written,
    target_table.written,
    model_table.written,
    predictions.written,
    check_table.written,
)
"""Functions that fill the marked blocks of a page from the code."""

COPIED = "files/"
"""Folder of the site for linked files elsewhere in the repository."""

LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
PATH = re.compile(r"\[`?[\w./-]+\.md`?\]\(([^)\s#:]*)(?:#([^)\s]*))?\)")
"""A link whose text is the path of a page, which says little on the site."""
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
REMOTE = re.compile(r"https://(unpkg\.com|api\.github\.com|gitlab\.com)/")
MARK = re.compile(r"^(<!--.*-->)$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of other folders and the generated ones, and every file of the repository that a page links to."""
    for source, page in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for page, make in GENERATED.items():
        files.append(File.generated(config, page, content=make()))
    files.append(File.generated(config, "figures/check.svg", content=check_table.picture()))
    for name, figure in predictions.FIGURES.items():
        files.append(File.generated(config, f"figures/{name}.svg", content=predictions.drawn(figure)))
    pages = list(files.documentation_pages())
    while pages:
        reading = pages.pop()
        for match in LINK.finditer(reading.content_string):
            target = repository_path(reading.src_uri, match[2])
            path = site_path(target)
            if path.startswith(COPIED) and (ROOT / target).is_file() and path not in files.src_uris:
                added = File.generated(config, path, content=(ROOT / target).read_bytes())
                files.append(added)
                pages += [added] if added.is_documentation_page() else []
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Fill the generated blocks, point links into the site, name pages by their titles, draw diagrams, and add the
    blank lines that Markdown needs around marks."""
    here = page.file.src_uri
    for fill in FILLED:
        markdown = fill(markdown)

    def link(match: re.Match[str]) -> str:
        target = site_path(repository_path(here, match[2]))
        return f"{match[1]}{relpath(target, dirname(here) or '.')}{match[3] or ''}{match[4]}"

    def named(match: re.Match[str]) -> str:
        target = site_path(repository_path(here, match[1])) if match[1] else here
        found = files.get_file_from_path(target)
        title = found and title_of(found, config["nav"], match[2])
        return match[0].replace(match[0].partition("](")[0], f"[{title}", 1) if title else match[0]

    markdown = PATH.sub(named, markdown)
    markdown = MERMAID.sub(lambda match: drawn(match[1]), markdown)
    return MARK.sub(r"\n\1\n", LINK.sub(link, markdown))


def title_of(page: File, nav: Any, heading: str | None) -> str | None:
    """Return the title of a page: of the heading that a link leads to, or else in the navigation, or else its own."""
    headings = {slugify(re.sub(r"[`*]", "", each), "-"): each for each in HEADING.findall(page.content_string)}
    return headings.get(heading or "") or titles(nav).get(page.src_uri) or next(iter(headings.values()), None)


def titles(nav: Any) -> dict[str, str]:
    """Return the titles of the pages in the navigation by their paths."""
    result: dict[str, str] = {}
    for entry in nav:
        for title, below in entry.items():
            result |= {below: title} if isinstance(below, str) else titles(below)
    return result


def on_post_build(config: Any) -> None:
    """Remove from the theme's script the addresses of parts that these pages do not use: Mermaid, a polyfill for old
    browsers, and figures of a repository."""
    for script in Path(config["site_dir"], "assets/javascripts").rglob("*.js"):
        text = script.read_text(encoding="utf-8")
        script.write_text(REMOTE.sub("about:blank#", text), encoding="utf-8")


def repository_path(page: str, link: str) -> str:
    """Return the path in the repository that a page's link names."""
    source = next((path for path, where in ELSEWHERE.items() if where == page), f"docs/{page}")
    if page.startswith(COPIED):
        source = page.removeprefix(COPIED)
    path = normpath(join(dirname(source), link))
    return f"{path}/README.md" if (ROOT / path / "README.md").is_file() else path


def site_path(path: str) -> str:
    """Return the path of a repository file in the site, relative to docs/."""
    if path in ELSEWHERE:
        return ELSEWHERE[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{COPIED}{path}"
