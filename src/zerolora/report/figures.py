"""The charts of a run's page: accuracy, loss, step time, load, lengths of rows, memory of every strategy."""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import isfinite
from pathlib import Path
from typing import Any

from zerolora.report.charts import PALETTE, Chart, category, loss_axis, number, rule_at_pointer, thinned
from zerolora.train.objectives.objective import Objective
from zerolora.units import GIB

PARTS = ("forward", "backward", "communication", "optimizer", "data", "between")
"""Parts of a step's time, as in telemetry.csv."""
NOT_TERMS = ("total", "needed", "model_states", "peak_phase")
"""Keys of a prediction that are not terms."""

SOURCE, SOURCE_VALIDATION = "loss.", "loss_validation."
"""Before a data source's name, a column of loss.csv."""


def scores(
    difference: Mapping[str, float], groups: Sequence[str], name: str, title: str, metric: str = "accuracy"
) -> Chart:
    """Return the accuracies of both models with their 95 % intervals, for these groups of rows; "" is all rows."""
    rows: list[dict[str, Any]] = []
    for group in groups:
        prefix = f"{group}." if group else ""
        for model, field in (("base", f"base_{metric}"), ("fine-tuned", metric)):
            value, low, high = (difference[f"{prefix}{field}{end}"] for end in ("", "_low", "_high"))
            rows.append({"group": group_name(group), "model": model, "accuracy": value, "low": low, "high": high})
    several = len(groups) > 1
    scale = {"domain": ["base", "fine-tuned"], "range": [PALETTE[1], PALETTE[0]]}
    x = {"title": "accuracy", "scale": {"domain": [0, 1]}, "axis": {"format": "%", "grid": True}}
    spec = {
        "height": (34 if several else 30) * (len(groups) if several else 2),
        "data": {"values": rows},
        "encoding": {
            "y": {"field": "group" if several else "model", "sort": None, "title": None, "type": "nominal"},
            **({"yOffset": {"field": "model", "sort": None}} if several else {}),
            "color": {"field": "model", "scale": scale, "type": "nominal"} | ({} if several else {"legend": None}),
            "tooltip": [
                {"field": "group", "title": "rows"},
                {"field": "model"},
                *(number(field, format=".1%") for field in ("accuracy", "low", "high")),
            ],
        },
        "layer": [
            {
                "mark": {"type": "rule", "strokeWidth": 3},
                "encoding": {"x": number("low", **x), "x2": {"field": "high"}},
            },
            {"mark": {"type": "point", "size": 90}, "encoding": {"x": number("accuracy", **x)}},
        ],
    }
    gains = [row["accuracy"] - base["accuracy"] for base, row in zip(rows[::2], rows[1::2], strict=True)]
    summary = "Lines are Wilson's 95 % intervals." + (
        f" The difference is {100 * min(gains):+.1f} to {100 * max(gains):+.1f} points." if several else ""
    )
    return Chart(name, title, summary, spec)


def group_name(group: str) -> str:
    """Return the title of a group of difference.json; "" is the group of all rows."""
    if lengths := re.fullmatch(r"prompt_tokens_(\d+)_(\d+)", group):
        least, most = lengths.groups()
        return f"prompts of {least} tokens" if least == most else f"prompts of {least} to {most} tokens"
    return group or "all rows"


def learning_curves(table: Path, objective: Objective) -> list[Chart]:
    """Return the loss and other metrics of an objective by step, in training and validation, from loss.csv."""
    units = {"loss": objective.loss_unit, **{name: f"per {unit}" for name, unit in objective.metrics.items()}}
    read = _read(table)
    known = [(name, unit) for name, unit in units.items() if any(name in row for row in read)]
    return [*(_learning_curve(read, name, unit) for name, unit in known), *_of_sources(read, objective)]


