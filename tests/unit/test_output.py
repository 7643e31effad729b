"""Snakemake's output through the logger plugin, to a file and to a terminal, of a few small rules."""

import importlib.util
import json
import logging
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from comparison import write_settings
from conftest import BIN, ROOT, served

from snakemake_logger_plugin_zerolora import Job
from zerolora.files import write_json
from zerolora.log import LOGGER, attempts, forget, read_status, set_up, status_file
from zerolora.report.show import summary

SNAKEFILE = """
from pathlib import Path
from zerolora.compat.snakemake_patches import around_planning, before_each_job
from zerolora.log import forget

# As in engine_sync.py: what an earlier run left is not of this one.
hook = lambda: before_each_job(workflow, lambda job: [forget(Path(log)) for log in job.log])
around_planning(workflow, lambda: None, hook)

rule all:
    default_target: True
    input: "two.txt"

rule one:
    output: "one.txt"
    log: "one.log"
    shell: "{python} stage.py {{log}} {{output}} good"

rule two:
    input: "one.txt"
    output: "two.txt"
    log: "two.log"
    shell: "{python} stage.py {{log}} {{output}} {how}"
"""

# A stage started as in cli.py: its output goes to the log.
STAGE = """
import sys
import time
from pathlib import Path
from zerolora import log
from zerolora.progress import Progress

file, output, how = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
log.redirect(file)
log.set_up()
print("a library's chatter")
log.LOGGER.info("a detail")
with Progress("step", 4) as bar:
    for step in range(4):
        time.sleep(PAUSE)
        bar.update(text=f"loss {step}")
if how == "refused":
    log.LOGGER.error("config.yaml: a mistake\\nand its second line")
    sys.exit(2)
if how == "crashed":
    raise ValueError("a fault of ours")
if how == "warned":
    log.LOGGER.warning("rank 1 is slow\\x1b[31m")
output.write_text("done")
log.result("4 steps")
"""


SNAKEMAKE = [str(BIN / "snakemake"), "--logger", "zerolora", "--cores", "1"]


def write(folder: Path, how: str, pause: float) -> None:
    """Write the Snakefile and its stage."""
    (folder / "Snakefile").write_text(SNAKEFILE.format(python=sys.executable, how=how))
    (folder / "stage.py").write_text(STAGE.replace("PAUSE", str(pause)))


def run(folder: Path, how: str, *arguments: str) -> str:
    """Run Snakemake with the plugin, not in a terminal, and return its output; it must fail if a stage does."""
    write(folder, how, 0.1)
    result = served(*SNAKEMAKE, *arguments, directory=folder, before="import os; os.dup2(1, 2)")
    assert (result.returncode != 0) == (how in {"refused", "crashed"}), result.stdout
    return result.stdout


def lines_of(text: str) -> list[str]:
    """Return lines without padding, with T for each time."""
    return [re.sub(r" +", " ", re.sub(r"\d+\.\d s|\d\d:\d\d:\d\d", "T", line)) for line in text.splitlines()]


def test_stages_have_one_line_at_start_and_one_at_end(tmp_path: Path) -> None:
    results = tmp_path / "results"
    write_settings(results, {name: {"dataset": "rows"} for name in ("default", "other")})
    write_json(results / "base/rows/evaluate.json", {"accuracy": 0})
    write_json(results / "default/metrics/evaluate.json", {"accuracy": 0.995})
    assert lines_of(run(tmp_path, "good", "all")) == [
        "T one started",
        "T one done in T one.txt 4 steps",
        "T two started",
        "T two done in T two.txt 4 steps",
        "",
        "default accuracy 0.000 before, 0.995 after results/default/report.html",
        "other not evaluated yet",
        "",
        "Next: open results/default/report.html: answers, memory, provenance.",
    ]
    log = (tmp_path / "one.log").read_text()
    for text in ("a library's chatter", "a detail", "step 4/4 loss 3", "4 steps"):
        assert text in re.sub(" +", " ", log)
    assert "Finished jobid" in "".join(path.read_text() for path in (tmp_path / ".snakemake/log").iterdir())


def test_messages_are_shown_without_control_characters(tmp_path: Path) -> None:
    text = run(tmp_path, "warned")
    assert text.count("zerolora: rank 1 is slow\\x1b[31m\n") == 1
    assert "\x1b" not in text


