"""`zerolora push` of a run that the whole pipeline made: to a directory, to a loopback hub, and what it refuses."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import BIN, Project, project_environment, refusal
from engines import edit_config, snakemake_ran
from huggingface_hub import ModelCard
from loopback_repositories import Repositories, serving
from package_folder import EVIDENCE
from rocrate.rocrate import ROCrate

from zerolora import __version__
from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.config.schema import HubData
from zerolora.config.settings import FetchAdapterSettings, FetchHub, TrainSettings
from zerolora.errors import UserError
from zerolora.evidence import envelope
from zerolora.evidence.signing import attest, signed
from zerolora.evidence.verify import Trust, verify
from zerolora.fetch.data_sets import fetch_adapter
from zerolora.fetch.models import fetch
from zerolora.files import read_json, sha256
from zerolora.methods.peft_format import ADAPTER, CONFIG
from zerolora.publish.card import LIBRARIES, model_card
from zerolora.publish.finished import FinishedRun, finished_run, product_of
from zerolora.publish.push import push
from zerolora.rebuild.original import original
from zerolora.rebuild.rebuilt_products import damaged
from zerolora.report.run_settings import settings_of_run
from zerolora.train.launch.stop_signals import STOPPED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOKEN = "hf_1234567890abcdef"  # noqa: S105
TO = "me/sums"


@pytest.fixture(scope="module")
def finished(make_project: Callable[[str], Project]) -> Project:
    """Return a project whose run has ended well, with absolute paths in its config.

    The whole pipeline takes half a minute.
    """
    project = make_project("push")
    edit_config(
        project,
        **{
            "fetch.directory.tiny.path": str(project.directory / "model"),
            "prepare.rows.path": str(project.directory / "rows.json"),
        },
    )
    snakemake_ran(project)
    return project


@pytest.fixture
def here(finished: Project, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in the finished project, which stays as it is."""
    monkeypatch.chdir(finished.directory)
    return finished.directory


@pytest.fixture
def card(here: Path) -> str:
    """Return the model card of the finished run's adapter."""
    run = finished_run("default")
    return model_card(run, product_of(run, "adapter"), TO)


@pytest.fixture
def copy(finished: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a copy of the finished project."""
    place = tmp_path / "copy"
    subprocess.run(["cp", "-a", str(finished.directory), str(place)], check=True)
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repositories]:
    """Serve an empty hub, to which this process is logged in, and keep its client from the user's own."""
    with serving(Repositories(TOKEN)) as server:
        constants = {
            "ENDPOINT": server.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }
        for name, value in constants.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("time.sleep", lambda _: None)
        yield server


def pushed(what: str = "adapter", to: str = TO, **options: Any) -> str:
    return push(
        **{"run": "default", "what": what, "to": to, "revision": None, "private": False, "message": None} | options
    )


def refused(**options: Any) -> str:
    with pytest.raises(UserError) as raised:
        pushed(**options)
    (line,) = str(raised.value).splitlines()
    assert TOKEN not in line
    return line


def begun(finished: Project, hub: Repositories, home: Path) -> subprocess.Popen[str]:
    """Begin to push in a process of its own, since the hub's client reads its variables when it is imported."""
    command = [str(BIN / "zerolora"), "push", "--run", "default", "--what", "adapter", "--to", TO, "--private"]
    variables = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home)}
    environment = project_environment(finished.directory) | variables
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=finished.directory, env=environment, text=True, stdout=pipe, stderr=pipe)


def test_the_command_pushes_an_adapter(finished: Project, tmp_path: Path) -> None:
    with serving(Repositories(TOKEN)) as hub:
        process = begun(finished, hub, tmp_path)
        out, err = process.communicate()
    repository = hub.repositories[TO]
    commit = repository.branches["main"]
    assert (process.returncode, out) == (0, f"{TO}@{commit}\n"), err
    said = rf"9 files, \d+\.\d KiB in {re.escape(f'{hub.endpoint}/{TO}/commit/{commit}')}\n"
    assert re.fullmatch(said, err), err  # the sizes hold the length of this folder's path
    assert repository.private
    assert repository.messages == ["initial commit", "Push adapter of run default"]
    assert not any(TOKEN.encode() in data for data in repository.files.values())
    assert not any(TOKEN in asked.path for asked in hub.asked)


