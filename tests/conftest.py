"""A real but tiny language model, and whole copies of the project to run it in."""

import contextlib
import fcntl
import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import browser
import hypothesis
import pytest
import yaml
from cluster import Cluster, missing
from fork_server import COMMANDS, FEWER_COLLECTIONS, SERVERS, Started, copy_kept
from hosts import Hosts
from hosts import missing as lacking_for_hosts

from zerolora.config.file import load
from zerolora.config.fingerprint import fingerprints
from zerolora.config.runs_file import write_runs
from zerolora.errors import UserError
from zerolora.report.charts import javascript

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
OTHER_RELEASES = "ZEROLORA_TEST_PACKAGES"
"""Names a folder with other releases of libraries, which the tests use in the place of those of the environment."""

gc.set_threshold(*FEWER_COLLECTIONS)

# Machines are shared: how long an example takes says nothing. Every run draws the same examples, so that a test fails
# because of a change; benchmarks/mutants.py draws others.
hypothesis.settings.register_profile("zerolora", deadline=None, derandomize=True)
hypothesis.settings.load_profile("zerolora")

# What a newcomer's config looks like, with a model that trains in seconds.
TINY_CONFIG: dict[str, Any] = {
    "hardware": {"device": "cpu", "host_memory": "24GiB"},
    "fetch": {
        "package": {},
        "hub": {},
        "directory": {"tiny": {"path": "model", "license": "Apache-2.0"}},
    },
    "prepare": {
        "rows": {
            "model": "tiny",
            "path": "rows.json",
            "template": "chat",
            "split": {"validation": 4, "test": 4},
            "seed": 1,
            "max_length": 128,
            "check": "sum",
        }
    },
    "estimate": {"reserve": "1.5GiB"},
    "render": {"strategy": "zero2"},
    "train": {"global_batch": 4, "micro_batch": 2, "max_steps": 2, "learning_rate": 1e-2, "lora": {"r": 4}},
    "merge": {"version": True},
    "evaluate": {"split": "test", "batch": 2, "max_new_tokens": 4},
    "report": {"examples": 2},
    "runs": {"default": {"dataset": "rows"}},
}


# Files whose tests mostly wait for Slurm: they begin beside the fast files.
WAITING = ("test_events", "test_pipeline", "test_screen")
# Files that take minutes, the longest first, so that none is begun when all others are done.
LONG_FILES = (
    "test_model_matrix",
    "test_rerun_matrix",
    "test_training",
    "test_recipes",
    "test_heartbeat",
    "test_embedded_default",
    "test_methods_train",
    "test_models",
    "test_from_elsewhere",
    "test_without_gradient",
    "test_receipts",
    "test_resume",
    "test_upgrades",
    "test_serve",
    "test_experiments",
    "test_fake_gpu",
    "test_chaos",
    "test_launchers",
    "test_integrity",
    "test_quantized_reading",
    "test_trained_optimizers",
    "test_push",
    "test_preferences_train",
    "test_validation_tasks",
    "test_schedulers",
    "test_grids",
    "test_searches",
    "test_bisect",
    "test_hosts",
    "test_compile",
    "test_engine_sync",
    "test_objectives",
    "test_opened_site",
    "test_first_run",
    "test_branches",
    "test_sequence_parallel",
    "test_tasks_of_runs",
    "test_documented_commands",
    "test_from_adapter",
    "test_preference_runs",
    "test_extending",
    "test_telemetry",
    "test_two_users",
    "test_out_of_memory",
    "test_validation",
    "test_accept",
    "test_comparison",
    "test_accumulation",
    "test_gpus",
    "test_first_use",
    "test_continued",
    "test_reference_stage",
    "test_fp16",
    "test_left_out",
    "test_data",
    "test_decisions",
    "test_s3_remote",
    "test_against_trl",
)


def pytest_configure(config: pytest.Config) -> None:
    """Make once what the commands keep (fork_server.copy_kept)."""
    if not hasattr(config, "workerinput"):
        fingerprints()
        javascript()


def pytest_unconfigure() -> None:
    """End what was started for all tests."""
    SERVERS.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast files first, so that a mistake shows early, and beside them those that wait."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    longest = {name: index for index, name in enumerate(LONG_FILES)}

    def index(path: Path) -> tuple[bool, bool, int, str]:
        return path.stem not in WAITING, path in slow, longest.get(path.stem, len(longest)), str(path)

    items.sort(key=lambda item: index(item.path))


