"""Draws the flowcharts of the pages as inline SVG, so that the site needs no script to show them.

Supports the part of Mermaid that the pages use: `flowchart LR` or `TD`, nodes with or without a quoted label, chains of
`-->`, and subgraphs, whose nodes are listed in a chain of `~~~`. GitHub draws the same text with Mermaid.
"""

import html
import itertools
import re
from dataclasses import dataclass, field

CHARACTER, HEIGHT, GAP = 7.3, 28, 18  # pixels: a letter of 12 px, a box, the space between ranks
PADDING, BESIDE, WIDEST = 14, 14, 690  # pixels: of a box, between boxes of a rank, of the column of text
NODE = re.compile(r'^(\w+)(?:\["([^"]*)"\])?$')


@dataclass
class Box:
    """A node, or a subgraph with the labels of its nodes."""

    label: str
    members: list[str] = field(default_factory=list)
    rank: int = 0
    x: float = 0
    y: float = 0

    @property
    def width(self) -> float:
        """Pixels."""
        return max(_wide(self.label), sum(_wide(each) + 8 for each in self.members) + 8 if self.members else 0)

    @property
    def height(self) -> int:
        """Pixels."""
        return 2 * HEIGHT + 10 if self.members else HEIGHT


def _wide(label: str) -> float:
    return len(label) * CHARACTER + PADDING


def drawn(text: str) -> str:
    """Return a flowchart as HTML. Raises ValueError for an unsupported line."""
    boxes, edges = _read(text)
    _rank(boxes, edges)
    across = "flowchart LR" in text
    width, height = _place(boxes, across)
    parts = [_edge(boxes[start], boxes[end], across) for start, end in edges]
    parts += [_box(box) for box in boxes.values()]
    arrow = '<marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    label = html.escape("; ".join(f"{boxes[start].label} to {boxes[end].label}" for start, end in edges))
    return (
        f'<div class="diagram"><svg role="img" aria-label="{label}" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}"><defs>{arrow}<path d="M0,0L8,4L0,8z"/></marker></defs>'
        f"{''.join(parts)}</svg></div>"
    )


def _read(text: str) -> tuple[dict[str, Box], list[tuple[str, str]]]:
    boxes: dict[str, Box] = {}
    edges: list[tuple[str, str]] = []
    within: dict[str, str] = {}  # the subgraph of a node
    group = ""

    def node(part: str) -> str:
        match = NODE.match(part.strip())
        if not match:
            raise ValueError(f"{part.strip()!r} is not a node that docs/diagrams.py supports")
        name, label = match.groups()
        if group:
            within[name] = group
            boxes[group].members.append(label or name)
        elif name not in within:
            box = boxes.setdefault(name, Box(name))
            box.label = label or box.label
        return within.get(name, name)

    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines[1:]:
        if line.startswith("subgraph "):
            name, label = NODE.match(line.removeprefix("subgraph ")).groups()  # type: ignore[union-attr]
            boxes.setdefault(name, Box(name)).label = label or name
            group = name
        elif line == "end":
            group = ""
        else:
            names = [node(part) for part in re.split(r"-->|~~~", line)]
            if "-->" in line:
                edges += itertools.pairwise(names)
    return boxes, edges


def _rank(boxes: dict[str, Box], edges: list[tuple[str, str]]) -> None:
    """Set the rank of each box to the length of the longest path to it, or before its successor if there is none."""
    for _ in boxes:
        for start, end in edges:
            boxes[end].rank = max(boxes[end].rank, boxes[start].rank + 1)
    for name, box in boxes.items():
        after = [boxes[end].rank for start, end in edges if start == name]
        if after and name not in {end for _, end in edges}:
            box.rank = min(after) - 1


def _place(boxes: dict[str, Box], across: bool) -> tuple[float, float]:
    """Place the boxes rank by rank, each rank centred, and return the size of the drawing."""
    ranks = [[box for box in boxes.values() if box.rank == rank] for rank in sorted({b.rank for b in boxes.values()})]
    rows = ranks if across else [row for rank in ranks for row in _wrapped(rank)]

    def along(box: Box) -> float:
        return BESIDE + (box.height if across else box.width)

    lengths = [sum(along(box) for box in row) for row in rows]
    position = 2.0
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        side = (max(lengths) - length + BESIDE) / 2
        for box in row:
            box.x, box.y = (position, side) if across else (side, position)
            side += along(box)
        last = index + 1 == len(rows) or rows[index + 1][0].rank != row[0].rank
        position += max(box.width if across else box.height for box in row) + (GAP if last else BESIDE)
    ends = position - GAP + 2
    # Room beside a chart for edges that pass over a rank.
    return (ends, max(lengths) + 60) if across else (max(lengths), ends)


def _wrapped(rank: list[Box]) -> list[list[Box]]:
    """Divide a rank that is too wide into rows."""
    rows: list[list[Box]] = [[]]
    for box in rank:
        if rows[-1] and sum(each.width + BESIDE for each in [*rows[-1], box]) > WIDEST:
            rows.append([])
        rows[-1].append(box)
    return rows


def _box(box: Box) -> str:
    def rectangle(x: float, y: float, width: float, height: float, label: str, kind: str = "") -> str:
        return (
            f'<rect{kind} x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="4"/>'
            f'<text x="{x + width / 2:.0f}" y="{y + HEIGHT / 2 + 4:.0f}">{html.escape(label)}</text>'
        )

    parts = [rectangle(box.x, box.y, box.width, box.height, box.label, ' class="group"' if box.members else "")]
    x = box.x + (box.width - sum(_wide(each) + 8 for each in box.members)) / 2 + 4
    for member in box.members:
        parts.append(rectangle(x, box.y + HEIGHT, _wide(member), HEIGHT, member))
        x += _wide(member) + 8
    return "".join(parts)


def _edge(start: Box, end: Box, across: bool) -> str:
    far = end.rank - start.rank > 1
    if across and far:  # below the boxes between
        x, y, ends = start.x + start.width / 2, start.y + start.height, end.x + end.width / 2
        low = y + 10 + 8 * (end.rank - start.rank)
        way = f"M{x:.0f},{y:.0f}C{x:.0f},{low:.0f} {ends:.0f},{low:.0f} {ends:.0f},{end.y + end.height:.0f}"
    elif across:
        y, ends = start.y + start.height / 2, end.y + end.height / 2
        way = f"M{start.x + start.width:.0f},{y:.0f}L{end.x:.0f},{ends:.0f}"
    else:
        # Straight down where the boxes overlap, else from the middle to the nearest edge.
        low, high = max(start.x, end.x) + 12, min(start.x + start.width, end.x + end.width) - 12
        x = (low + high) / 2 if low <= high else start.x + start.width / 2
        ends = min(max(x, end.x + 12), end.x + end.width - 12)
        way = f"M{x:.0f},{start.y + start.height:.0f}L{ends:.0f},{end.y:.0f}"
    return f'<path d="{way}" marker-end="url(#arrow)"/>'
