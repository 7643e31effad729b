"""The site builds strictly, loads nothing from other hosts, has every page, and matches the code."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import typer
import yaml
from conftest import ROOT

from zerolora.cli import app
from zerolora.config import known_keys
from zerolora.planner.cost import useful_flops

sys.path.append(str(ROOT / "docs"))
import diagrams
import predictions
import reference_pages
import site_hooks

DOCS = ROOT / "docs"
PEERS = (DOCS / "peers.md").read_text(encoding="utf-8")
LOADED = {
    "link": "href",
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "object": "data",
    "use": "href",
}
"""Elements whose address a browser loads without a click."""


class Page(HTMLParser):
    """The addresses that a page loads, its links, and its ids."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.classes: set[str] = set()
        self.ids: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag in LOADED and values.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(values.get(LOADED[tag], ""))
        self.loaded += re.findall(r"url\(([^)]+)\)", values.get("style", ""))
        if tag == "a":
            self.links.append(values.get("href", ""))
        self.classes |= set(values.get("class", "").split())
        self.ids.add(values.get("id", ""))


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_pages_load_nothing_from_other_hosts(site: Path, pages: dict[Path, Page]) -> None:
    assert len(pages) > 40
    for path, page in pages.items():
        assert [each for each in page.loaded if urlsplit(each).netloc] == [], path.name
        assert "mermaid" not in page.classes, path.name
    for path in site.rglob("*.css"):
        addresses = re.findall(r"url\(([^)]*)\)|@import ([^;]+)", path.read_text(encoding="utf-8"))
        assert [each for pair in addresses for each in pair if urlsplit(each.strip("\"' ")).netloc] == [], path.name
    for path in site.rglob("*.js"):
        text = re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        names = {"http://www.w3.org"}  # of XML, never loaded
        assert set(re.findall(r"[\"'`](https?://[\w.]+)", text)) - names == set(), path.name


def test_internal_links_lead_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    """In the built pages, with the theme's links; mkdocs checks only those of Markdown."""
    links = 0
    for path, page in pages.items():
        for address in [*page.links, *page.loaded]:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc or not address or path.name == "404.html":
                continue
            target = (path.parent / parts.path).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{path.relative_to(site)}: {address}"
            if parts.fragment and target in pages:
                assert parts.fragment in pages[target].ids, f"{path.relative_to(site)}: {address}"
            links += 1
    assert links > 1000


def test_links_have_the_titles_of_their_pages(site: Path) -> None:
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert re.findall(r"<a [^>]*>(?:<code>)?[\w./-]+\.md(?:</code>)?</a>", text) == [], path.name
    home = (site / "index.html").read_text(encoding="utf-8")
    assert '<a href="own-data.html">Your own model and data</a>' in home
    assert '<a href="gpu.html#checking-a-machine">Checking a machine</a>' in home


def test_broken_link_fails_the_build(tmp_path: Path) -> None:
    """A site of one page with the real settings. With --quiet, mkdocs would count no warnings."""
    assert re.search(r"mkdocs build --strict$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    (tmp_path / "docs").mkdir()
    small = {key: settings[key] for key in ("site_name", "validation", "markdown_extensions")}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(small), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    for text, code in (("# A", 0), ("# A\n[b](b.md)", 1), ("# A\n[b](#b)", 1)):
        (tmp_path / "docs/index.md").write_text(text, encoding="utf-8")
        assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == code, text


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r": ([\w/-]+\.md)$", text, re.MULTILINE))
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert named == written | set(site_hooks.ELSEWHERE.values()) | set(site_hooks.GENERATED)


def test_generated_blocks_are_filled(site: Path) -> None:
    """Their text is from the code, in the built page; the repository's page has a remark in its place."""
    shown = {
        "architecture": "src/zerolora/train/loop.py",
        "import": "<code>micro_batch_size</code>",
        "methods": "<code>fsdp_hybrid_offload</code>",
        "choice": "<th>collectives, for LoRA</th>",
        "scale": "<code>zero3_hpz</code></td>",
        "gpu": "zerolora check --config",
    }
    for page, text in shown.items():
        built = (site / f"{page}.html").read_text(encoding="utf-8")
        assert text in built, page
        assert "when the site is built: <code>make docs</code>" not in built, page
        assert "when the site is built: `make docs`" in (DOCS / f"{page}.md").read_text(encoding="utf-8"), page
    for name in (*predictions.FIGURES, "check"):
        assert (site / f"figures/{name}.svg").read_text(encoding="utf-8").rstrip().endswith("</svg>")