def test_a_push_that_is_stopped_commits_nothing(finished: Project, tmp_path: Path) -> None:
    with serving(Repositories(TOKEN)) as hub:
        hub.stalls = True
        process = begun(finished, hub, tmp_path)
        assert hub.stalled.wait(120)
        process.terminate()
        out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (STOPPED, "")
    assert err == "zerolora: stopped by SIGTERM; me/sums has either all of the push or none of it\n"
    assert hub.repositories[TO].messages == ["initial commit"]


def test_fetch_and_peft_take_a_pushed_adapter_back(here: Path, hub: Repositories, tmp_path: Path) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    repository, commit = pushed().split("@")
    fetch_adapter(FetchAdapterSettings(repository=repository, revision=commit, license="MIT"), tmp_path / "back")
    adapter = here / "results/default/adapter"
    assert (tmp_path / "back" / ADAPTER).read_bytes() == (adapter / ADAPTER).read_bytes()
    assert hub.repositories[TO].files["generation_config.json"] == (adapter / "generation_config.json").read_bytes()
    # All but the base model's directory, which is of this machine.
    pushed_config, own = (json.loads((folder / CONFIG).read_text()) for folder in (tmp_path / "back", adapter))
    assert own["base_model_name_or_path"] == str(here / "model")
    assert pushed_config == own | {"base_model_name_or_path": "./model"}
    base = AutoModelForCausalLM.from_pretrained(here / "model")
    model = PeftModel.from_pretrained(base, str(tmp_path / "back"))
    loaded = {name.replace(".default", ""): tensor for name, tensor in model.state_dict().items() if "lora_" in name}
    saved = load_file(adapter / ADAPTER)
    assert loaded.keys() == saved.keys()
    assert all((loaded[name] == saved[name]).all() for name in saved)


def test_fetch_takes_a_pushed_merged_model_back(here: Path, hub: Repositories, tmp_path: Path) -> None:
    repository, commit = pushed("merged").split("@")
    settings = FetchHub(repository=repository, revision=commit, license="Apache-2.0")
    fetch(settings, tmp_path / "weights", tmp_path / "model")
    merged = json.loads((here / "results/default/merged/manifest.json").read_text())["files"]
    assert json.loads((tmp_path / "model/manifest.json").read_text())["files"] == merged


def test_what_is_there_already_is_not_committed_again(here: Path, hub: Repositories) -> None:
    first = pushed()
    written = len(hub.written())
    assert pushed() == first
    assert len(hub.written()) == written
    assert pushed(message="again", what="merged") != first
    assert hub.repositories[TO].messages[-1] == "again"


def test_a_push_takes_the_files_of_an_earlier_one_away_and_no_others(here: Path, hub: Repositories) -> None:
    """transformers would load an adapter that lies beside a merged model, too."""
    pushed()
    repository = hub.repositories[TO]
    repository.add("main", repository.files | {"picture.png": b"x"}, "a picture")
    pushed("merged")
    merged = json.loads((here / "results/default/merged/manifest.json").read_text())["files"]
    others = {"record.json", "croissant.json", "ro-crate-metadata.json", "statements/provenance.json"}
    assert repository.files.keys() == {*merged, *others, "README.md", "manifest.json", ".gitattributes", "picture.png"}
    assert len(repository.messages) == 4
    repository.add("main", repository.files | {"pytorch_model.bin": b"x"}, "somebody's")
    assert refused() == (
        "me/sums: has pytorch_model.bin, which no push wrote and which libraries would load with the pushed files; "
        "delete it there, or name another repository"
    )
    assert repository.messages[-1] == "somebody's"


def test_a_rebuild_reads_a_pushed_repository(here: Path, hub: Repositories, tmp_path: Path) -> None:
    """Rows and checkpoints are pushed only if the user includes them, and nothing has a path of this machine: its own
    are below inputs."""
    rows = sha256(here / "rows.json")
    repository, commit = pushed(include=["rows", "checkpoints"]).split("@")
    files = hub.repositories[TO].files
    assert files[f"rows/{rows}"] == (here / "rows.json").read_bytes()
    assert [name for name in files if name.startswith("checkpoints/")] == ["checkpoints/step-00000002.safetensors"]
    assert str(here).encode() not in files["record.json"]
    made = original(repository, tmp_path)
    assert made.repository == f"{TO}@{commit}" and "inputs/rows.json" in made.receipts["prepare@rows"].inputs
    assert "results/default/adapter/adapter_config.json" in made.with_paths
    made.download()
    assert list(damaged(made)) == []
    assert made.find("inputs/rows.json") and [*made.checkpoint_files] == [2]
    pushed()
    assert not [name for name in hub.repositories[TO].files if name.startswith(("checkpoints/", "rows/"))]
    assert refused(include=["all"]) == "--include 'all': use rows or checkpoints"
    assert refusal(original, "me/none", tmp_path).startswith("model me/none: no such model, or a private one")