def _of_sources(read: list[dict[str, float]], objective: Objective) -> list[Chart]:
    """Return the loss of each data source by step, in training and validation; empty for a single source."""
    # A source may be held out as a whole, and so have a loss in validation alone.
    prefixes = (SOURCE, SOURCE_VALIDATION)
    sources = sorted({name.partition(".")[2] for row in read for name in row if name.startswith(prefixes)})
    if not sources:
        return []
    rows: list[dict[str, Any]] = []
    ends = []
    for source in sources:
        trained, validated = (
            [{"step": row["step"], "loss": row[name]} for row in read if (name := f"{prefix}{source}") in row]
            for prefix in prefixes
        )
        # Vega reads a dot in a field's name as a path, so no field is named after a source.
        for split, line in (("training", thinned(trained)), ("validation", validated)):
            rows += [{"step": row["step"], "series": source, "split": split, "value": row["loss"]} for row in line]
        shown = [f"{trained[0]['loss']:.4g}, {trained[-1]['loss']:.4g}"] if trained else []
        shown += [f"validation {validated[-1]['loss']:.4g}"] if validated else []
        ends.append(f"{source} {', '.join(shown)}")
    encoding = {
        "x": number("step", axis={"tickMinStep": 1}, scale={"nice": False}),
        "y": loss_axis((row["value"] for row in rows), f"loss {objective.loss_unit}".strip()),
        "color": category("series", sort=sources),
        "tooltip": [
            *({"field": field, "title": title} for field, title in (("series", "source"), ("split", "rows"))),
            {"field": "step"},
            {"field": "value", "title": "loss"},
        ],
    }
    marks = {"training": {"type": "line"}, "validation": {"type": "point", "size": 70}}
    layers = [
        {"transform": [{"filter": f"datum.split == '{split}'"}], "mark": mark, "encoding": encoding}
        for split, mark in marks.items()
    ]
    summary = f"First and last loss in training: {'; '.join(ends)}." + _thinning(read)
    return [Chart("sources-curve", "Loss of each source.", summary, {"data": {"values": rows}, "layer": layers})]


def _learning_curve(read: list[dict[str, float]], name: str, unit: str) -> Chart:
    trained = [{"step": row["step"], name: row[name]} for row in read if name in row]
    key = f"{name}_validation"
    validated = [{"step": row["step"], name: row[key]} for row in read if key in row]
    rows: list[dict[str, Any]] = [
        {"step": row["step"], "series": series, "value": row[name]}
        for series, own in (("training", thinned(trained)), ("validation", validated))
        for row in own
    ]
    heading = name.replace("_", " ")
    names = ["training", "validation"] if validated else ["training"]
    colour = category("series", scale={"domain": names, "range": list(PALETTE[:2])})
    encoding = {
        "x": number("step", axis={"tickMinStep": 1}, scale={"nice": False}),
        "y": loss_axis((row["value"] for row in rows), f"{heading} {unit}".strip()),
        "color": colour if validated else colour | {"legend": None},
    }
    points = {"transform": [{"filter": "datum.series == 'validation'"}], "mark": {"type": "point", "size": 70}}
    spec = {
        "data": {"values": rows},
        "layer": [{"mark": "line", "encoding": encoding}, {**points, "encoding": encoding}],
    }

    def at(row: Mapping[str, float]) -> str:
        return f"{row[name]:.4g} at step {row['step']:.0f}"

    summary = f"Training: {at(trained[0])}, {at(trained[-1])}."
    if validated:
        summary += f" Validation: {at(validated[-1])}."
    title = f"{heading[0].upper()}{heading[1:]}."
    return Chart(f"{name}-curve", title, summary + _thinning(trained), spec, rule_at_pointer("step", "step", names))