def test_refusal_is_shown_with_its_log_every_time(tmp_path: Path) -> None:
    for _ in range(2):  # the second log is the same as the first, byte for byte
        assert lines_of(run(tmp_path, "refused"))[-3:] == [
            "zerolora: config.yaml: a mistake",
            "zerolora: and its second line",
            "T two failed after T; log: two.log",
        ]


def test_crash_shows_the_end_of_the_log(tmp_path: Path) -> None:
    lines = lines_of(run(tmp_path, "crashed"))
    assert lines[-2:] == [" ValueError: a fault of ours", "T two failed after T; log: two.log"]


def test_nothing_to_do_is_one_line(tmp_path: Path) -> None:
    run(tmp_path, "good", "two.txt")
    (line,) = run(tmp_path, "good", "two.txt").splitlines()
    assert line == "Nothing to be done (all requested files are present and up to date)."


def test_verbose_uses_snakemakes_format(tmp_path: Path) -> None:
    assert "rule one:\n    output: one.txt\n" in run(tmp_path, "good", "--dry-run", "--verbose")
    assert "rule one:\n    output: one.txt\n" in run(tmp_path, "good", "--verbose")


def test_a_dry_run_has_a_line_for_each_rule(tmp_path: Path) -> None:
    """The plan of a grid would have thousands of lines."""
    names = [f"{number}.txt" for number in range(30)]
    rules = [
        f"rule all:\n    default_target: True\n    input: {names}\n",
        "rule train:\n    input: 'data'\n    output: '{run}.txt'\n    shell: 'touch {output}'\n",
        "rule data:\n    output: 'data'\n    shell: 'touch {output}'\n",
    ]
    (tmp_path / "Snakefile").write_text("".join(rules))
    plan = served(*SNAKEMAKE, "--dry-run", "all", directory=tmp_path)
    first, second, last = (plan.stdout + plan.stderr).splitlines()
    assert first == "    1  data                missing output files"
    assert re.fullmatch(r"   30  train               (\d+, ){2}\d+ and 27 more: missing output files", second)
    assert last == "   31  jobs; a dry run runs none, and with --verbose shows the files and reason of each"
    done = served(*SNAKEMAKE, "data", directory=tmp_path)
    again = served(*SNAKEMAKE, "--dry-run", "data", directory=tmp_path)
    assert done.returncode == 0 and (again.stdout + again.stderr).startswith("Nothing to be done")


def test_running_stages_have_a_line_now_and_then(tmp_path: Path) -> None:
    write(tmp_path, "good", 0.5)
    faster = "import os, snakemake_logger_plugin_zerolora as plugin; plugin.LINE_SECONDS = 0.6; os.dup2(1, 2)"
    begun = time.monotonic()
    lines = lines_of(served(*SNAKEMAKE, "one.txt", directory=tmp_path, before=faster).stdout)
    assert lines[0] == "T one started" and lines[-1].startswith("T one done in T")
    assert 1 <= len(lines[1:-1]) <= (time.monotonic() - begun) / 0.6
    # Before the first step a stage has no loss, and nothing says how long it takes.
    assert all(
        re.fullmatch(r"T one (0% after T |\d+% after T loss \d \d\d:\d\d left)", line) for line in lines[1:-1]
    ), lines


def test_terminal_shows_a_bar_until_the_stage_ends(tmp_path: Path) -> None:
    write(tmp_path, "good", 0.4)
    text = in_terminal([*SNAKEMAKE, "two.txt"], tmp_path)
    assert "started" not in text
    assert re.search(r"one +\d\.\d s +[━╸╺]+ +\d+%  loss \d  00:0\d left", text)
    assert re.search(r"✓ one +\d\.\d s  one.txt  4 steps", text)
    assert text.rstrip().endswith("two.txt  4 steps")


def in_terminal(command: list[str], folder: Path) -> str:
    """Return a command's output to a terminal, without escape sequences."""
    process, terminal = pty.fork()
    if not process:
        os.chdir(folder)
        os.environ |= {"PYTHONPATH": str(ROOT / "src"), "TERM": "xterm-256color", "COLUMNS": "120"}
        os.execv(command[0], command)  # noqa: S606 - the child of the fork becomes the command
    parts = []
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        parts.append(part)
    _, status = os.waitpid(process, 0)
    assert status == 0, parts
    return re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", b"".join(parts).decode())


