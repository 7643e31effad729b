"""The charts of a comparison: losses, time against memory, predicted against measured, parts of memory and time."""

from collections.abc import Iterable, Sequence
from typing import Any

from zerolora.report.charts import PALETTE, Chart, category, loss_axis, number, rule_at_pointer
from zerolora.report.comparison_rows import Row
from zerolora.units import GIB

MOST = 30
"""Maximum runs of a chart; more would be indistinguishable."""
BAR = 22
"""Height of a bar and its gap, in pixels."""
LOSS = ("loss", "loss_validation")
PREDICTED = ("predicted", "measured")
Spec = dict[str, Any]


def sections(rows: Sequence[Row]) -> dict[str, list[Chart]]:
    """Return charts by the title of their section. Unfinished runs are not in them."""
    trained = [row for row in rows if "curve" in row]
    chosen = best(trained)
    where = "gpu" if any("measured_gpu_bytes" in row for row in trained) else "host"
    of_device = [row for row in trained if f"measured_{where}_bytes" in row]
    memory = (f"predicted_{where}_bytes", f"measured_{where}_bytes")
    time = ("predicted_step_seconds", "step_seconds")
    rest = f" Of {len(trained)} runs, the {MOST} of lowest loss." if len(trained) > MOST else ""
    if not chosen:
        return {}
    stacked = [_memory(chosen, where, rest)] if any(row["memory"].get(where) for row in chosen) else []
    return {
        "Losses": [_losses(chosen, rest)],
        "Cost": [_time_and_memory(of_device, where)],
        "Predicted and measured": [
            _predicted_and_measured(of_device, "predicted-memory", "Memory.", _title(where), memory, GIB),
            _predicted_and_measured(trained, "predicted-time", "Time.", "seconds of a step", time),
        ],
        "Where memory and time go": [*stacked, _parts(chosen, rest)],
    }


def best(rows: Sequence[Row]) -> list[Row]:
    """Return the MOST rows of lowest loss, in the order of `rows`."""
    kept = sorted(rows, key=_loss)[:MOST]
    return [row for row in rows if row in kept] if len(rows) > MOST else list(rows)


def front(points: Iterable[tuple[float, float, str]]) -> list[str]:
    """Return the names of the Pareto-optimal points, lower being better, in the order of the first figure."""
    names, lowest = [], float("inf")
    for _, second, name in sorted(points):
        if second < lowest:
            names.append(name)
            lowest = second
    return names


def _loss(row: Row) -> float:
    return float(next((row[key] for key in LOSS if key in row), float("inf")))


def _losses(rows: Sequence[Row], rest: str) -> Chart:
    data = [{"step": step, "series": row["run"], "value": loss} for row in rows for step, loss in row["curve"]]
    names = [row["run"] for row in rows]
    ends = [(row["curve"][-1][1], row["run"]) for row in rows]
    few = len(names) <= len(PALETTE)
    units = {row.get("loss_unit", "") for row in rows}
    unit = units.pop() if len(units) == 1 else ""
    encoding: Spec = {
        "x": number("step", title="step", scale={"nice": False}),
        "y": loss_axis((each["value"] for each in data), f"loss {unit}".strip()),
        "color": category("series", sort=names),
    }
    if not few:  # colours repeat, with another dash pattern
        encoding |= {
            "strokeDash": category("series", sort=names, legend=None),
            "tooltip": [{"field": "series", "title": "run"}, {"field": "step"}, {"field": "value", "title": "loss"}],
        }
    return Chart(
        "losses",
        "Training loss.",
        f"{unit and unit.capitalize() + '. '}At the last step: {_span(min(ends), max(ends))}.{rest}",
        {"data": {"values": data}, "layer": [{"mark": "line", "encoding": encoding}]},
        rule_at_pointer("step", "step", names) if few else None,
    )


def _time_and_memory(rows: Sequence[Row], where: str) -> Chart:
    points = [(row["step_seconds"], row[f"measured_{where}_bytes"] / GIB, row["run"]) for row in rows]
    on_front = front(points)
    data = [
        {"run": name, "seconds": seconds, "memory": memory, "front": name in on_front}
        for seconds, memory, name in points
    ]
    x = number("seconds", title="seconds of a step", scale=_around(each["seconds"] for each in data))
    y = number("memory", title=_title(where), scale=_around(each["memory"] for each in data))
    edge = {"filter": "datum.front"}
    marks = {"color": ["#0072B2", "#8A8A8A"], "shape": ["diamond", "circle"]}
    more = f" and {len(on_front) - 5} more" if len(on_front) > 5 else ""
    return Chart(
        "front",
        "Time against memory.",
        f"No other run is both faster and smaller than {', '.join(on_front[:5])}{more}: the Pareto front, the line.",
        {
            "data": {"values": data},
            "height": 260,
            "encoding": {"x": x, "y": y},
            "layer": [
                {
                    "transform": [edge],
                    "mark": {"type": "line", "interpolate": "step-after", "strokeDash": [4, 3], "color": "#0072B2"},
                },
                {
                    "mark": {"type": "point", "filled": True, "size": 90},
                    "encoding": {
                        **{
                            channel: category("front", scale={"domain": [True, False], "range": values}, legend=None)
                            for channel, values in marks.items()
                        },
                        "tooltip": [{"field": name} for name in ("run", "seconds", "memory")],
                    },
                },
                {
                    "transform": [edge],
                    "mark": {"type": "text", "align": "left", "dx": 8, "dy": -8},
                    "encoding": {"text": {"field": "run"}},
                },
            ],
        },
    )