def step_times(table: Path) -> list[Chart]:
    """Return the parts of each step's time, and the tokens/s, from telemetry.csv; empty if it has no times."""
    read = [row for row in _read(table) if "seconds" in row]
    if not read:
        return []
    rows = thinned([{name.removesuffix("_seconds"): value for name, value in row.items()} for row in read])
    parts = [part for part in PARTS if any(row.get(part) for row in rows)]
    long = [
        {"step": row["step"], "series": part, "value": row.get(part, 0), "order": order}
        for row in rows
        for order, part in enumerate(parts)
    ]
    sums = {part: sum(row.get(f"{part}_seconds", 0) for row in read) for part in parts}
    whole = sum(sums.values())
    shares = ", ".join(f"{part} {sums[part] / whole:.1%}" for part in sorted(parts, key=lambda part: -sums[part]))
    step = number("step", axis={"tickMinStep": 1}, scale={"nice": False})
    stacked = {
        "data": {"values": long},
        "layer": [
            {
                "mark": {"type": "area", "opacity": 0.9},
                "encoding": {
                    "x": step,
                    "y": number("value", title="seconds of a step", stack=True),
                    "order": {"field": "order"},
                    "color": category("series", scale={"domain": parts}),
                },
            }
        ],
    }
    rates = [{"step": row["step"], "series": "tokens/s", "value": row["tokens_per_second"]} for row in rows]
    line = {
        "height": 130,
        "data": {"values": rates},
        "layer": [{"mark": "line", "encoding": {"x": step, "y": number("value", title="tokens/s")}}],
    }
    values = sorted(row["tokens_per_second"] for row in read)
    middle = f"Median of all steps: {values[len(values) // 2]:,.4g}; least {values[0]:,.4g}, most {values[-1]:,.4g}."
    hover = rule_at_pointer("step", "step", parts, "s")
    return [
        Chart("step-times", "Time of a step, by part.", f"Of all steps: {shares}.{_thinning(read)}", stacked, hover),
        Chart("tokens", "Tokens per second.", middle, line, rule_at_pointer("step", "step", ["tokens/s"])),
    ]


def load(table: Path) -> list[Chart]:
    """Return the load of CPUs and GPU, and the memory in use, over time, from telemetry.csv. Unmeasured quantities have
    no chart."""
    read = [row for row in _read(table) if "seconds" in row]
    ends = accumulate(row["seconds"] + row.get("between_seconds", 0) for row in read)
    rows = thinned([row | {"minutes": end / 60} for row, end in zip(read, ends, strict=True)])
    charts: list[tuple[str, str, dict[str, tuple[str, float]], str]] = [
        ("load", "Utilisation.", {"CPU": ("cpu_percent", 1), "GPU": ("gpu_percent", 1), "MFU": ("mfu", 0.01)}, "%"),
        ("held", "Memory in use.", {"host": ("host_memory_bytes", GIB), "GPU": ("gpu_memory_bytes", GIB)}, "GiB"),
    ]
    return [chart for each in charts for chart in _over_time(rows, *each)]


def _over_time(
    rows: list[dict[str, float]], name: str, title: str, columns: Mapping[str, tuple[str, float]], unit: str
) -> list[Chart]:
    series = [key for key, (column, _) in columns.items() if any(column in row for row in rows)]
    if not series:
        return []
    long: list[dict[str, Any]] = [
        {"minutes": row["minutes"], "series": key, "value": row[columns[key][0]] / columns[key][1]}
        for key in series
        for row in rows
        if columns[key][0] in row
    ]
    scale = {"domain": [0, 100]} if unit == "%" else {}
    colour = category("series", scale={"domain": series})
    spec = {
        "height": 150,
        "data": {"values": long},
        "layer": [
            {
                "mark": "line",
                "encoding": {
                    "x": number("minutes", title="minutes of training"),
                    "y": number("value", title=unit, scale=scale),
                    "color": colour if len(series) > 1 else colour | {"legend": None},
                },
            }
        ],
    }
    means = []
    for key in series:
        values = [row["value"] for row in long if row["series"] == key]
        means.append(f"{key}: mean {sum(values) / len(values):.3g} {unit}, most {max(values):.3g} {unit}")
    hover = rule_at_pointer("minutes", "minutes", series, unit, ".3~g")
    return [Chart(name, title, "; ".join(means) + ", of rank 0's node and device.", spec, hover)]