@pytest.fixture(scope="module", autouse=True)
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give each file the same environment variables: commands that a test calls in its own process set some. And a
    store of base weights of its own, since hubs of tests have several models under one name."""
    before = dict(os.environ)
    os.environ["ZEROLORA_STORE"] = str(tmp_path_factory.mktemp("store"))
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Return a real Slurm of three nodes, up for the session."""
    if lacking := missing():
        pytest.fail(f"no Slurm for tests/slurm: {lacking}; or leave them out: make test-no-slurm", pytrace=False)
    with Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Return two hosts with an sshd each, up for the tests of one file."""
    if lacking := lacking_for_hosts():
        pytest.fail(f"no hosts for tests/launchers: {lacking}; or leave them out: make test-no-slurm", pytrace=False)
    with Hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Return a headless browser for the tests of one file: not for all, since asyncio has a running loop meanwhile."""
    if lacking := browser.missing():
        pytest.fail(f"no browser for tests/browser: {lacking}; or leave them out: make test-no-slurm", pytrace=False)
    with browser.browser() as started:
        yield started


def pytest_collection_finish() -> None:
    """Keep the collector off what lives as long as the session: modules and thousands of tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a two-layer Llama with a byte-level tokenizer and a ChatML template."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def saved_in_4_bits(model: Path, output: Path, **options: Any) -> Path:
    """Save a model as transformers quantizes it, and return its directory."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from zerolora.compat import bitsandbytes_patches

    bitsandbytes_patches.load()
    kinds = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True} | options
    quantization = BitsAndBytesConfig(load_in_4bit=True, **kinds)
    shutil.copytree(model, output, ignore=shutil.ignore_patterns("*.safetensors"))
    AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, quantization_config=quantization, device_map={"": "cpu"}
    ).save_pretrained(output)
    return output


