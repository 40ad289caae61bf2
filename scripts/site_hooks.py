"""Hooks of mkdocs.yml: pages of the site that stand outside of docs/, and the links between all."""

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\s?)\((?![a-z]+:|#)([^()\s#]+)(#[^()\s]*)?\)")
CODE = re.compile(
    r"<(?P<kept>a|b|h\d|pre)\b.*?</(?P=kept)>"
    r"|<code>(?P<prefix>bs\.)?(?P<name>(?P<first>\w+)(?:\.\w+)?)(?:\([^<]*\))?</code>",
    re.S,
)
LOADED = re.compile(r"<script[^>]*>(?:(?!</script>).)*https?://.*?</script>", re.S)
WORDS = {"attribution", "check", "collect", "emit", "merge", "sites", "sweep"}
"""Public names that also mean other things, such as arguments: linked where they follow `bs.`."""


def outside() -> dict[str, str]:
    """Return `{path in the repository: path in the site}` of the files outside of docs/."""
    pages = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        pages[f"notebooks/{notebook.name}"] = f"notebooks/{notebook.name}"
    for card in sorted((ROOT / "models").glob("*/README.md")):
        pages[f"models/{card.parent.name}/README.md"] = f"models/{card.parent.name}.md"
    return pages


def public_names() -> set[str]:
    """Return `__all__` of the package, which is read and not imported."""
    tree = ast.parse((ROOT / "backbone_surgery" / "__init__.py").read_text())
    lists = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    return set(ast.literal_eval(lists[-1]))


PAGES = outside()
SOURCES = {page: source for source, page in PAGES.items()}
NAMES = public_names()


@event_priority(100)  # before mkdocs-jupyter, which looks for notebooks among the files
def on_files(files, config):
    """Add the pages that stand outside of docs/."""
    for source, page in PAGES.items():
        if source == page:
            file = File(page, str(ROOT), config.site_dir, config.use_directory_urls)
        else:
            file = File.generated(config, page, abs_src_path=str(ROOT / source))
        files.append(file)
    return files


def on_page_markdown(markdown, page, config, files):
    """Point links between files of the repository to the pages that they are in the site."""
    source = SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    folder = posixpath.dirname(page.file.src_uri) or "."
    if source in ("README.md", "CHANGELOG.md"):  # alone in their tabs
        page.meta["hide"] = ["navigation"]

    def in_site(match):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        target = PAGES.get(target, target.removeprefix("docs/"))
        return f"{match[1]}({posixpath.relpath(target, folder)}{match[3] or ''})"

    return LINK.sub(in_site, markdown)


def on_page_content(html, page, config, files):
    """Link public names to the API pages; mend notebooks, which are no Markdown."""
    if page.file.src_uri.endswith(".ipynb"):
        return with_anchors(LOADED.sub("", html), page.toc)

    def linked(match):
        first, name = match["first"], match["name"]
        if first not in NAMES or first[0] == "_" or (first in WORDS and not match["prefix"]):
            return match[0]
        optional = "" if name == first else "optional "  # not every attribute has an entry
        return f'<autoref {optional}identifier="backbone_surgery.{name}">{match[0]}</autoref>'

    return CODE.sub(linked, html)


def with_anchors(html, toc):
    """Give the headings of a notebook the anchors that its table of contents links to."""

    def flat(items):
        for item in items:
            yield item.id
            yield from flat(item.children)

    anchors = re.findall(r'<h\d id="([^"]*)"', html)
    for old, new in zip(anchors, flat(toc), strict=True):
        html = re.sub(rf'(<h\d id="|href="#){re.escape(old)}"', rf'\1{new}"', html, count=2)
    return html