def memory_bars(estimate: Mapping[str, Any], where: str, chosen: str, rendered: float, measured: float | None) -> Chart:
    """Return the predicted memory of every strategy, stacked by term, against the capacity.

    `where` is "gpu" or "host". `rendered` is the prediction for the rendered run, with strategy `chosen`; `measured` is
    the run's peak. Both are in bytes.
    """
    entries = estimate["strategies"]
    terms = {name for entry in entries for name, size in entry[where].items() if name not in NOT_TERMS and size > 0}
    # Without negative terms: activations may use memory that is counted for gradients (memory/gpu.py).
    ordered = sorted(terms, key=lambda term: (-max(entry[where][term] for entry in entries), term))
    rows = [
        {
            "strategy": entry["strategy"],
            "term": term.replace("_", " "),
            "GiB": entry[where][term] / GIB,
            "order": order,
            "fits": bool(entry["fits"]),
        }
        for entry in entries
        for order, term in enumerate(ordered)
        if entry[where][term] > 0
    ]
    points = {"◇ predicted as rendered": rendered} | ({"◆ measured": measured} if measured else {})
    ends = {
        entry["strategy"]: sum(max(0, size) for name, size in entry[where].items() if name not in NOT_TERMS) / GIB
        for entry in entries
    }
    has_bar = chosen in ends  # a user's own DeepSpeed JSON has none
    if has_bar:
        ends[chosen] = max(ends[chosen], *(value / GIB for value in points.values()))
    notes = [
        {"strategy": entry["strategy"], "end": ends[entry["strategy"]], "note": note}
        for entry in entries
        if (note := "chosen" if entry["strategy"] == chosen else "" if entry["fits"] else "cannot run")
    ]
    is_chosen = f"datum.value == {json.dumps(chosen)}"
    capacity = estimate["capacity"][where]
    per = "host" if where == "host" else "GPU" if capacity else "rank"
    axis = {"labelFontWeight": {"condition": {"test": is_chosen, "value": "bold"}, "value": "normal"}}
    y = category("strategy", sort=None, title=None, axis=axis)
    layers = [
        {
            "data": {"values": rows},
            "mark": "bar",
            "encoding": {
                "y": y,
                "x": number("GiB", title=f"GiB per {per}", axis={"grid": True}),
                "color": category("term", scale={"domain": [term.replace("_", " ") for term in ordered]}),
                "order": {"field": "order"},
                "opacity": {"condition": {"test": "datum.fits", "value": 1}, "value": 0.35},
                "tooltip": [{"field": "strategy"}, {"field": "term"}, number("GiB", format=".3f")],
            },
        },
        {
            "data": {"values": notes},
            "mark": {"type": "text", "align": "left", "dx": 10},
            "encoding": {"y": y, "x": number("end"), "text": {"field": "note"}},
        },
        *(_diamond(value / GIB, what, chosen, y) for what, value in points.items() if has_bar),
    ]
    fitting = sum(bool(entry["fits"]) for entry in entries)
    summary = f"{fitting} of {len(entries)} strategies can run here"
    if capacity:
        layers.append(_line(capacity / GIB, f"capacity {capacity / GIB:.4g} GiB"))
        summary += f", in {capacity / GIB:.4g} GiB per {per}"
    summary += f". Chosen: {chosen}, " + ", ".join(f"{value / GIB:.2f} GiB {what}" for what, value in points.items())
    summary += ". Bars are with activation checkpointing, unless it is turned off."
    title = f"Peak memory of one {per}, predicted by term."
    return Chart(f"memory-{where}", title, summary, {"height": 21 * len(entries), "layer": layers})


def _line(at: float, label: str) -> dict[str, Any]:
    """Return a vertical line with its label left of it."""
    x = number("at")
    text = {"type": "text", "align": "right", "baseline": "top", "dx": -5}
    return {
        "data": {"values": [{"at": at, "label": label}]},
        "layer": [
            {"mark": {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 1.5}, "encoding": {"x": x}},
            {"mark": text, "encoding": {"x": x, "y": {"value": 2}, "text": {"field": "label"}}},
        ],
    }


def _diamond(at: float, what: str, strategy: str, y: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "data": {"values": [{"strategy": strategy, "GiB": at, "what": what}]},
        "mark": {
            "type": "point",
            "shape": "diamond",
            "size": 90,
            "filled": what.startswith("◆"),
            "color": "currentColor",
            "strokeWidth": 2,
        },
        "encoding": {
            "y": y,
            "x": number("GiB"),
            "tooltip": [{"field": "what"}, number("GiB", format=".3f")],
        },
    }