def test_a_push_goes_to_a_branch(here: Path, hub: Repositories) -> None:
    assert refused(revision="v1") == (
        "me/sums: no such repository, or the token has no access to it; correct --to, or run `hf auth login`, or set "
        "HF_TOKEN to a token with write access"
    )
    assert hub.repositories == {}
    pushed("merged")
    assert refused(revision="v1") == (
        "--revision v1: me/sums has no such branch; create it with `hf repos branch create me/sums v1`, or omit "
        "--revision for main"
    )
    repository = hub.repositories[TO]
    main = repository.branches["v1"] = repository.branches["main"]
    assert pushed(revision="v1") == f"{TO}@{repository.branches['v1']}"
    assert repository.branches["main"] == main != repository.branches["v1"]
    card = repository.commits[repository.branches["v1"]]["README.md"].decode()
    assert 'PeftModel.from_pretrained(base, "me/sums", revision="v1")' in card


@pytest.mark.parametrize(
    ("start", "refusal", "said"),
    [
        ("/api/models/me/sums", (401, None), "me/sums: the hub rejected the token; run `hf auth login`"),
        ("/api/repos/create", (403, None), "me/sums: the token has no write access (refused); name a repository of"),
        ("/me/sums.git", (403, None), "me/sums: the token has no write access (refused); name a repository of"),
        ("/lfs/", (400, None), "me/sums: the hub responded with status 400; nothing was committed, run it again"),
        ("/api/models/me/sums/commit", (409, None), "me/sums: changed during the push (refused); run it"),
        (
            "/api/models/me/sums/commit",
            (500, None),
            "me/sums: the hub responded with status 500 (refused); nothing was",
        ),
    ],
)
def test_refusal_by_the_hub_is_one_line_and_commits_nothing(
    start: str, refusal: tuple[int, str | None], said: str, here: Path, hub: Repositories
) -> None:
    hub.refusals[start] = [refusal]
    line = refused()
    assert line.startswith(said)
    assert "secret" not in line  # of the addresses that large files go to
    assert [len(repository.messages) for repository in hub.repositories.values()] in ([], [1])
    pushed()
    assert len(hub.repositories[TO].messages) == 2


def test_a_repository_that_changes_meanwhile_is_left_alone(here: Path, hub: Repositories) -> None:
    pushed("merged")
    hub.meanwhile = lambda repository: repository.add("main", {"README.md": b"mine"}, "meanwhile")
    assert refused() == "me/sums: changed during the push (The branch has moved); run it again"
    assert hub.repositories[TO].files == {"README.md": b"mine"}