def test_terms_of_the_memory_figure_add_up() -> None:
    for method in ("lora", "full"):
        for strategy in predictions.SHARDING:
            gpu = predictions.planned("llama-3-8b", strategy, 1, method).prediction.gpu
            drawn = sum(gpu.get(term, 0) for terms in predictions.GROUPS.values() for term in terms)
            assert drawn == gpu["total"], (method, strategy)


def test_zero_page_matches_the_paper() -> None:
    """Bytes per parameter in the page's table: states of a fully trained 7B, N = 8."""
    text = (DOCS / "choice.md").read_text(encoding="utf-8")
    parameters = predictions.model_spec("llama-2-7b").parameters
    for strategy, bytes_each in (("zero1", 5.5), ("zero2", 3.75), ("zero3", 2.0)):
        states = predictions.planned("llama-2-7b", strategy, 1, "full").prediction.gpu["model_states"]
        assert states / parameters == pytest.approx(bytes_each, rel=0.01)
        assert re.search(rf"ZeRO-{strategy[-1]} \|.*\| {bytes_each:g} \|", text)
    trained = predictions.planned("llama-3-8b", "ddp", 1).spec.parameters(predictions.model_spec("llama-3-8b"))
    assert f"{trained.trained / 1e6:.0f}M of {trained.frozen / 1e6:,.0f}M" in text
    # FLOPs per token and weight in the cost model, without the adapters'.
    works = [predictions.planned("llama-3-8b", "ddp", 1, method).work for method in ("lora", "full")]
    lora, full = (useful_flops(work)["supervised_token"] / work.vocabulary / work.hidden for work in works)
    assert f"costs {full:g} FLOPs" in text and re.search(rf"A frozen one costs\s+{lora:g},", text)


@pytest.mark.parametrize("heading", reference_pages.REGISTRIES)
def test_registries_are_listed(heading: str, pages: dict[Path, Page], site: Path) -> None:
    folder = reference_pages.REGISTRIES[heading][0]
    actual = dict(reference_pages.entries(heading, folder))
    assert actual and all(text for text in actual.values())
    text = (site / "reference/registries.html").read_text(encoding="utf-8")
    assert [name for name in actual if f"<code>{name}</code>" not in text] == []


def test_interfaces_come_from_docstrings(site: Path) -> None:
    text = (site / "reference/interfaces.html").read_text(encoding="utf-8")
    assert "Two strategies of one engine are equal if their layout is equal" in text
    for name in reference_pages.INTERFACES.values():
        assert f'id="zerolora.{name}"' in text


def test_settings_and_options_are_in_the_reference(site: Path) -> None:
    settings = (site / "reference/settings.html").read_text(encoding="utf-8")
    for key in ("sequence_parallel", "checkpoint_minutes", "rank_stabilized"):
        assert f"<code>{key}</code>" in settings
    commands = (site / "reference/commands.html").read_text(encoding="utf-8")
    assert "<code>--max-sequence-length</code>" in commands and 'id="zerolora-push"' in commands