def accuracy_of_prediction(ratios: Mapping[str, float]) -> Chart:
    """Return the ratios of measured to predicted figures, by quantity."""
    rows = [{"quantity": name, "ratio": ratio} for name, ratio in ratios.items()]
    furthest = max(2.0, *(max(ratio, 1 / ratio) for ratio in ratios.values())) * 1.1
    x = number(
        "ratio",
        title="measured over predicted (log scale)",
        scale={"type": "log", "domain": [1 / furthest, furthest], "nice": False},
        axis={"format": "~g", "values": [0.1, 0.2, 0.5, 1, 2, 5, 10], "grid": True},
    )
    y = category("quantity", sort=None, title=None)
    tooltip = [{"field": "quantity"}, number("ratio", format=".3f")]
    spec = {
        "height": 28 * len(rows),
        "data": {"values": rows},
        "layer": [
            {"mark": {"type": "rule", "strokeDash": [5, 4]}, "data": {"values": [{"ratio": 1}]}, "encoding": {"x": x}},
            {"mark": {"type": "bar", "height": 4}, "encoding": {"y": y, "x": x, "x2": {"datum": 1}}},
            {
                "mark": {"type": "point", "size": 90, "color": PALETTE[0]},
                "encoding": {"y": y, "x": x, "tooltip": tooltip},
            },
        ],
    }
    values = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    return Chart("predicted", "Measured over predicted.", f"1 is exact: {values}.", spec)


def lengths(table: Path) -> Chart:
    """Return the number of rows of each split by length, from lengths.csv: training rows as bars, others as lines."""
    read = _read(table)
    width = read[0]["tokens"]
    splits = [name for name in ("train", "validation", "test") if any(row[name] for row in read)]
    used = [index for index, row in enumerate(read) if any(row[name] for name in splits)]
    read = read[used[0] : used[-1] + 1] if used else []
    rows = [
        {"from": row["tokens"] - width, "to": row["tokens"], "split": name, "rows": row[name]}
        for name in splits
        for row in read
    ]
    ends = [{"from": read[-1]["tokens"], "split": name, "rows": read[-1][name]} for name in splits if read]
    x = number("from", title="tokens of a row", scale={"zero": False, "nice": False})
    encoding = {
        "x": x,
        "y": number(
            "rows",
            title="rows (symlog scale)",
            stack=None,
            scale={"type": "symlog"},
            axis={"values": [0, *(10**power for power in range(10))]},
        ),
        "color": category("split", scale={"domain": splits}),
    }
    tooltip = [
        {"field": "split"},
        {"field": "from", "title": "over"},
        {"field": "to", "title": "up to"},
        {"field": "rows"},
    ]
    spec = {
        "height": 170,
        "data": {"values": rows + ends},
        "layer": [
            {
                "transform": [{"filter": "datum.split == 'train' && isValid(datum.to)"}],
                "mark": {"type": "bar", "binSpacing": 1, "opacity": 0.4},
                "encoding": {**encoding, "x": x | {"bin": "binned"}, "x2": {"field": "to"}, "tooltip": tooltip},
            },
            {
                "transform": [{"filter": "datum.split != 'train'"}],
                "mark": {"type": "line", "interpolate": "step-after"},
                "encoding": encoding,
            },
        ],
    }
    limits = f"over {rows[0]['from']:.0f} and up to {read[-1]['tokens']:.0f} tokens" if read else ""
    return Chart("lengths", "Lengths of rows.", f"Rows have {limits}." if read else "No rows.", spec)


def _thinning(rows: Sequence[Any]) -> str:
    size = -(-len(rows) // len(thinned(rows)))
    return f" Each point is the mean of {size} steps." if size > 1 else ""


def _read(table: Path) -> list[dict[str, float]]:
    """Return the rows of a CSV file of numbers, without empty and non-finite cells."""
    with table.open(encoding="utf-8", newline="") as file:
        rows = [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]
    return [{name: value for name, value in row.items() if isfinite(value)} for row in rows]