def test_without_a_hub_or_a_login_it_is_one_line(
    here: Path, hub: Repositories, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert refused() == (
        "--to me/sums: not logged in to the hub; run `hf auth login`, or set HF_TOKEN to a token with write access"
    )
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert refused().startswith("me/sums: the hub rejected the token; run")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert refused(to="others/sums").startswith("others/sums: the token has no write access (You don't have the rights")
    assert (
        refused(to="a/b/c") == "--to a/b/c: is not the name of a repository; use OWNER/NAME, or ./a/b/c for a directory"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert refused() == "me/sums: HF_HUB_OFFLINE is set; unset it to push"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
    assert refused() == "me/sums: the hub cannot be reached (ConnectError); check the network, then run it again"
    assert hub.repositories == {}


def test_what_is_to_be_private_is_not_pushed_to_a_public_repository(here: Path, hub: Repositories) -> None:
    pushed()
    assert refused(what="merged", private=True).startswith(
        "--private: me/sums already exists and is public; make it private"
    )
    assert len(hub.repositories[TO].messages) == 2
    with pytest.raises(UserError, match="use ./results/sums for the directory, or hf://results/sums for"):
        pushed(to="results/sums")


def test_a_directory_gets_the_whole_push_and_is_replaced_whole(here: Path, tmp_path: Path) -> None:
    to = tmp_path / "shared/sums"
    assert pushed(to=str(to)) == str(to)
    manifest = json.loads((to / "manifest.json").read_text())
    assert manifest["pushed"] == {"run": "default", "what": "adapter"}
    assert files_in(to) == {*manifest["files"], "manifest.json"}
    assert all(sha256(to / name) == entry["sha256"] for name, entry in manifest["files"].items())
    before = (to / ADAPTER).stat().st_ino
    pushed(to=str(to))
    assert (to / ADAPTER).stat().st_ino == before  # nothing was written again
    (to / ADAPTER).write_bytes(b"damaged")
    pushed(to=str(to))
    assert sha256(to / ADAPTER) == manifest["files"][ADAPTER]["sha256"]
    pushed("merged", to=str(to))
    assert not (to / ADAPTER).exists()
    assert (to / "model.safetensors").read_bytes() == (here / "results/default/merged/model.safetensors").read_bytes()
    assert [path.name for path in to.parent.iterdir()] == ["sums"]


def test_a_directory_that_no_push_wrote_stays_as_it_is(here: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/manifest.json").write_text("{}")
    (tmp_path / "file").write_text("x")
    for name in ("mine", "file"):
        assert refused(to=f"{tmp_path}/{name}") == (
            f"--to {tmp_path}/{name}: already exists, and no push wrote it; name another directory, or remove it"
        )
    assert refused(to="./results/shared").startswith("--to results/shared: results belongs to the pipeline; choose")
    assert refused(to="./out", private=True).startswith("--to ./out: is a directory; --revision, --private and")
    assert not (here / "out").exists()


def test_only_a_finished_run_is_pushed(copy: Path, hub: Repositories) -> None:
    assert refused(run="other") == "--run 'other': config/config.yaml has no such run; use one of default"
    assert refused(what="gguf") == "--what 'gguf': use one of adapter, merged"
    accepted = copy / "results/default/accepted.json"
    accepted.unlink()
    assert refused() == (
        "run default is not finished: results/default/accepted.json is missing; run `snakemake --profile "
        "profiles/local results/config.json results/default/accepted.json`"
    )
    config = copy / "config/config.yaml"
    text = config.read_text()
    config.write_text(text.replace("max_new_tokens: 4", "max_new_tokens: 4\n  fail_if: accuracy < 0.5"))
    assert refused().startswith(
        "run default did not pass its gate, evaluate.fail_if: accuracy 0 < 0.5; difference +0.000, 95 % interval"
    )
    assert hub.asked == []


def test_results_of_other_settings_or_code_are_not_pushed(
    copy: Path, hub: Repositories, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = copy / "config/config.yaml"
    text = config.read_text()
    config.write_text(text.replace("learning_rate: 0.01", "learning_rate: 0.02"))
    assert refused() == (
        "run default is out of date: since train@default runs.default.train.learning_rate was 0.01, and is 0.02; run "
        "`snakemake --profile profiles/local results/config.json results/default/accepted.json`"
    )
    config.write_text(text.replace("examples: 2", "examples: 2  # a remark"))
    lock = copy / "dvc.lock"
    recorded = lock.read_text()
    code = re.search(r"^ +([0-9a-f]{64})$", recorded, re.MULTILINE)
    assert code
    lock.write_text(recorded.replace(code[1], code[1][::-1]))
    assert re.search(r": since \w+@\w+ the code has changed; run `snakemake", refused())
    lock.unlink()
    assert refused().startswith("dvc.lock: has no record of run default, so its settings are unknown; run `snakemake")
    assert hub.asked == []
    lock.write_text(recorded)
    pushed()


@pytest.mark.parametrize(
    ("what", "damaged", "said"),
    [
        ("adapter", "results/default/adapter/adapter_model.safetensors", "is not the file that the manifest of its"),
        ("merged", "results/default/merged/model.safetensors", "is not the file that the manifest of its stage lists"),
        ("adapter", "results/default/metrics/difference.json", "is not the file that dvc.lock lists; restore it: `dvc"),
        ("adapter", "results/default/metrics/train.json", "is not the file that dvc.lock lists; restore it: `dvc"),
    ],
)
def test_damaged_files_are_not_pushed(what: str, damaged: str, said: str, copy: Path, hub: Repositories) -> None:
    path = copy / damaged
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content.replace(b"0", b"1", 1))
    assert refused(what=what).startswith(f"{damaged}: {said}")
    path.unlink()
    assert refused(what=what).startswith(f"{damaged}: ")
    assert hub.asked == []


def test_card_matches_the_files(here: Path, hub: Repositories) -> None:
    pushed()
    text = hub.repositories[TO].files["README.md"].decode()
    data: Any = ModelCard(text).data
    figures = json.loads((here / "results/default/metrics/difference.json").read_text())
    (result,) = data.eval_results
    assert (result.metric_value, result.metric_args["high"]) == (figures["accuracy"], figures["accuracy_high"])
    assert (data.license, data.library_name, data.base_model) == ("apache-2.0", "peft", None)
    assert data.language is None
    assert "| `rows.json` | `rows.json` | a file of the author's | not known; " in text
    assert sha256(here / "rows.json") in text
    stats = read_json(here / "results/data/rows/stats.json", "")
    counts = " | ".join(f"{stats[f'train_{name}']:,}" for name in ("rows", "tokens", "supervised_tokens"))
    assert f"| `rows.json` | {counts} | 100.0% |" in text
    assert sha256(here / "model/model.safetensors") in text
    assert f"| {figures['loss']:.4g} |" in text
    assert f"[{figures['base_accuracy_low']:.4g}, {figures['base_accuracy_high']:.4g}]" in text
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert commit in text


def test_the_card_has_the_hyperparameters_of_the_run(here: Path, card: str) -> None:
    settings, results = settings_of_run(here / "results", "default")["train"], here / "results/default"
    train = TrainSettings.model_validate(settings).model_dump(mode="json")
    trained, chosen = (read_json(results / name, "") for name in ("metrics/train.json", "zero.json"))
    expected = {name: train[name.replace(" ", "_")] for name in HYPERPARAMETERS}
    expected |= {"betas": ", ".join(map(str, train["betas"]))}
    expected |= {f"lora.{name}": train["lora"][name] for name in ("r", "alpha", "dropout")}
    expected |= {name: trained[name.replace(" ", "_")] for name in ("trainable parameters", "steps", "tokens")}
    expected |= {name: chosen["zerolora"][name] for name in ("strategy", "precision", "attention")}
    said_of(card, "Method", expected)


def test_the_card_has_the_hours_of_the_training(here: Path, card: str) -> None:
    used = read_json(here / "results/default/metrics/train_resources.json", "")
    seconds, ranks = used["total_seconds"], used["ranks"]
    expected = {"device": "cpu", "ranks": ranks, "training, in seconds": seconds, "tokens/s": used["tokens_per_second"]}
    said_of(card, "Hardware and time", expected | {"rank-hours (on CPU)": seconds * ranks / 3600})


def test_the_card_has_the_versions_of_the_lock_file(here: Path, card: str) -> None:
    lock = here / "envs/requirements.lock"
    pins = dict(re.findall(r"^([a-z]+)==(\S+)", lock.read_text(), re.MULTILINE))
    expected = {name: pins[name] for name in LIBRARIES}
    expected |= {"zerolora": __version__, "sha256 of `envs/requirements.lock`": sha256(lock)}
    said_of(card, "Versions", expected)


HYPERPARAMETERS = (
    *("method", "learning rate", "schedule", "warmup ratio", "optimizer", "epsilon", "weight decay", "global batch"),
    *("epochs", "max steps", "seed"),
)


def said_of(card: str, heading: str, expected: dict[str, Any]) -> None:
    """Check that the table below a heading of a card has these values."""
    section = card.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| (.+) \| (.+) \|$", section, re.MULTILINE))
    assert {name: rows.get(name) for name in expected} == {name: as_said(value) for name, value in expected.items()}


def as_said(value: Any) -> str:
    """Return a value as a card has it."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else f"`{value}`"


def test_the_config_of_the_card_makes_the_same_run(here: Path, hub: Repositories, tmp_path: Path) -> None:
    pushed()
    text = hub.repositories[TO].files["README.md"].decode()
    config = text.split("```yaml\n")[1].split("```")[0]
    (tmp_path / "config.yaml").write_text(config.replace("/path/to", str(here)))
    again, own = (resolve(load(path)) for path in (tmp_path / "config.yaml", Path("config/config.yaml")))
    assert again.runs == own.runs
    assert (again.prepare, again.fetch, again.evaluate) == (own.prepare, own.fetch, own.evaluate)


def test_nothing_pushed_names_this_machine(here: Path, hub: Repositories) -> None:
    for what in ("adapter", "merged"):
        pushed(what)
        for name, data in hub.repositories[TO].files.items():
            assert str(here.parent).encode() not in data, name
            assert f"{Path.home()}/".encode() not in data, name
            assert name.endswith(".safetensors") or not re.search(rf"\b{socket.gethostname()}\b".encode(), data), name


def test_the_card_of_a_run_on_a_base_and_data_of_the_hub(copy: Path) -> None:
    """As such a run leaves its manifests; with names that would be Markdown, HTML and YAML."""
    from markdown_it import MarkdownIt

    change(copy / "resources/models/tiny/manifest.json", source={
        "source": "hub", "repository": "some/model", "revision": "0" * 40, "license": "Llama 9: <b>Terms</b>"
    }, license="Llama 9: <b>Terms</b>")  # fmt: skip
    base = {"name": "some/model", "revision": "0" * 40, "weights": "1" * 64}
    change(copy / "results/default/adapter/manifest.json", base_model=base)
    nasty = "a|b` <script>alert(1)</script> [x](http://e.org)\n# heading\n---\n"
    run = finished_run("default")
    config = run.config.model_copy(deep=True)
    config.fetch.data["d"] = HubData(repository="some/data", revision="2" * 40, license=nasty, files=["*.json"])
    folder = copy / "data/hub/d"
    folder.mkdir(parents=True)
    origin = {"repository": "some/data", "revision": "2" * 40}
    (folder / "manifest.json").write_text(json.dumps({"source": origin, "license": nasty, "files": {}}))
    run = FinishedRun("default", config, run.resolved, {})
    change(
        copy / "results/data/rows/manifest.json", read={f"data/hub/d/{nasty}.json": "3" * 64, "/home/me/x": "4" * 64}
    )
    text = model_card(run, product_of(run, "adapter"), TO)
    data: Any = ModelCard(text).data
    assert (data.base_model, data.base_model_relation) == ("some/model", "adapter")
    assert (data.license, data.license_name) == ("other", "llama-9-b-terms-b")
    assert data.datasets == ["some/data"]
    assert f'from_pretrained("some/model", revision="{"0" * 40}", dtype="auto")' in text
    assert "/home/me" not in text
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(text.split("---\n", 2)[2])
    assert "<script" not in html
    assert "<a " not in html
    assert html.count("<h1>") == 1
    rows = [row for row in html.split("<tr>") if "3" * 64 in row]
    assert [row.count("<td>") for row in rows] == [5]


def test_the_card_has_sources_further_tasks_and_the_adapter_that_training_started_from(copy: Path) -> None:
    source = {"train_rows": 1000, "train_tokens": 2000, "train_supervised_tokens": 500, "train_supervised_share": 0.125}
    change(copy / "results/data/rows/stats.json", sources={"a|b": source})
    change(copy / "results/default/adapter/manifest.json", from_adapter={
        "directory": "/home/me/x", "sha256": "5" * 64, "source": {"repository": "some/lora"}, "license": "MIT"
    })  # fmt: skip
    for folder, accuracy in (("base/rows", 0.25), ("default", 0.75)):
        (copy / "results" / folder / "tasks").mkdir(exist_ok=True)
        (copy / "results" / folder / "tasks/boolq.json").write_text(json.dumps({"acc": accuracy, "acc_stderr": 0.1}))
        (copy / "results" / folder / "tasks/boolq.answers.json").write_text("{}")
    run = finished_run("default")
    run = FinishedRun("default", run.config, run.resolved.model_copy(update={"tasks": {"boolq": None}}), {})
    text = model_card(run, product_of(run, "adapter"), TO)
    assert "| `a\\|b` | 1,000 | 2,000 | 500 | 12.5% |\n" in text
    assert f"| initial weights | `an adapter with sha256 {'5' * 64}, repository some/lora, MIT` |\n" in text
    assert "/home/me" not in text
    assert "Further task `boolq`:\n\n| metric | base model |" in text
    assert "| `acc` | 0.25 [0.054, 0.446] | 0.75 [0.554, 0.946] | 0.5 |\n" in text


def test_the_card_of_a_run_on_gpus_that_was_resumed_and_not_evaluated(copy: Path) -> None:
    source = {"source": "package", "package": "some-model", "version": "1.0", "file": "m.gguf", "sha256": "6" * 64}
    change(copy / "resources/models/tiny/manifest.json", source=source)
    change(copy / "results/default/metrics/train_resources.json", resumes=2, peak_gpu_bytes_worst_rank=2**30)
    difference = copy / "results/default/metrics/difference.json"
    difference.unlink()
    difference.write_text('{"enabled": false}')
    run = finished_run("default")
    settings, resolved = run.settings, run.resolved
    hardware = settings.render.hardware.model_copy(update={"gpu": "A100-80GB-SXM", "compute_capability": 8.0})
    changed = {
        "render": settings.render.model_copy(update={"device": "cuda", "hardware": hardware}),
        "pack": settings.pack.model_copy(update={"capacity": 256}),
        "accept": settings.accept.model_copy(update={"fail_if": "loss > 9"}),
    }
    resolved = resolved.model_copy(update={"runs": {"default": settings.model_copy(update=changed)}})
    run = FinishedRun("default", run.config, resolved, {})
    product = product_of(run, "adapter")
    card = model_card(run, replace(product, files=product.files | {"chat_template.jinja": {"bytes": 1}}), TO)
    assert f"| sha256 of the package's file | `{'6' * 64}` |" in card
    assert "`chat_template.jinja` is the chat template of training; give it to the tokenizer." in card
    assert "The model was not evaluated.\n\nThe run passed its gate, which is to fail if `loss > 9`." in card
    assert "Training was resumed 2 times; times are those of the last attempt." in card
    said_of(card, "Method", {"packing, tokens of a packed row": 256})
    used = read_json(copy / "results/default/metrics/train_resources.json", "")
    hours = used["total_seconds"] * used["ranks"] / 3600
    expected = {"GPU, as the config names it": "A100-80GB-SXM", "compute capability": 8.0, "GPU-hours": hours}
    said_of(card, "Hardware and time", expected)
    assert "| peak GPU memory of the worst rank | 1.00 GiB |" in card
    change(copy / "results/default/usage.json", accounted_seconds=7200.0, accounted_rank_hours=4.0)
    card = model_card(run, replace(product, files=product.files | {"tokenizer.json": {"bytes": 1}}), TO)
    said_of(card, "Hardware and time", {"training, in seconds": 7200.0, "GPU-hours": 4.0})
    assert "resumed" not in card
    assert f'tokenizer = AutoTokenizer.from_pretrained("{TO}")' in card
    assert "base.resize_token_embeddings(len(tokenizer))" in card


def test_a_card_without_a_figure_is_not_written(copy: Path) -> None:
    """Where a stage wrote other keys than the card's template reads."""
    path = copy / "results/default/metrics/train.json"
    content = json.loads(path.read_text())
    del content["published_step"]
    path.unlink()
    path.write_text(json.dumps(content))
    run = finished_run("default")
    run = FinishedRun("default", run.config, run.resolved, {})
    with pytest.raises(
        UserError, match=r"^run default: its results lack a figure of the card \(.*'published_step'\); run `"
    ):
        model_card(run, product_of(run, "adapter"), TO)


def files_in(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """Return a key of SSH."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("apt-get install openssh-client")
    path = tmp_path / "key"
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "builder", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return path


def test_a_push_states_what_it_was_made_from(here: Path, tmp_path: Path, key: Path) -> None:
    to = tmp_path / "sums"
    pushed(to=str(to), sign=str(key))
    trusted = tmp_path / "allowed"
    trusted.write_text(f"me@example.org {key.with_suffix('.pub').read_text()}")
    (outcome,), _ = verify(to, Trust(trusted))
    assert outcome.what.startswith(
        "statements/provenance.json: 6 of 6 files as built; signed by me@example.org, SHA256:"
    )
    assert outcome.word == "verified"
    file = envelope.read(to / "statements/provenance.json")
    own = {"README.md", "manifest.json", "statements/provenance.json", "croissant.json", "ro-crate-metadata.json"}
    own.add("record.json")
    assert file.statement.subjects == {name: sha256(to / name) for name in files_in(to) - own}
    definition = file.statement.predicate["buildDefinition"]
    assert definition["externalParameters"]["config"]["train"]["learning_rate"] == 0.01
    assert definition["internalParameters"]["code"]["train@default"]
    found = {each["name"]: each["digest"] for each in definition["resolvedDependencies"]}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert found == {
        "base model: model.safetensors": {"sha256": sha256(here / "model/model.safetensors")},
        "data: rows.json": {"sha256": sha256(here / "rows.json")},
        "envs/requirements.lock": {"sha256": sha256(here / "envs/requirements.lock")},
        "project": {"gitCommit": commit},
    }
    before = {name: (to / name).read_bytes() for name in files_in(to)}
    shutil.rmtree(to)
    pushed(to=str(to), sign=str(key))
    assert {name: (to / name).read_bytes() for name in files_in(to)} == before


def test_a_push_describes_its_run_and_its_data(here: Path, tmp_path: Path) -> None:
    """As the libraries of RO-Crate and Croissant read it."""
    to = tmp_path / "sums"
    pushed(to=str(to))
    crate = ROCrate(to)
    trained: Any = crate.dereference("#train@default")
    assert trained.type == "CreateAction" and trained["instrument"]["softwareVersion"] == __version__
    weights = {each["name"]: each["sha256"] for each in trained["result"]}[f"results/default/adapter/{ADAPTER}"]
    (part,) = [each for each in crate.root_dataset["hasPart"] if each.id == ADAPTER]
    assert weights == part["sha256"] == sha256(to / ADAPTER)
    day = subprocess.run(
        ["git", "show", "-s", "--format=%cs"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert crate.root_dataset["datePublished"] == day
    described = json.loads((to / "croissant.json").read_text())
    (file,) = described["distribution"]
    assert (file["contentUrl"], file["sha256"]) == ("rows.json", sha256(here / "rows.json"))
    assert described["variableMeasured"] == ["instruction", "output"]
    rows = [text for row in json.loads((here / "rows.json").read_text()) for text in row.values() if len(text) > 8]
    texts = [path.read_text() for path in (to / "croissant.json", to / "ro-crate-metadata.json")]
    assert rows and not [row for row in rows for text in texts if row in text]
    if EVIDENCE.missing() is None:
        program = "import mlcroissant, sys; print(*mlcroissant.Dataset(sys.argv[1]).metadata.issues.errors)"
        command = [sys.executable, "-c", program, str(to / "croissant.json")]
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(EVIDENCE.folder)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_the_card_shows_the_rebuilds_that_are_stated(copy: Path, tmp_path: Path, key: Path) -> None:
    adapter = {name: entry["sha256"] for name, entry in product_of(finished_run("default"), "adapter").files.items()}
    folder = copy / "config/statements"
    folder.mkdir()

    def stated(name: str, machine: str, files: dict[str, str], sign: Path | None) -> None:
        place = "results/default/adapter"
        equal = [
            {"path": f"{place}/{each}", "original": sha, "rebuilt": sha, "equal": True} for each, sha in files.items()
        ]
        value = {"source": TO, "version": "0.2.0", "machine": machine, "seconds": 1.0, "products": equal}
        (tmp_path / "rebuild.json").write_text(json.dumps(value | {"verdict": "equal to the byte"}))
        attest(tmp_path / "rebuild.json", folder / name, str(sign) if sign else None)

    stated("alice.json", "EPYC 9654", adapter, key)
    stated("bob.json", "Xeon 6980P", adapter, None)
    stated("carol.json", "Graviton 4", {ADAPTER: "1" * 64}, None)
    to = tmp_path / "sums"
    pushed(to=str(to))
    card = (to / "README.md").read_text()
    assert "This model was rebuilt on 2 machines: equal to the byte.\n" in card
    (signature,) = {line.split("|")[5].strip() for line in card.splitlines() if line.startswith("| `alice.json` |")}
    assert signature.startswith("`signed by SHA256:")
    # The config has the path of the base model here, and is pushed without.
    equal = "| `bob.json` | `Xeon 6980P` | `equal to the byte` | `2 of 3 files` | `not signed` |\n"
    assert equal in card
    assert "carol" not in card and "Graviton" not in card
    assert {path.name for path in (to / "statements").iterdir()} == {"alice.json", "bob.json", "provenance.json"}
    outcomes, found = verify(to, Trust())
    assert [each.word for each in outcomes] == ["unsigned", "untrusted", "unsigned"]
    said = "statements/alice.json: rebuilt on EPYC 9654: equal to the byte (2 of 3 files); signed by SHA256:"
    assert [each.what.startswith(said) for each in outcomes] == [False, True, False]
    assert found == "rebuilt on 2 machines: equal to the byte"
    text = (folder / "alice.json").read_text()
    signatures = json.loads(text)["signatures"]
    other = json.loads(signed(envelope.read(folder / "bob.json").payload, str(key))[0])
    (folder / "alice.json").write_text(json.dumps(other | {"signatures": signatures}))
    assert refused(to=str(to)).startswith("config/statements/alice.json: its signature is not one of this statement by")
    assert (to / "statements/alice.json").read_text() == text


def change(path: Path, **values: Any) -> None:
    """Set values of a JSON file, in the place of its link into DVC's cache."""
    content = json.loads(path.read_text()) | values
    path.unlink()
    path.write_text(json.dumps(content))