def _predicted_and_measured(
    rows: Sequence[Row], name: str, title: str, what: str, keys: tuple[str, str], unit: int = 1
) -> Chart:
    data = [
        {"run": row["run"]} | {name: row[key] / unit for name, key in zip(PREDICTED, keys, strict=True)} for row in rows
    ]
    ends = [edge(point[name] for point in data for name in PREDICTED) for edge in (min, max)]
    ratios = sorted(point["predicted"] / point["measured"] for point in data)
    axis = {"type": "quantitative", "scale": {"zero": False, "nice": True}}
    return Chart(
        name,
        title,
        f"Predicted over measured: {ratios[0]:.2f} to {ratios[-1]:.2f}, median {ratios[len(ratios) // 2]:.2f}. "
        "On the line they are equal; above it, more was measured than predicted.",
        {
            "data": {"values": data},
            "encoding": {
                "x": {"field": "predicted", "title": f"predicted: {what}", **axis},
                "y": {"field": "measured", "title": "measured", **axis},
            },
            "layer": [
                {
                    "data": {"values": [{"predicted": end, "measured": end} for end in ends]},
                    "mark": {"type": "line", "strokeDash": [4, 3], "color": "#8A8A8A"},
                },
                {
                    "mark": {"type": "point", "filled": True, "size": 90, "color": "#D55E00"},
                    "encoding": {"tooltip": [{"field": each} for each in ("run", *PREDICTED)]},
                },
            ],
        },
    )


def _memory(rows: Sequence[Row], where: str, rest: str) -> Chart:
    data = [
        {"run": row["run"], "term": term.replace("_", " "), "value": size / GIB}
        for row in rows
        for term, size in row["memory"].get(where, {}).items()
    ]
    known = {row["memory"].get(f"capacity_{where}") for row in rows} - {None}
    capacities = [capacity / GIB for capacity in sorted(known)]
    line: Spec = {
        "data": {"values": [{"value": capacity} for capacity in capacities]},
        "mark": {"type": "rule", "strokeDash": [6, 3], "strokeWidth": 2},
        "encoding": {"x": number("value")},
    }
    dashed = ", ".join(f"{capacity:.1f} GiB" for capacity in capacities)
    capacity_line = f" The dashed line is the capacity, {dashed}." if capacities else ""
    return Chart(
        "memory",
        "Predicted memory by term.",
        f"As estimate.json has it for each run's strategy.{capacity_line}{rest}",
        _bars(data, _title(where), [line] if capacities else []),
    )


def _parts(rows: Sequence[Row], rest: str) -> Chart:
    data = [
        {"run": row["run"], "term": part, "value": seconds} for row in rows for part, seconds in row["parts"].items()
    ]
    waiting = max(rows, key=lambda row: row["parts"].get("communication", 0.0) / row["step_seconds"])
    share = waiting["parts"].get("communication", 0.0) / waiting["step_seconds"]
    return Chart(
        "parts",
        "Where a step's time goes.",
        f"Communication is at most {100 * share:.0f} % of a step, in {waiting['run']}.{rest}",
        _bars(data, "seconds of a step", []),
    )


def _bars(data: list[Spec], title: str, lines: list[Spec]) -> Spec:
    bars = {
        "mark": {"type": "bar"},
        "encoding": {
            "y": category("run", title=None, sort=None),
            "x": number("value", title=title, stack="zero"),
            "color": category("term", sort=None),
            "tooltip": [{"field": name} for name in ("run", "term", "value")],
        },
    }
    height = BAR * len({each["run"] for each in data})
    return {"data": {"values": data}, "height": height, "layer": [bars, *lines]}


def _around(values: Iterable[float]) -> Spec:
    """Return the scale of an axis around these values; of one value, by itself without a scale, some of both sides."""
    low, *others = sorted({*values})
    return {"zero": False} if others else {"domain": [0.8 * low, 1.2 * low]}


def _title(where: str) -> str:
    return "GiB of a GPU" if where == "gpu" else "GiB of a node"


def _span(low: tuple[float, str], high: tuple[float, str]) -> str:
    if low[1] == high[1]:
        return f"{low[0]:.3g} in {low[1]}"
    return f"from {low[0]:.3g} in {low[1]} to {high[0]:.3g} in {high[1]}"
