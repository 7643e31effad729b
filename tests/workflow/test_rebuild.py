"""`zerolora rebuild`: what a stranger makes again of a push, what an audit finds, and where each tampering is named.

One run is trained, rebuilt once, and audited once; tampered originals are compared with that rebuild.
"""

import contextlib
import hashlib
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Project, begun, refusal, served
from hypothesis import given
from hypothesis import strategies as st

from zerolora import __version__
from zerolora.files import read_json, sha256, write_json
from zerolora.judge.endpoint import Endpoint, Service
from zerolora.publish.record import RECORD, without_prompts
from zerolora.rebuild import audit
from zerolora.rebuild.explanation import other_settings
from zerolora.rebuild.folder import environment, make_folder, run_command
from zerolora.rebuild.original import original
from zerolora.rebuild.rebuild import RESULT, Options, compare, rebuild
from zerolora.rebuild.rebuilt_products import damaged
from zerolora.receipt import Receipt
from zerolora.train.checkpoint.format import read, write
from zerolora.train.launch.stop_signals import STOPPED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ADAPTER = "results/default/adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def project(copy_finished: Callable[[str], Project]) -> Project:
    """Return a project whose run has ended well, and is committed."""
    project = copy_finished("rebuild")
    project.commit("finished")
    return project


@pytest.fixture
def here(project: Project, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in the finished project, which stays as it is."""
    monkeypatch.chdir(project.directory)
    return project.directory


@pytest.fixture(scope="module")
def pushed(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a push."""
    directory = tmp_path_factory.mktemp("shared") / "sums"
    project.run("zerolora", "push", "--run", "default", "--what", "adapter", "--to", str(directory))
    return directory


@pytest.fixture(scope="module")
def stranger(project: Project, pushed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the directory in which someone has rebuilt the push with an empty home, and what was said. The first
    attempt was killed, once the rows were prepared."""
    place, home = tmp_path_factory.mktemp("stranger"), tmp_path_factory.mktemp("home")
    inputs = [f"--{name}={project.directory / path}" for name, path in {"rows": "rows.json", "model": "model"}.items()]
    command = ("zerolora", "rebuild", str(pushed), *inputs)
    # The server of these commands has the package's code and workflow, and no profiles.
    variables = {"HOME": str(home), "XDG_CACHE_HOME": "", "SNAKEMAKE_PROFILE": str(ROOT / "profiles/local")}
    rows = place / "work/rebuild/sums/results/receipts/prepare@rows.json"
    first = begun(*command, directory=place, **variables)
    while not rows.exists() or rows.read_text() == "{}\n":
        assert first.runs()
        time.sleep(0.05)
    first.signal(signal.SIGTERM)
    assert first.wait() == STOPPED
    assert not (place / "work/rebuild/sums" / RESULT).exists()
    before = rows.stat().st_mtime_ns
    result = served(*command, directory=place, **variables)
    assert result.returncode == 0, result.stdout + result.stderr
    assert rows.stat().st_mtime_ns == before
    return place, result.stdout


def test_a_stranger_makes_the_same_bytes(project: Project, stranger: tuple[Path, str]) -> None:
    place, said = stranger
    folder = place / "work/rebuild/sums"
    assert said.splitlines()[-1] == "equal to the byte"
    assert sha256(folder / ADAPTER) == sha256(project.directory / ADAPTER)
    found = read_json(folder / RESULT, "test")
    assert found["verdict"] == "equal to the byte" and found["first_difference"] is None
    compared = {each["path"] for each in found["products"]}
    assert all(each["equal"] and each["original"] == each["rebuilt"] for each in found["products"])
    assert {"order of the rows", "results/data/rows/train.arrow", "results/data/rows/mask.json", ADAPTER} <= compared
    assert "work/checkpoints/default/step-00000002.safetensors" in compared
    assert {"results/default/merged/model.safetensors", "results/default/metrics/evaluate.json"} <= compared
    machine = found["machine"]
    words = f"{machine['processor']}, {machine['kernels']} kernels, torch {machine['torch']}, no GPU"
    assert said.splitlines()[-2] == f"rebuilt on {words}"


def test_a_merged_push_is_the_same_run(project: Project, stranger: tuple[Path, str], tmp_path: Path) -> None:
    """So the rebuild of the adapter has made all that is compared."""
    merged, folder = tmp_path / "merged", stranger[0] / "work/rebuild/sums"
    project.run("zerolora", "push", "--run", "default", "--what", "merged", "--to", str(merged))
    was = original(str(merged), tmp_path)
    assert compare(was, folder).verdict == "equal to the byte"
    flip(merged / "model.safetensors")
    (found,) = damaged(was)
    assert (found.path, found.note) == (
        "results/default/merged/model.safetensors",
        "is not the file that the push lists",
    )


def test_a_push_has_neither_rows_nor_paths(project: Project, pushed: Path) -> None:
    text = (pushed / RECORD).read_text()
    rows = json.loads((project.directory / "rows.json").read_text())
    assert not any(row["instruction"] in text for row in rows)
    assert str(project.directory) not in text and str(Path.home()) + "/" not in text
    assert {path.name for path in pushed.iterdir()} >= {RECORD, "manifest.json", "adapter_model.safetensors"}


def tampered(pushed: Path, folder: Path, **record: Any) -> Path:
    """Return a copy of a push whose record has other values, and whose manifest agrees with it."""
    shutil.copytree(pushed, folder)
    write_json(folder / RECORD, read_json(folder / RECORD, "test") | record)
    manifest = read_json(folder / "manifest.json", "test")
    for name in manifest["files"]:
        manifest["files"][name] = {"sha256": sha256(folder / name), "bytes": (folder / name).stat().st_size}
    write_json(folder / "manifest.json", manifest)
    return folder


def receipts_with(pushed: Path, stage: str, group: str, key: str, value: str) -> dict[str, Any]:
    """Return the receipts of a push, of which one has another value."""
    receipts = read_json(pushed / RECORD, "test")["receipts"]
    receipts[stage][group][key] = value
    return {"receipts": receipts}


def flip(path: Path) -> None:
    """Change a byte at the end of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_byte_of_the_adapter_is_named_before_anything_runs(
    pushed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = shutil.copytree(pushed, tmp_path / "sums")
    flip(copy / "adapter_model.safetensors")
    assert rebuild(str(copy), Options()) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"different, first in {ADAPTER}: {ADAPTER} is not the file that the push lists"
    )
    found = read_json(tmp_path / "work/rebuild/sums" / RESULT, "test")
    assert found["first_difference"] == {"path": ADAPTER, "stage": "train@default"}


def test_what_a_consistent_record_hides_is_named_by_the_rebuild(
    pushed: Path, stranger: tuple[Path, str], tmp_path: Path
) -> None:
    """An adapter, a checkpoint and a row that the recorded settings, rows and code do not make."""
    folder = stranger[0] / "work/rebuild/sums"

    def judged(source: Path) -> tuple[str, dict[str, Any], str]:
        verdict = compare(original(str(source), tmp_path), folder)
        return verdict.verdict, verdict.first or {}, verdict.explanation

    other = shutil.copytree(pushed, tmp_path / "adapter")
    flip(other / "adapter_model.safetensors")
    digest = sha256(other / "adapter_model.safetensors")
    source = tampered(other, tmp_path / "a", **receipts_with(other, "train@default", "outputs", ADAPTER, digest))
    verdict, first, why = judged(source)
    assert (verdict, first["path"]) == ("different", ADAPTER) and first["tensor"].endswith("lora_B.weight")
    assert why == (
        "settings, inputs and code of train@default are the same, and so is the machine, as far as it is recorded: "
        "what was recorded is not what they make"
    )

    digests = read_json(pushed / RECORD, "test")["checkpoints"] | {"2": "0" * 64}
    verdict, first, _ = judged(tampered(pushed, tmp_path / "b", checkpoints=digests))
    assert (verdict, first["path"]) == ("different", "work/checkpoints/default/step-00000002.safetensors")
    assert first["step"] == 2

    rows = "results/data/rows/train.arrow"
    verdict, first, _ = judged(
        tampered(pushed, tmp_path / "c", **receipts_with(pushed, "prepare@rows", "outputs", rows, "0" * 64))
    )
    assert (verdict, first) == ("different", {"path": rows, "stage": "prepare@rows"})
    assert judged(pushed)[0] == "equal to the byte"


def test_other_kernels_may_differ_within_bounds(pushed: Path, stranger: tuple[Path, str], tmp_path: Path) -> None:
    """The record is of another machine, on which losses were rounded in another way, a little or much."""
    folder = stranger[0] / "work/rebuild/sums"

    def digest(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()

    def judged(name: str, factor: float, machine: str = "another", **more: Any) -> Any:
        record = read_json(pushed / RECORD, "test")
        contents, outputs = record["contents"], record["receipts"]["train@default"]["outputs"]
        losses = "results/default/metrics/loss.csv"
        evaluated = "results/default/metrics/evaluate.json"
        header, *rows = contents[losses].splitlines()
        cells = [row.split(",") for row in rows]
        changed = [",".join([step, str(float(loss) * factor), *rest]) for step, loss, *rest in cells]
        contents[losses] = "\n".join([header, *changed]) + "\n"
        outputs[losses] = digest(contents[losses])
        others = json.loads(contents[evaluated]) | more
        contents[evaluated] = json.dumps(others)
        record["receipts"]["evaluate@default"]["outputs"][evaluated] = digest(contents[evaluated])
        resources = "results/default/metrics/train_resources.json"
        figures = json.loads(contents[resources])
        figures["machine"]["processor"] = machine if machine == "another" else figures["machine"]["processor"]
        contents[resources] = json.dumps(figures)
        outputs[resources] = digest(contents[resources])
        return compare(original(str(tampered(pushed, tmp_path / name, **record)), tmp_path), folder)

    within = judged("within", 1 + 1e-6)
    assert within.verdict == "equal within bounds"
    assert within.line.startswith("equal within bounds, first in results/default/metrics/loss.csv, step 1: ")
    assert "processor was 'another'" in within.line
    assert any("the canary's tolerance of a loss, 0.0001" in str(bound) for bound in within.bounds)
    assert judged("beyond", 1 + 1e-3).verdict == "different"
    assert judged("same", 1 + 1e-6, machine="same").verdict == "different"
    # Each figure that differs has a bound, also one that nobody thought of, and none is infinite.
    assert judged("figure", 1 + 1e-6, bits_per_byte=99.0).verdict == "different"
    assert judged("new", 1 + 1e-6, something=1.0).verdict == "different"
    assert judged("endless", 1 + 1e-6, loss=math.inf).verdict == "different"


def test_a_setting_that_was_not_trained_with_is_named_before_training(
    pushed: Path, stranger: tuple[Path, str], tmp_path: Path
) -> None:
    """By what `resolve` has written in the rebuild's folder, which runs before training."""
    receipts = read_json(pushed / RECORD, "test")["receipts"]
    settings = json.loads(receipts["train@default"]["params"]["settings"]) | {"learning_rate": 0.02}
    receipts["train@default"]["params"]["settings"] = json.dumps(settings)
    source = tampered(pushed, tmp_path / "other", receipts=receipts)
    assert other_settings(original(str(source), tmp_path), stranger[0] / "work/rebuild/sums") == (
        "train@default",
        "train.learning_rate was 0.02 and is 0.01",
    )
    assert other_settings(original(str(pushed), tmp_path), stranger[0] / "work/rebuild/sums") is None


def test_the_first_row_that_is_not_the_pinned_one_is_named(here: Path, tmp_path: Path) -> None:
    copy = Project(tmp_path / "copy")
    subprocess.run(["cp", "-a", str(here), str(copy.directory)], check=True)
    rows = json.loads((copy.directory / "rows.json").read_text())
    rows[4]["output"] += "0"
    (copy.directory / "rows.json").write_text(json.dumps(rows))
    result = copy.run("zerolora", "rebuild", "default", check=False)
    assert result.returncode == 2
    assert result.stderr.startswith(
        "zerolora: rows.json: is not what prepare@rows read as rows.json: row 5 is the first that differs; pass --rows"
    )
    assert result.stderr.count("\n") == 1
    assert not (copy.directory / "work/rebuild/default").exists()


@given(st.integers(1, 40), st.floats(0.01, 1), st.integers(0, 5))
def test_segments_are_drawn_alike_and_cover_the_training(count: int, share: float, seed: int) -> None:
    drawn = audit.draw(range(10, 10 * count + 1, 10), share, seed)
    assert len(drawn.segments) == math.ceil(share * count) == len(set(drawn.segments))
    assert sum(each.steps for each in drawn.all) == 10 * count
    assert drawn == audit.draw(range(10, 10 * count + 1, 10), share, seed)


@pytest.mark.parametrize(("count", "tampered", "share"), [(20, 1, 0.05), (40, 1, 0.05), (40, 3, 0.1), (10, 2, 0.5)])
def test_an_audit_finds_a_tampered_segment_as_often_as_it_says(count: int, tampered: int, share: float) -> None:
    """By 2,000 seeds, within four standard errors; which segments were tampered with does not matter."""
    draws = [audit.draw(range(1, count + 1), share, seed) for seed in range(2000)]
    stated = audit.caught(count, tampered, len(draws[0].segments))
    bad = {audit.Segment(number, number + 1) for number in range(0, 2 * tampered, 2)}
    found = sum(not bad.isdisjoint(draw.segments) for draw in draws) / len(draws)
    assert abs(found - stated) <= 4 * math.sqrt(stated * (1 - stated) / len(draws))


def test_an_audit_finds_a_tampered_segment(project: Project, tmp_path: Path) -> None:
    """The second of two. The tampered checkpoint is whole, and its file names its own bytes."""
    seed = next(str(seed) for seed in range(20) if audit.draw([1, 2], 0.5, seed).segments[0].end == 2)
    copy = Project(tmp_path / "copy")
    subprocess.run(["cp", "-a", str(project.directory), str(copy.directory)], check=True)
    command = ("zerolora", "rebuild", "default@HEAD", "--audit", "0.5", "--seed", seed)
    result = copy.run(*command, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    last = result.stdout.splitlines()[-1]
    assert last.startswith(
        f"equal in the audited segments: 1 of 2 segments, 50% of the steps, drawn by seed {seed}, end in the recorded "
        "checkpoints; such an"
    )
    (found,) = copy.directory.glob(f"work/rebuild/*/{RESULT}")
    assert read_json(found, "test")["audit"] == {
        "seed": int(seed), "drawn": [[1, 2]], "of": 2, "share_of_steps": 0.5,
    }  # fmt: skip
    assert "one tampered segment with a probability of 50%, and one of 2 with 100%" in last
    (path,) = copy.directory.glob("work/checkpoints/default/*/step-00000002.safetensors")
    state, manifest = read(path)
    next(iter(state.parts["weight"].values())).view(-1)[0] += 1e-3
    write(path.parent, state, manifest["resume_key"], manifest["run_fingerprint"])
    result = copy.run(*command, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith(
        "different, first in work/checkpoints/default/step-00000002.safetensors, from step 1: "
    )
    flip(path)
    result = copy.run(*command, check=False)
    assert result.returncode == 1
    assert "step-00000002.safetensors is damaged: " in result.stdout.splitlines()[-1]


def test_a_project_in_a_folder_of_its_repository_is_cloned_with_it(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "all/models/sums"
    place.parent.mkdir(parents=True)
    subprocess.run(["cp", "-a", str(project.directory), str(place)], check=True)
    shutil.rmtree(place / ".git")
    subprocess.run(["git", "init", "--quiet", str(tmp_path / "all")], check=True)
    Project(place).commit("all")
    (place / "config/config.yaml").write_text((place / "config/config.yaml").read_text() + "# edited\n")
    monkeypatch.setenv("GIT_DIR", str(project.directory / ".git"))  # as in a hook of another repository
    with contextlib.chdir(place):
        was = original("default", tmp_path)
        make_folder(was, tmp_path / "rebuild", ())
    made = tmp_path / "rebuild" / was.prefix
    assert made == tmp_path / "rebuild/models/sums"
    for name in ("config/config.yaml", "rows.json", "model/config.json"):
        assert sha256(made / name) == sha256(place / name)
    assert not (made / "dvc.yaml").exists() and not (made / "results").exists()


def test_a_record_has_no_prompts_of_other_runs() -> None:
    """They depend on the samples in the whole config, of which a push has a part."""
    prompts = "results/data/rows/prompts.arrow"
    prepared = Receipt({"settings": '{"prompts": true, "seed": 1}'}, {}, {prompts: "0", "results/data/rows/a": "1"})
    sampled = Receipt({}, {prompts: "0"}, {})
    assert without_prompts({"prepare@rows": prepared}) == {
        "prepare@rows": Receipt({"settings": '{"seed": 1}'}, {}, {"results/data/rows/a": "1"})
    }
    both = {"prepare@rows": prepared, "sample@own": sampled}
    assert without_prompts(both) == both


def test_a_served_model_is_not_asked_again(pushed: Path, here: Path, tmp_path: Path) -> None:
    """Its replies are brought, or nothing is run."""
    receipts = read_json(pushed / RECORD, "test")["receipts"]
    settings = {"of": {"served": {"address": "http://localhost:1/v1", "model": "large"}}}
    answers = "results/samples/asked/answers.jsonl"
    receipts["sample@asked"] = {
        "params": {"settings": json.dumps(settings)},
        "inputs": {},
        "outputs": dict.fromkeys((answers, "results/samples/asked/manifest.json"), "0" * 64),
    }
    receipts["prepare@rows"]["inputs"][answers] = "0" * 64
    was = original(str(tampered(pushed, tmp_path / "asked", receipts=receipts)), tmp_path)
    given = (here / "rows.json", here / "model")
    assert refusal(make_folder, was, tmp_path / "rebuild", given) == (
        "work/samples/asked/served.jsonl: sample@asked asked a served model, which is not asked again, and the file of "
        "its replies is not here; pass --rows with it"
    )
    replies = tmp_path / "replies.jsonl"
    replies.write_text('{"key": "a", "messages": []}\n')
    make_folder(was, tmp_path / "rebuild", (*given, replies))
    assert (tmp_path / "rebuild/work/samples/asked/served.jsonl").read_text() == replies.read_text()
    service = Service("samples.asked.of.served", "address", "http://localhost:1/v1", "large", None, "docs/sampling.md")
    assert refusal(Endpoint, service, {}, environment(was, tmp_path / "rebuild")).startswith(
        "samples.asked.of.served: would ask http://localhost:1/v1 again, which a rebuild never does; pass --rows with"
    )


def test_a_push_runs_none_of_its_files(pushed: Path, stranger: tuple[Path, str], tmp_path: Path) -> None:
    """A module of Python in its folder is not imported in place of the package's."""
    was = original(str(pushed), tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "zerolora.py").write_text("raise SystemExit('imported')\n")
    command = [sys.executable, "-m", "zerolora", "--version"]
    run_command(was, folder, command, "it failed")
    assert subprocess.run(command, cwd=folder, check=False, capture_output=True).returncode != 0


def test_a_forged_record_is_one_line(here: Path, pushed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options and programs for paths, products that are not compared, figures that nobody computed, files of others."""

    def refused(source: str, **options: Any) -> str:
        return refusal(rebuild, source, Options(**{"output": tmp_path / "output"} | options))

    monkeypatch.chdir(tmp_path)
    rows = here / "rows.json"
    for name, group, path, why in (
        ("option", "inputs", "--snakefile=rows.json", "is no path of a file in a project"),
        ("above", "outputs", "../away", "is no path of a file in a project"),
    ):
        receipts = receipts_with(pushed, "train@default", group, path, "0" * 64)
        assert why in refused(str(tampered(pushed, tmp_path / name, **receipts)))
    for name, key, value in (("names", "names", "--names a=b --x"), ("device", "device", "cpu; rm")):
        receipts = receipts_with(pushed, "train@default", "params", key, value)
        assert "which no rule passes" in refused(str(tampered(pushed, tmp_path / name, **receipts)))
    assert "has no text to have a path in" in refused(str(tampered(pushed, tmp_path / "whole", with_paths=[ADAPTER])))
    other = {**read_json(pushed / RECORD, "test")["contents"], "results/default/metrics/loss.csv": "step,loss\n"}
    table = str(tampered(pushed, tmp_path / "table", contents=other))
    assert "loss.csv is not what its receipt lists" in refused(table)
    receipts = read_json(pushed / RECORD, "test")["receipts"]
    del receipts["train@default"]["outputs"][ADAPTER]
    assert refused(str(tampered(pushed, tmp_path / "unmade", receipts=receipts))).endswith(
        "has adapter_model.safetensors, which no stage of its record made; push it again"
    )
    config = read_json(pushed / RECORD, "test")["config"]
    config["prepare"]["rows"]["path"] = str(rows)
    outside = str(tampered(pushed, tmp_path / "outside", config=config))
    line = refused(outside, given=(here / "rows.json", here / "model"))
    assert "its config names '/" in line and "a path of this machine" in line
    assert not (tmp_path / "output").exists()


def test_what_cannot_be_rebuilt_is_one_line(
    here: Path, pushed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(source: str, **options: Any) -> str:
        return refusal(rebuild, source, Options(**{"output": tmp_path / "output"} | options))

    assert refused("other").startswith("run other: there is no receipt results/receipts/train@other.json of a job that")
    assert refused("default@v9") == "'default@v9': git here has no revision 'v9'; `git log` lists them"
    (first,) = subprocess.run(
        ["git", "rev-list", "--max-parents=0", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.split()
    assert refused(f"default@{first}") == (
        f"default@{first}: that revision has no dvc.lock, so it has no results; name one that has"
    )
    assert refused("./rows").startswith("./rows: there is no such directory; name one that `zerolora push` wrote")
    assert refused("./model").startswith("./model: has no manifest.json, so `zerolora push` did not write it")
    assert refused("default", share=0.1) == (
        "--audit 0.1: needs the checkpoints of 10 segments, and 2 checkpoints of run default are here; train it with "
        "train.keep_checkpoints: 10 or more and train.checkpoint_steps to match, or audit a larger share"
    )
    assert refused(str(pushed), share=0.5).startswith(
        "--audit 0.5: needs the checkpoints of 2 segments, and 0 checkpoints"
    )

    monkeypatch.chdir(tmp_path)
    older = str(tampered(pushed, tmp_path / "older", zerolora="0.1.0"))
    line = refused(older)
    assert line.startswith(f"{older}: was made by zerolora 0.1.0, and {__version__} is installed; run `")
    assert line.endswith(f"or pass --zerolora {__version__} to rebuild with that")
    assert refused(older, version=__version__).startswith(
        "model/chat_template.jinja: fetch@tiny read it, and it is not here;"
    )
    rows = tmp_path / "other/rows.json"
    rows.parent.mkdir()
    rows.write_text("[]")
    line = refused(str(pushed), given=(rows,))
    assert line.startswith(f"{rows}: is not what prepare@rows read as rows.json; pass --rows with the file of sha256 ")
    assert refused(str(pushed), given=(here / "model",)).startswith(
        "rows.json: prepare@rows read it, and it is not here; pass --rows with the file or the directory that has it"
    )
    files = {"config/tasks/mine.py": "TASK = 1"}
    assert refused(str(tampered(pushed, tmp_path / "code", files=files))).endswith(
        "comes with Python that the rebuild would run (config/tasks/mine.py); read it in its record.json, then pass "
        "--trust-code"
    )
    place = "work/checkpoints/default/ab/step-00000002.safetensors"
    receipts = receipts_with(pushed, "prepare@rows", "inputs", place, sha256(rows))
    assert refused(str(tampered(pushed, tmp_path / "placed", **receipts)), given=(here, rows)).endswith(
        f"its record has the input {place}, where no rows or models can be"
    )
    files = {"config/tasks/../../away": ""}
    code = str(tampered(pushed, tmp_path / "away", files=files))
    assert "'config/tasks/../../away' is no path of a file in a project" in refused(code)
    code = str(tampered(pushed, tmp_path / "elsewhere", files={"src/away": ""}))
    assert refused(code) == f"{code}: its record has the file src/away, which is none of a config's files"
    (broken := shutil.copytree(pushed, tmp_path / "broken") / RECORD).write_text('{"format": 2}')
    assert refused(str(broken.parent)).startswith(f"{broken}: ")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 2048))
    assert refused(str(pushed)).startswith(f"{tmp_path / 'output'}: the rebuild needs ")
    assert not (tmp_path / "output").exists() and not [*tmp_path.glob(".output*")]