def test_logs_of_failed_attempts_stay_until_success(tmp_path: Path) -> None:
    log = tmp_path / "two.log"
    for how in ("refused", "crashed"):
        run(tmp_path, how)
    refused, crashed = (path.read_text() for path in attempts(log))
    assert "zerolora: config.yaml: a mistake" in refused
    assert "ValueError: a fault of ours" in crashed
    assert crashed == log.read_text()
    run(tmp_path, "good")
    assert attempts(log) == []


@pytest.mark.parametrize("task", ["0", "1"])
def test_only_the_first_slurm_task_resets_the_status(tmp_path: Path, task: str) -> None:
    log = tmp_path / "train.log"
    log.with_suffix(".status.json").write_text(json.dumps({"started": 1, "result": "of an earlier run"}))
    code = f"from pathlib import Path; from zerolora import log; log.redirect(Path({str(log)!r}))"
    environment = os.environ | {"SLURM_PROCID": task, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert (read_status(log)["started"] == 1) == (task == "1")


def test_status_belongs_to_the_present_attempt(tmp_path: Path) -> None:
    """Whatever the clocks of the machines say."""
    log = tmp_path / "one.log"
    log.write_text("zerolora: of an earlier attempt\n")
    status_file(log).write_text(json.dumps({"started": 2**62, "result": "4 steps"}))
    forget(log)
    job = Job("one", log, "one.txt")
    assert job.poll() == [] and job.status == {}
    log.write_text("zerolora: of this one\n")
    status_file(log).write_text(json.dumps({"started": 1}))
    assert job.poll() == ["zerolora: of this one"]


def test_deepspeeds_warning_of_no_gpu_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Any command may import it, as `zerolora init` does with some models."""
    theirs = logging.getLogger("DeepSpeed")
    for name, value in {"handlers": [], "propagate": True, "level": logging.NOTSET}.items():
        monkeypatch.setattr(LOGGER, name, value)
    monkeypatch.setattr(theirs, "filters", [])
    set_up()
    package = Path(importlib.util.find_spec("deepspeed").origin).parent  # type: ignore[union-attr, arg-type]
    for path in (package / "accelerator/real_accelerator.py", package / "runtime/engine.py"):
        assert path.is_file()
        theirs.handle(theirs.makeRecord("DeepSpeed", logging.WARNING, str(path), 1, path.name, (), None))
    assert caplog.messages == ["engine.py"]


def test_only_the_tutorials_run_is_followed_by_advice_on_own_rows(tmp_path: Path) -> None:
    write_settings(tmp_path, {"default": {"dataset": "rows"}})
    write_json(tmp_path / "base/rows/evaluate.json", {"accuracy": 0})
    write_json(tmp_path / "default/metrics/evaluate.json", {"accuracy": 0.995})
    reference, mine = {"path": "data/reference.json"}, {"path": "data/mine.json"}
    for data, said in (([reference], True), ([mine], False), ([reference, {"selections": ["own"]}], False)):
        write_json(tmp_path / "config.json", {"prepare": {str(number): each for number, each in enumerate(data)}})
        assert ("train on your own rows" in summary(tmp_path)) == said


def test_many_runs_have_the_lines_of_the_best(tmp_path: Path) -> None:
    runs = [f"run-{number}" for number in range(20)]
    write_settings(tmp_path, {name: {"dataset": "rows"} for name in runs})
    write_json(tmp_path / "base/rows/evaluate.json", {"loss": 3.0})
    for number, name in enumerate(runs[:18]):
        write_json(tmp_path / name / "metrics/evaluate.json", {"loss": 2 - number / 10})
    lines = summary(tmp_path).splitlines()
    assert len(lines) == 8 and lines[0].split()[:6] == ["run-17", "loss", "3.000", "before,", "0.300", "after"]
    assert lines[5] == "the 5 of lowest loss of 20 runs, 2 not evaluated yet; `zerolora show` has all"
    assert lines[7].startswith("Next: open ") and "run-17/report.html" in lines[7]
