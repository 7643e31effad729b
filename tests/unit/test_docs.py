"""The documents are correct: figures, commands, keys, files."""

import json
import re
import subprocess
from importlib.metadata import requires
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from conftest import ROOT, served
from documented import COMMANDS, PAGES
from loopback_hub import REPOSITORY, REVISION, Hub, asking, serving
from packaging.requirements import Requirement
from row_layouts import golden

from benchmarks import chaos, dvc_diff, export, mutants, planted_regressions
from benchmarks import strategies as measured_strategies
from benchmarks.evaluate import boolq, public_benchmarks
from benchmarks.memory import compare
from benchmarks.merge import compare as compare_merges
from benchmarks.train import tables
from zerolora import strategies
from zerolora.config.file import load
from zerolora.config.schema import Config
from zerolora.memory.reserve import COMMUNICATOR, CUDA_BYTES, HOPPER_CONTEXT, JOB_BYTES, KERNELS
from zerolora.planner.hardware import GPUS, KERNEL_SECONDS, MATMUL_SHARE, MEMORY_SHARE, NETWORKS, NODE_LINKS, offered
from zerolora.strategies import STRATEGIES
from zerolora.train.objectives import OBJECTIVES

HASHED = re.compile(r"^([\w.-]+)==([\w.]+)(?: \\\n    --hash=sha256:[0-9a-f]{64})+$", re.MULTILINE)
"""A package of a hash file, with its version."""