def test_diagrams_have_no_overlapping_boxes() -> None:
    for page in ("README.md", "docs/architecture.md"):
        text = site_hooks.MERMAID.search((ROOT / page).read_text(encoding="utf-8"))[1]
        svg = ET.fromstring(re.search(r"<svg.*</svg>", diagrams.drawn(text))[0])  # type: ignore[index]  # noqa: S314
        width, height = float(svg.attrib["width"]), float(svg.attrib["height"])
        boxes = [{key: float(rect.attrib[key]) for key in ("x", "y", "width", "height")} for rect in svg.iter("rect")]
        assert len(boxes) >= len(re.findall(r"\w+\[\"|^ +fetch", text, re.M)) > 0
        assert width < 760
        plain = [box for box in boxes if box["height"] <= diagrams.HEIGHT]
        for box in plain:
            assert 0 <= box["x"] <= width - box["width"] and 0 <= box["y"] <= height - box["height"]
        for one, other in combinations(plain, 2):
            before, after = (
                [a[key] + a[size] <= b[key] for key, size in (("x", "width"), ("y", "height"))]
                for a, b in ((one, other), (other, one))
            )
            assert any(before + after), (one, other)
    with pytest.raises(ValueError, match="is not a node"):
        diagrams.drawn("flowchart LR\n a{b} --> c\n")


def peer_rows() -> tuple[list[str], list[list[str]], dict[str, str]]:
    """Return the projects of the table of features, its rows, and the source of each row."""
    head, *rows = re.findall(
        r"^\| (?!\*\*|---)(.+) \|$", PEERS.split("legacy*")[1].split("## Sources")[0], re.MULTILINE
    )
    sources = dict(re.findall(r"^- \*\*(.+?)\*\*: ((?:.|\n  )+)", PEERS.split("## Sources")[1], re.MULTILINE))
    projects, *cells = ([cell.strip() for cell in row.split("|")] for row in (head, *rows))
    return projects[1:], cells, {feature: " ".join(source.split()) for feature, source in sources.items()}


def test_answers_about_peers_have_sources() -> None:
    (_, *peers), rows, sources = peer_rows()
    assert peers == ["axolotl", "LLaMA-Factory", "XTuner", "TRL", "ms-swift", "torchtune"] and len(rows) >= 30
    for feature, _, *answers in rows:
        if feature in ("users", "maintained"):
            continue
        source = sources[feature]
        for peer, answer in zip(peers, answers, strict=True):
            if answer not in ("not found", "no"):
                assert f"{peer} `" in source, f"{feature}: no source for {peer}"
            elif peer not in source:
                assert "the others" in source or answer == "no", f"{feature}: nothing was searched for of {peer}"
    assert len(sources) == len(rows)


ABSENT = {
    "reinforcement learning (GRPO, PPO)": r"grpo|ppo|rloo|reinforce",
    "rows with images": r"image|\bvision|multimodal",
    "tensor parallel training": r"tensor_parallel|\btp\b|autotp",
    "pipeline or expert parallel": r"pipeline_parallel|expert_parallel",
    "web interface": r"\bweb|\bui\b|studio",
    "tests on GPUs in its own CI": "^no name says so",
}
"""Features that this project lacks, and what their keys, entries and commands would be called."""


def test_our_answers_beside_peers_are_true() -> None:
    """Each names entries of registries, keys, commands, tests or files, and they exist; what we lack has no name."""
    keys = {key.dotted for key in known_keys.known()}
    names: dict[str, set[str]] = {}
    for heading, (folder, *_, settings) in reference_pages.REGISTRIES.items():
        for key in re.findall(r"`([\w.<>]+)`", settings):
            names[key] = {name for name, _ in reference_pages.entries(heading, folder)}
    commands = {f"zerolora {name}" for name in typer.main.get_command(app).commands}  # type: ignore[attr-defined]
    everything = {*keys, *commands, *set().union(*names.values())}

    def exists(evidence: str) -> bool:
        key, _, value = evidence.partition(": ")
        path, _, test = evidence.partition("::")
        if value:
            return value in names.get(key, ())
        if (ROOT / path).exists():
            return not test or f"\ndef {test}(" in (ROOT / path).read_text(encoding="utf-8")
        return evidence in keys | commands

    _, rows, sources = peer_rows()
    for feature, ours, *_ in rows:
        if ours == "no":
            assert not [name for name in everything if re.search(ABSENT[feature], name)], feature
        elif feature not in ("users", "maintained"):
            own = re.match(r"zerolora (`[^`]+`(?:, `[^`]+`)*)", sources[feature])
            assert own, f"{feature}: names nothing of this project"
            assert [each for each in re.findall("`([^`]+)`", own[1]) if not exists(each)] == [], feature