def make_tiny_model(directory: Path, seed: int = 0) -> Path:
    """Write a two-layer Llama (24k parameters) with random weights to `directory`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(special + alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[1], eos_token=special[2], pad_token=special[0]
    )
    wrapped.add_special_tokens({"additional_special_tokens": special})
    wrapped.chat_template = (
        "{% for message in messages %}"
        "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(wrapped),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    wrapped.save_pretrained(directory)
    return directory


class Project:
    """A copy of this project in a directory of its own, under git, with a config of its own.

    Its commands are forks of a process that has imported its code (fork_server.py), unless `served` is False.
    """

    served = True

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = json.loads(json.dumps(TINY_CONFIG))

    def run(self, *command: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the project with this environment's tools first on PATH."""
        variables = project_environment(self.directory) | environment
        server = SERVERS.of(self.directory, variables) if self.served else None
        if server:
            variables["PATH"] = f"{server.stand_ins}{os.pathsep}{variables['PATH']}"
        if server and command[0] in COMMANDS:
            result = server.run(command, self.directory, variables)
        else:
            result = subprocess.run(
                command, cwd=self.directory, env=variables, capture_output=True, text=True, check=False, timeout=1500
            )
        if check:
            assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
        return result

    def write_config(self, text: str | None = None) -> None:
        """Write the project's config, or this text in its place, and for a valid one the runs that DVC reads."""
        text = yaml.safe_dump(self.config, sort_keys=False) if text is None else text
        (self.directory / "config/config.yaml").write_text(text, encoding="utf-8")
        with contextlib.chdir(self.directory), contextlib.suppress(UserError):
            write_runs(load(Path("config/config.yaml"), before_first_trial=True))

    def snakemake(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run snakemake with the local profile."""
        return self.run("snakemake", "--profile", "profiles/local", *arguments, check=check)

    def commit(self, message: str) -> None:
        """Commit everything that git tracks or would track."""
        self.run("git", "add", "--all")
        self.run("git", "commit", "--quiet", "--message", message)


def project_environment(directory: Path) -> dict[str, str]:
    """Return the environment of a user of the project in `directory`."""
    others = ("SNAKEMAKE_", "DVC_", "PYTHON")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return inherited | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(directory / "src"), os.environ.get(OTHER_RELEASES)))),
        "OMP_NUM_THREADS": "1",
        "DVC_SITE_CACHE_DIR": str(directory / ".cache/dvc"),  # not in the user's cache
        "GIT_AUTHOR_NAME": "test",
        "GIT_AUTHOR_EMAIL": "test@example.org",
        "GIT_COMMITTER_NAME": "test",
        "GIT_COMMITTER_EMAIL": "test@example.org",
    }


def served(
    *command: str, directory: Path = ROOT, before: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command with this tree's code as a fork of a process that has imported its libraries; what it starts are
    forks too. `before`: Python statements for its process; `variables`: more of its environment."""
    environment = project_environment(ROOT) | variables
    return SERVERS.of(ROOT, environment).run(command, directory, environment, before)


def begun(*command: str, directory: Path = ROOT, **variables: str) -> Started:
    """Begin such a command."""
    environment = project_environment(ROOT) | variables
    return SERVERS.of(ROOT, environment).start(command, directory, environment)


NO_WORKFLOW = ("benchmarks/", "docs/", "tests/")
"""Folders that no stage reads: half of the files, all of which DVC looks up in git's index for each output."""


def copy_tracked(directory: Path, without: tuple[str, ...] = ()) -> None:
    """Copy the files that git tracks, or would track, to `directory`, without dvc.lock and some folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for path in filter(None, tracked.split("\0")):
        if (ROOT / path).is_file() and path != "dvc.lock" and not path.startswith(without):
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, directory / path)


def refusal(action: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Return the line with which an action is refused."""
    with pytest.raises(UserError) as raised:
        action(*arguments, **options)
    (line,) = str(raised.value).splitlines()
    return line


@pytest.fixture(scope="session")
def make_project(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[[str], Project]:
    """Return a function that makes a fresh copy of the project, with the tiny model and 20 rows, committed."""

    def make(name: str) -> Project:
        return new_project(tmp_path_factory.mktemp(name) / "project", tiny_model)

    return make


def new_project(directory: Path, model: Path) -> Project:
    """Return a fresh copy of the project in `directory`, with a model and 20 rows, committed."""
    copy_tracked(directory, without=NO_WORKFLOW)
    copy_kept(directory)
    shutil.copytree(model, directory / "model")
    write_rows(directory / "rows.json", 20)
    project = Project(directory)
    project.write_config()
    project.run("git", "init", "--quiet", "--initial-branch", "main")
    project.commit("start")
    return project


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Path:
    """Return a directory that is made by the first worker that asks, for all of them."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with Path(f"{shared}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shared.exists():
            make(shared)
    return shared


@pytest.fixture(scope="session")
def copy_finished(
    make_project: Callable[[str], Project], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Project]:
    """Return a function that copies a project that Snakemake has finished and DVC has recorded."""

    def finish(directory: Path) -> None:
        project = make_project("finished")
        project.config["prepare"]["rows"]["format"] = "alpaca"
        project.config["train"]["checkpoint_steps"] = 1
        project.write_config()
        project.snakemake("all")
        project.directory.rename(directory)

    shared = made_once(tmp_path_factory, "finished", finish)

    def copy(name: str) -> Project:
        project = Project(tmp_path_factory.mktemp(name) / "project")
        subprocess.run(["cp", "-a", str(shared), str(project.directory)], check=True)
        project.config = yaml.safe_load((project.directory / "config/config.yaml").read_text())
        return project

    return copy


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the built site."""

    def build(directory: Path) -> None:
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
        built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stdout + built.stderr

    return made_once(tmp_path_factory, "site", build)


def write_rows(path: Path, count: int) -> None:
    """Write `count` rows of the reference task to `path`."""
    from zerolora.data.reference import records

    path.write_text(json.dumps(records("tens", 0)[:count], ensure_ascii=False, indent=0), encoding="utf-8")


@pytest.fixture(scope="session")
def prepared_bench(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Any:
    """Return the bench that those of the modules are copies of."""
    from bench import Bench

    return Bench(tmp_path_factory.mktemp("prepared"), tiny_model)


@pytest.fixture(scope="module")
def bench(prepared_bench: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a bench for training runs: a prepared data set of the tiny model. Each module of tests has its own, since
    which modules share a process differs from one test run to the next, and runs of one name would meet."""
    return prepared_bench.copied(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="session")
def reference(prepared_bench: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the metrics of three undisturbed steps at stage 0, two ranks, and the directory `run`."""
    from bench import metrics

    run = prepared_bench.copied(tmp_path_factory.mktemp("reference")).run("reference", "zero0")
    return metrics(run) | {"run": run}