README = (ROOT / "README.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
ENGINE_SYNC = (ROOT / "docs/engine-sync.md").read_text(encoding="utf-8")


def result(name: str) -> dict[str, object]:
    return json.loads((ROOT / "benchmarks/results" / name).read_text(encoding="utf-8"))


def test_comparison_figures_match_measurements() -> None:
    page = (ROOT / "docs/compare.md").read_text(encoding="utf-8")
    many: Any = result("many_runs.json")["runs"]
    assert f"{many['1000']['cpu_seconds']:.1f} s of CPU time for 1,000 runs" in page
    measured: Any = result("strategies.json")
    assert f"<!-- strategies -->\n{measured_strategies.section(measured)}\n<!-- end -->" in page
    assert f"<!-- strategies -->\n{measured_strategies.published_table(measured)}\n<!-- end -->" in REFERENCE
    recipe = load(ROOT / "config/recipes/smollm2-135m-strategies/config.yaml")
    assert {run["strategy"] for run in measured["runs"]} == set(recipe.all_runs)
    losses = [run["loss_validation"] for run in measured["runs"]]
    assert max(losses) - min(losses) < 1e-3 * min(losses)


def test_planted_regressions_match_measurements() -> None:
    measured: Any = result("bisect.json")
    page = (ROOT / "docs/bisect.md").read_text(encoding="utf-8")
    assert f"<!-- regressions -->\n{planted_regressions.markdown(measured)}\n<!-- end -->" in page
    for each in measured["searches"].values():
        assert each["names_the_plant"] and each["probes"] <= each["planned_probes"]


def test_layouts_that_go_through_match_their_outcomes() -> None:
    counts = golden()["counts"]
    names = {"popular": "popular", "unseen": "less known"}
    rows = [
        f"| {sum(counts[corpus].values())} {name} ones | " + " | ".join(map(str, counts[corpus].values())) + " |"
        for corpus, name in names.items()
    ]
    table = "\n".join(["| data sets | free | need a line | listed |", "|---|---|---|---|", *rows])
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    assert f"<!-- layouts -->\n{table}\n<!-- end -->" in page


def test_chaos_rounds_and_mutants_match_measurements() -> None:
    measured: Any = result("chaos.json")
    page = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
    assert f"<!-- chaos -->\n{chaos.markdown(measured)}\n<!-- end -->" in page
    assert measured["count"] == len(measured["rounds"])
    assert [each for each in measured["rounds"] if each["ended"] == "broken"] == []
    assert f"<!-- mutants -->\n{mutants.markdown(result('mutants.json'))}\n<!-- end -->" in page


def test_boolq_table_matches_measurements() -> None:
    measured: Any = result("boolq.json")
    text = (ROOT / "config/recipes/gemma-3-270m-boolq/README.md").read_text(encoding="utf-8")
    assert boolq.markdown(measured) in text and measured["machine"]["date"] in text


def test_rebuild_figures_match_measurements() -> None:
    measured: Any = result("rebuild.json")
    page = " ".join((ROOT / "docs/rebuild.md").read_text(encoding="utf-8").split())
    whole, kernels, tampered = measured["whole"], measured["other_kernels"], measured["tampered"]
    assert whole["verdict"] == "equal to the byte" and whole["equal"] == whole["products"]
    figures = [
        f"in all {whole['products']} products, after {whole['seconds']} s; the original had taken "
        f"{measured['original_seconds']} s",
        f"{kernels['machine']['kernels']} in place of {whole['machine']['kernels']}",
        f"it was {kernels['verdict']}.",
    ]
    beyond, within = (
        [each for each in kernels["bounds"] if (", more than " in each) == more] for more in (True, False)
    )
    assert all(each.startswith("loss") and not each.startswith("loss of step") for each in beyond)
    found = {each.partition(":")[0] for each in within}
    assert "weights, relative to their norm" in found and "accuracy 0.995 and 0.995" in found
    assert sum(each.startswith("loss of step") for each in found) == 5
    (apart,) = [each.split(": ")[1].split(",")[0] for each in within if each.startswith("weights")]
    figures += [f"({apart}, relative to their norm)", beyond[0].partition(":")[0].removeprefix("loss ")]
    assert [figure for figure in figures if figure not in page] == []
    assert "row 5 is the first that differs" in tampered["row"]["line"] and tampered["row"]["code"] == 2
    assert "train.learning_rate was 0.002 and is 0.004, so nothing was trained" in tampered["key"]["line"]
    assert (
        tampered["checkpoint"]["first_difference"]["step"] == 100 and ".weight is not" in tampered["checkpoint"]["line"]
    )
    assert tampered["adapter"]["line"].endswith("is not the file that the push lists")


def test_make_run_figures_match_measurements() -> None:
    measured: Any = result("make_run.json")
    figures = [
        f"accuracy {measured['accuracy_before']:.3f} before, {measured['accuracy_after']:.3f} after",
        f"training takes {measured['train_resources']['training_seconds']:.0f} s",
        f"{measured['train_resources']['tokens_per_second']:.0f} tokens/s",
        f"held {measured['train_resources']['peak_host_bytes_all_ranks'] / 2**30:.1f} GiB",
        f"{measured['install_seconds']} s to install",
        f"{measured['run_seconds']} s to run",
        f"{measured['second_run_seconds']} s",
        f"{measured['adapter_megabytes']} MB",
        f"{measured['merged_megabytes']} MB",
    ]
    assert [figure for figure in figures if figure not in REFERENCE] == []
    assert figures[0] in README and README.count("\n") <= 100
    assert measured["files_that_differ_between_two_clones"] == []
    tutorial = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    answered = round(measured["accuracy_after"] * 200)
    figures = [f"({measured[name]} s)" for name in ("install_seconds", "run_seconds")]
    figures += [f"answers {answered} of 200 held-out", measured["machine"]["date"]]
    figures.append(f"accuracy {measured['accuracy_before']:.3f} before, {measured['accuracy_after']:.3f} after")
    assert [figure for figure in figures if figure not in " ".join(tutorial.split())] == []
    compared = measured["metrics_diff"].strip().splitlines()
    assert max(map(len, compared)) <= 110
    assert "\n".join(f"    {line}".rstrip() for line in compared) in (ROOT / "docs/dvc.md").read_text(encoding="utf-8")
    # The estimate of a whole training, with the bounds of all measurements.
    peak, predicted = measured["train_resources"]["peak_host_bytes_all_ranks"], measured["predicted_host_bytes"]
    text = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    assert f"{predicted / 2**30:.2f} GiB predicted, {peak / 2**30:.2f} GiB held" in text
    assert -0.02 <= predicted / peak - 1 <= 0.1


def test_start_up_cost_matches_measurements() -> None:
    measured: Any = result("start.json")
    ratios = {name: measured[name]["ratio"] for name in ("nothing_to_do", "help")}
    assert ratios["nothing_to_do"] <= 1.2 and ratios["help"] <= 3
    fingerprints = measured["fingerprints"]
    assert fingerprints["cached_cpu_seconds"] < 0.2
    assert f"in {fingerprints['cached_cpu_seconds']:.2f} s of CPU time" in ENGINE_SYNC
    assert f"{fingerprints['parsed_cpu_seconds']:.2f} s" in ENGINE_SYNC
    assert f"{ratios['nothing_to_do']:.2f} times the CPU time of a bare Snakemake" in REFERENCE
    assert f"`zerolora --help` {ratios['help']:.2f} times" in REFERENCE


def test_candidate_table_matches_measurements() -> None:
    for candidate in result("reference_task.json")["candidates"]:  # type: ignore[attr-defined]
        row = (
            f"| {candidate['rule']} | {candidate['max_steps']} | {candidate['learning_rate']:g} | "
            f"{candidate['format_rate']:.3f} | {candidate['accuracy']:.3f} | {candidate['loss_validation']:.4f} |"
        )
        assert row in REFERENCE


def test_packing_and_balance_tables_match_measurements() -> None:
    text = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    packing: Any = result("packing.json")
    rows = [
        f"| {entry['set']} | {entry['rows']:,} | {entry['capacity']:,} | "
        + " | ".join(f"{packer['share_of_bound']:.2%}" for packer in entry["packers"].values())
        + " |"
        for entry in packing["sets"]
    ]
    rows += [f"{grown['rows']:,}" for grown in packing["growth"]]
    rows += [f"{grown['seconds']} s" for grown in packing["growth"]]
    balance: Any = result("balance.json")
    rows += [
        f"| {kind} | {micro_batch} | {order} | {actual['tokens_mean']:.2%} | {actual['attention_mean']:.2%} | "
        f"{actual['padding']:.1%} | {actual['slowest']:.2f} |"
        for kind in ("packed", "single rows")
        for micro_batch, orders in balance[kind].items()
        for order, actual in orders.items()
    ]
    assert [row for row in rows if row not in text] == []
    ours = [entry["packers"]["zerolora"]["share_of_bound"] for entry in packing["sets"]]
    assert min(ours) >= 0.9975


def test_merge_table_matches_measurements() -> None:
    text = (ROOT / "docs/export.md").read_text(encoding="utf-8")
    actual: Any = result("merge.json")
    assert compare_merges.markdown(actual) in text
    starts = [model["ways"]["start"]["seconds"] for model in actual["models"].values()]
    assert f"included, is {min(starts):.1f} to {max(starts):.1f} s of each merge" in text
    ways = [actual["models"][size]["ways"] for size in ("7B", "3B", "1B")]
    words = " ".join(text.split())
    for of, sentence in (
        ("cp", "{:.2f}, {:.2f} and {:.2f} of the bandwidth of `cp` at 7B, 3B and 1B"),
        ("cp, no reflink", "{:.2f}, {:.2f} and {:.2f} of that of `cp --reflink=never`"),
        ("zerolora, bytes only", "{:.2f}, {:.2f} and {:.2f} of that of the process that only reads and writes"),
    ):
        ratios = (each[of]["least_seconds"] / each["zerolora"]["least_seconds"] for each in ways)
        assert sentence.format(*ratios) in words
    ours, peft, factory = ([each[way] for each in ways] for way in ("zerolora", "peft", "LLaMA-Factory"))
    times = [one["seconds"] / other["seconds"] for one, other in zip(ours, peft, strict=True)]
    memory = [other["rss_bytes"] / one["rss_bytes"] for one, other in zip(ours, peft, strict=True)]
    assert "{:.2f} of peft's time at 7B, {:.2f} at 3B and {:.2f} at 1B".format(*times) in text
    assert "1/{:.0f}, 1/{:.0f} and 1/{:.0f} of its memory".format(*memory) in text
    assert min(memory) > 8 and max(times) < 0.5
    times = [one["seconds"] / other["seconds"] for one, other in zip(ours, factory, strict=True)]
    assert "of LLaMA-Factory's time it takes {:.2f}, {:.2f} and {:.2f}.".format(*times) in words
    versions = actual["llamafactory"]
    assert "LLaMA-Factory {llamafactory} with transformers {transformers} and peft {peft}.".format(**versions) in words
    assert all(model["same_weights"] for model in actual["models"].values())


def test_export_table_matches_measurements() -> None:
    actual: Any = result("export.json")
    text = (ROOT / "docs/export.md").read_text(encoding="utf-8")
    assert export.markdown(actual) in text
    machine = actual["machine"]
    assert f"has {actual['merged_bytes'] / 1e6:.0f} MB in fp32" in text
    assert f"{machine['date']}, {machine['cores']} CPU cores" in text
    unlocked = {"compressed_tensors"}  # llm-compressor is not in the lock
    assert {each["target"] for each in actual["cases"]} >= {target for target, _ in export.CASES} - unlocked
    exact = [each for each in actual["cases"] if each["type"] in (None, "f16", "q8_0", "int8")]
    assert all(each["equal"] == each["rows"] == 3 for each in exact)


def test_public_benchmark_table_matches_measurements() -> None:
    actual: Any = result("public.json")
    assert public_benchmarks.markdown(actual) in (ROOT / "docs/tasks.md").read_text(encoding="utf-8")


def test_dvc_output_matches_the_recording() -> None:
    text = (ROOT / "docs/telemetry.md").read_text(encoding="utf-8")
    assert all(f"`{command}`" in text.replace("\\|", "|") for command in dvc_diff.TABLES)
    if not dvc_diff.RESULT.is_file():
        assert "<!-- what DVC says -->\n<!-- end -->" in text
        return
    actual: Any = result("dvc.json")
    assert dvc_diff.section(actual) in text
    assert set(actual["outputs"]) == set(dvc_diff.TABLES)
    widest = max(len(line) for output in actual["outputs"].values() for line in output.splitlines())
    assert widest <= dvc_diff.WIDTH + len("Nov 29, 2026") - len("04:22 AM"), "DVC writes the date of another day"
    assert "learning_rate" in actual["outputs"][dvc_diff.TABLES[-1]]
    plot = dvc_diff.PLOT.read_text(encoding="utf-8")
    assert plot.startswith("<svg") and "workspace" in plot and "HEAD" in plot


def test_estimate_errors_match_measurements() -> None:
    text = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    actual: Any = result("memory.json")
    assert compare.markdown(actual) in text
    assert actual["all"]["combinations"] >= 100
    assert len({row["model"] for row in actual["rows"]}) >= 5


ESTIMATES = [command for command in COMMANDS if command.words[:2] == ["zerolora", "memory"]]


@pytest.mark.parametrize("document", sorted({command.page for command in ESTIMATES}))
def test_documented_estimates_run(document: str, tmp_path: Path) -> None:
    """Each command, with its placeholders in capital letters replaced."""
    commands = [" ".join(command.words[1:]) for command in ESTIMATES if command.page == document]
    config = (ROOT / "config/recipes/models/llama-3-8b.json").read_bytes()
    (tmp_path / "config.json").write_bytes(config)
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    for command in commands:
        hub = "NAME@REVISION" in command
        filled = command.replace("DIRECTORY", str(tmp_path)).replace("FILE", str(own))
        filled = filled.replace("NAME@REVISION", f"{REPOSITORY}@{REVISION}")
        result = from_hub(filled, config, tmp_path) if hub else served("zerolora", *filled.split())
        assert result.returncode == 0, f"{command}: {result.stderr or result.stdout}"
        if "--json" in command:
            actual = [json.loads(line)["strategy"] for line in result.stdout.splitlines()]
        else:
            actual = [line.split()[0] for line in result.stdout.split("\n\n")[1].splitlines()[1:]]
        named = re.findall(r"--strategy (\w+)", command) or list(STRATEGIES)
        assert actual == (["…" + str(own)[-23:]] if "--deepspeed" in command else named), command


def from_hub(command: str, config: bytes, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command against a local hub with one model's config.json."""
    with serving(Hub({"config.json": config})) as hub:
        return asking(hub, folder, *command.split())


def test_documented_hardware_names_are_current() -> None:
    text = (ROOT / "docs/choice.md").read_text(encoding="utf-8")
    for table in (GPUS, NODE_LINKS, NETWORKS):
        assert ", ".join(f"`{name}`" for name in offered(table)) in text
    assert strategies.table() in text


def test_prepare_figures_match_measurements() -> None:
    text = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    tokenizing: Any = result("tokenizing.json")
    speed, ratio = tokenizing["speed"], tokenizing["ratio_to"]
    rows = [
        f"| {name} | {actual['rows_per_second']:,} | {actual['tokens_per_second']:,} |"
        for name, actual in speed.items()
    ]
    rows += [f"{tokenizing['rows']:,} rows", f"{tokenizing['mean_tokens']} tokens"]
    rows += [f"{ratio['datasets.map']:.2f} times", f"{ratio['tokenizer alone']:.0%}"]
    memory: Any = result("prepare_memory.json")
    rows += [f"| {run['rows']:,} | {run['peak_bytes'] / 1e6:,.0f} MB |" for run in memory["runs"]]
    rows += [f"{memory['bytes_more_per_row']:.0f} bytes a row"]
    assert [row for row in rows if row not in text] == []
    assert max(run["rows"] for run in memory["runs"]) == 5_000_000


def test_host_memory_figures_match_measurements() -> None:
    actual: Any = result("memory_cpu.json")
    errors = f"{actual['mean_absolute_error']:.1%} | {actual['worst_error']:+.1%} | {actual['lowest_error']:.1%}"
    assert f"| {actual['measured']} | {errors} |" in (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    assert actual["mean_absolute_error"] <= 0.03 and actual["lowest_error"] >= -0.02
    assert abs(actual["worst_error"]) <= 0.08


@pytest.mark.parametrize(("name", "size"), [("Qwen2.5-7B", "7b"), ("Qwen2.5-0.5B", "0.5b")])
def test_gpu_memory_figures_match_measurements(name: str, size: str) -> None:
    recorded: Any = result(f"gpu_memory_qwen2.5-{size}.json")
    actual = recorded["measured"]
    errors = f"{actual['mean_absolute_error']:.1%} | {actual['worst_error']:+.1%} | {actual['lowest_error']:.1%}"
    assert f"| {name} | {actual['measured']} | {errors} |" in (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    assert actual["mean_absolute_error"] <= 0.03 and actual["lowest_error"] >= -0.03
    for row in actual["rows"]:
        if "gpu_in_use" in row:
            assert row["gpu_in_use"] - row["gpu_reserved"] <= HOPPER_CONTEXT + COMMUNICATOR + KERNELS, row


def test_gpu_agreement_figures_match_measurements() -> None:
    text = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    cases: dict[str, list[Any]] = {}
    recorded: Any = result("gpu_agreement.json")
    for each in recorded["cases"]:
        # deepseek_v3 flash is the finding that the page describes.
        if "gradient_error" in each and each["name"] != "deepseek_v3 flash":
            quantized = each["settings"]["method"].startswith("q")
            cases.setdefault("quantized" if quantized else each["settings"]["precision"], []).append(each)
    for precision, rows in cases.items():
        most = (max(each[f"{what}_error"] for each in rows) for what in ("loss", "gradient"))
        assert f"| {precision} | {len(rows)} | {next(most):.0e} | {next(most):.0e} |" in text
        assert all(each["repeats"] == {"losses": True, "gradients": 0.0} for each in rows)


def test_choice_figures_match_measurements() -> None:
    probed: Any = result("gpu_probe.json")
    rates = probed["measured"]["measured"]
    measured = [rates["matmul_16bit_flops_per_second"] / 1e12, rates["memory_bytes_per_second"] / 1e12]
    page = (ROOT / "docs/choice.md").read_text(encoding="utf-8")
    assert f"| 692 | {measured[0]:.0f} |" in page and f"| 3.84 | {measured[1]:.2f} |" in page
    assert pytest.approx(692, abs=1) == MATMUL_SHARE * 989 and pytest.approx(3.84) == MEMORY_SHARE * 4.8
    assert f"| 15 µs | {rates['kernel_seconds'] * 1e6:.0f} µs |" in page and KERNEL_SECONDS == 15e-6
    actual: Any = result("choice.json")
    text = (ROOT / "docs/choice.md").read_text(encoding="utf-8")
    rows = [f"| configurations measured | {actual['measured']} |", f"measured seconds | {actual['spearman']:.2f} |"]
    rows += [f"over the best's | {actual['ratio']:.1%} |"]
    rows += [f"`{actual[who]['strategy']}`, micro-batch {actual[who]['micro_batch']}, " for who in ("chosen", "best")]
    rows += [f"| {actual[who]['tokens_per_second']:,.0f} tokens/s |" for who in ("chosen", "best")]
    assert [row for row in rows if row not in text] == []
    assert actual["ratio"] >= 0.95 and actual["failed"] == 0


def test_objective_times_match_measurements() -> None:
    """Against next-token loss, all predictions are within a fifth."""
    rows: Any = result("objective_times.json")["rows"]
    text = (ROOT / "docs/choice.md").read_text(encoding="utf-8")
    for objective in OBJECTIVES.keys() - {"sft"}:
        each = [rows[f"{objective}, {strategy}"]["against_sft"] for strategy in ("ddp", "zero3")]
        assert all(one["measured"] == pytest.approx(one["predicted"], rel=0.2) for one in each), objective
        figures = (f"{one[what]:.2f}" for one in each for what in ("predicted", "measured"))
        assert f"| `{objective}` | {' | '.join(figures)} |" in text


def test_distillation_matches_measurements() -> None:
    """Peers take more CPU seconds, also with the same kernels; and views of rows are read faster than decoded ones."""
    measured: Any = result("distillation_peers.json")
    text = (ROOT / "docs/distillation.md").read_text(encoding="utf-8")
    assert min(each["median"] for each in measured["speed"].values()) > 1
    for name, each in measured["contestants"].items():
        over = f"{measured['speed'][name]['median']:.1f}" if name in measured["speed"] else "1"
        assert f"| {name} | {each['tokens_a_cpu_second']['median']:.0f} | {over} |" in text
    feeding: Any = result("feeding.json")
    for kind, least in (("texts", 10), ("taught", 300)):
        views, decoded = (feeding[kind][way]["median"] for way in ("views", "datasets"))
        assert decoded > least * views


def test_held_out_losses_by_order_match_measurements() -> None:
    """None is distinguishable from another, TRL's included."""
    measured: Any = result("train_order.json")
    text = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    rows = [
        (kind, order, measured[kind][key])
        for kind in ("single rows", "packed rows")
        for order, key in (("shuffled", "shuffled"), ("by length", "group_by_length"))
    ]
    for kind, order, runs in [*rows, ("single rows", "TRL's", measured["trl"]["runs"])]:
        losses = [run["loss_validation"] for run in runs]
        seeds = ", ".join(f"{loss:.4f}" for loss in losses)
        assert f"| {kind} | {order} | {mean(losses):.4f} | {seeds} |" in text
    for key in ("single rows", "packed rows", "trl"):
        ends = measured[key]["difference"]
        assert "{mean:+.4f} [{low:+.4f}, {high:+.4f}]".format(**ends) in text
        assert ends["low"] < 0 < ends["high"]


def test_process_memory_constants_match_measurements() -> None:
    measured: Any = result("process_memory.json")
    assert measured["PROCESS_BYTES"] == pytest.approx(measured["resident_bytes"], rel=0.1)
    assert measured["JOB_BYTES"] == JOB_BYTES == pytest.approx(measured["beside_bytes"], rel=0.2)
    more = measured["cuda_resident_bytes"] - measured["resident_bytes"]
    assert measured["CUDA_BYTES"] == CUDA_BYTES == pytest.approx(more, rel=0.1)


def test_documented_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        for target in re.findall(r"(?:^ {4,}|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_documented_paths_exist() -> None:
    for document in PAGES:
        if document.name == "peers.md":  # paths of other projects
            continue
        # A path before a code block is an example's new file.
        text = re.sub(r"`(?:src|workflow)/[\w./]+`:\n\n```python", "", document.read_text(encoding="utf-8"))
        directories = "config|profiles|docs|benchmarks|src|tests|workflow|envs"
        for path in re.findall(rf"[`(]((?:{directories})/[\w./-]+\w)[`)]", text):
            example = Path(path).name in ("card.py", "mine.json", "tune.json") or path == "profiles/default"
            assert (ROOT / path).exists() or example, f"{document.name}: {path}"


def test_every_benchmark_is_on_a_page() -> None:
    """A script that no page names measures nothing that anybody reads."""
    folder = ROOT / "benchmarks"
    listing = (folder / "README.md").read_text(encoding="utf-8")
    for script in (path for path in folder.rglob("*.py") if "__main__" in path.read_text(encoding="utf-8")):
        assert re.search(rf"`[\w/]*\b{script.name}`", listing), script
    for script, links in re.findall(r"^- `([\w/]+\.py)`(.*)$", listing, re.MULTILINE):
        pages = re.findall(r"\]\(([\w./-]+\.md)", links)
        assert pages and (folder / script).is_file(), script
        for page in pages:
            assert Path(script).stem in (folder / page).read_text(encoding="utf-8"), (script, page)


def test_counts_of_imports_are_the_results() -> None:
    text = (ROOT / "docs/import.md").read_text(encoding="utf-8")
    counted: Any = result("imports.json")
    titles = {"llamafactory": "LLaMA-Factory", "trl": "TRL", "handbook": "alignment-handbook", "swift": "ms-swift"}
    titles |= {"xtuner": "XTuner", "axolotl": "axolotl", "torchtune": "torchtune"}
    assert counted.keys() == titles.keys()
    for name, title in titles.items():
        each = counted[name]
        counts = " | ".join(str(len(each[kind])) for kind in ("equal", "changed", "refused"))
        assert f"| {title} | {each['date']} | {counts} |" in text
        assert all(key in {*counted[name]["keys"]} for keys in each["changed"].values() for key in keys)


def test_config_readme_explains_every_key() -> None:
    text = (ROOT / "config/README.md").read_text(encoding="utf-8")
    schema = Config.model_json_schema()
    for section in schema["$defs"].values():
        for key in section["properties"]:
            assert f"`{key}`" in text, key


def test_lock_pins_every_package() -> None:
    lock = (ROOT / "envs/requirements.lock").read_text(encoding="utf-8")
    pins = [line for line in lock.splitlines() if line and line[0] not in " #"]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+( ; .*)?", pin) for pin in pins), [p for p in pins if "+" in p]
    assert "torch==2.13.0" in pins
    wanted = (ROOT / "envs/requirements.in").read_text(encoding="utf-8")
    names = re.findall(r"^([\w-]+)", wanted, re.MULTILINE)
    locked = {pin.split("==")[0].lower().replace("_", "-") for pin in pins}
    assert {name.lower() for name in names} <= locked


def test_hashes_match_the_locked_versions() -> None:
    """pip refuses files without a hash; `make lock` writes envs/requirements.hashes, too."""
    pin = re.compile(r"^([\w.-]+==[\w.]+)", re.MULTILINE)
    locked = pin.findall((ROOT / "envs/requirements.lock").read_text(encoding="utf-8"))
    text = (ROOT / "envs/requirements.hashes").read_text(encoding="utf-8")
    assert pin.findall(text) == locked
    assert len(HASHED.findall(text)) == len(locked)


@pytest.mark.parametrize(("build", "suffix"), [("cu12", "cu12"), ("cu13", "cu13")])
def test_gpu_libraries_match_torch(build: str, suffix: str) -> None:
    """The installed torch's own requirements, if it is this build."""
    pins = dict(HASHED.findall((ROOT / f"envs/{build}.hashes").read_text(encoding="utf-8")))
    lines = [line.partition("#")[0] for line in (ROOT / f"envs/{build}.in").read_text(encoding="utf-8").splitlines()]
    needed = [line for line in requires("torch") or [] if re.match("cuda|nvidia|triton", line)]
    if not any(f"-{suffix}" in line for line in needed):
        needed = []
    for each in map(Requirement, filter(None, (*lines, *needed))):
        assert pins[each.name] in each.specifier, each
    assert any(name.endswith(suffix) for name in pins)


def test_security_page_names_existing_tests() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for file, _, name in re.findall(r"`(tests/[\w/]+\.py)(::(\w+))?`", page):
        assert not name or f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), name
        assert (ROOT / file).is_file(), file


MEASURED = [name for name in tables.TABLES if (ROOT / "benchmarks/results" / name).is_file()]


@pytest.mark.parametrize("name", MEASURED)
def test_training_tables_match_measurements(name: str) -> None:
    pages = {"train_methods": "methods", "train_host_optimizers": "methods"}
    page = pages.get(name.removesuffix(".json"), "speed")
    assert tables.table(name) in (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")


def test_training_meets_its_documented_speed() -> None:
    reference: Any = result("train_reference.json")
    assert reference["speed"]["reference"]["median"] >= 2 and reference["host_memory"]["reference"]["median"] < 1
    start: Any = result("train_start_up.json")
    assert start["compiled_files"] == [] and start["to_first_step"]["warm_seconds"] < 10
    trl: Any = result("train_trl.json")
    assert trl["speed"]["median"] >= 1.15 and trl["host_memory"]["median"] < 1
    peers: Any = result("train_peers.json")
    fastest = [
        min(each["over_ours"][name] for name in each["over_ours"] if "zerolora," not in name)
        for each in peers["tasks"].values()
    ]
    assert len(fastest) == 2 and min(fastest) >= 1.5
    preferences: Any = result("preference_peers.json")
    assert {name.partition(",")[0] for name in preferences["speed"]} == {"TRL", "LLaMA-Factory", "ms-swift"}
    assert min(each["median"] for each in preferences["speed"].values()) >= 1.5
    assert max(each["median"] for each in preferences["memory"].values()) <= 0.6
    loading: Any = result("train_loading.json")
    own = {name: each["rank_anonymous_bytes"] for name, each in loading["strategies"].items()}
    libraries, weights = loading["libraries_anonymous_bytes"], loading["weights_bytes"]
    share = {name: (size - libraries) / weights for name, size in own.items()}
    assert max(share[name] for name in ("ddp", "zero0", "zero1", "zero2")) < 0.25 and share["zero3"] < 1
    quantized: Any = result("train_loading_quantized.json")
    for ways in quantized["strategies"].values():
        most = {way: max(each["model_peak_bytes"] for each in ways[way]["ranks"]) for way in ways}
        assert most["shard_by_shard"] < quantized["quantized_bytes"] < most["whole"] < quantized["weights_bytes"]
        assert all(each["engine_peak_bytes"] < quantized["quantized_bytes"] for each in ways["shard_by_shard"]["ranks"])
    scaling: Any = result("train_scaling.json")
    sent = {name: each["counted_over_predicted"] for name, each in scaling["strategies"].items()}
    assert all(0.95 < each < 1.05 for each in sent.values())
    limit: Any = result("train_limit.json")
    assert all(each["overhead_share"] < 0.03 for each in limit["trainings"].values())
