"""The kinds of values in the config: names, sizes, files, choices of registries, each with what is wrong with one."""

import ipaddress
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
)

from zerolora.bounded import bounded
from zerolora.config.registry_names import (
    FIELDS,
    FORMS,
    METHODS,
    OBJECTIVES,
    OPTIMIZERS,
    PROMPT_FORMATS,
    STRATEGIES,
    TARGETS,
    TASKS,
    TRACKERS,
)
from zerolora.fail_if import parse
from zerolora.schedules import SCHEDULES
from zerolora.units import parse_bytes

NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
LONGEST_NAME = 100  # characters; a folder's name has at most 255, with what unfinished ones are called by (files.py)
REPETITIVE = re.compile(r"(.+)\1{19}$")  # as snakemake's PeriodicityDetector has it
# Only in these directories, so that Snakemake and DVC both know which files can change a run.
USER_CONFIG = re.compile(r"config/deepspeed/[A-Za-z0-9._-]+\.json")
PROBE = re.compile(r"config/hardware/[A-Za-z0-9._-]+\.json")
USER_TEMPLATE = re.compile(r"config/templates/[A-Za-z0-9._-]+\.jinja")
USER_TASK = re.compile(r"config/tasks/[A-Za-z0-9_-]+\.py")
USER_TASK_JSON = re.compile(r"config/tasks/[A-Za-z0-9._-]+\.json")
GGUF_FILE = r"[^/].*\.gguf(\.part[0-9]+)?"
HARNESS_FILES = "config/harness"  # task files of lm-evaluation-harness
TEMPLATES = ("chat", "plain", *PROMPT_FORMATS)
HUB_DATA = "data/hub"  # where fetched data sets are stored
PACKAGE_DATA = "data/packages"  # where data sets of PyPI packages are stored
HUB_ADAPTERS = "resources/adapters"  # where fetched adapters are stored
RESERVED_RUNS = ("base", "compare", "data", "logs", "settings", "tasks")
MANY = Field(min_length=1)
NO_TRACKER = "none"  # the value of train.tracker for no tracker
SHARED_SECTIONS = ("fetch", "prepare", "evaluate", "tasks", "judge")


def _name(value: str) -> str:
    if not NAME.fullmatch(value):
        raise ValueError("use lower-case letters, digits, - and _ only, since it becomes a folder's name")
    if len(value) > LONGEST_NAME:
        raise ValueError(f"write at most {LONGEST_NAME} characters, since it becomes a folder's name")
    if REPETITIVE.search(value):
        raise ValueError("ends in many repetitions, which Snakemake refuses in a name; choose another")
    return value


def _size(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("write a size with its unit, as in 80GiB")
    parse_bytes(value)
    return value


def _size_or_zero(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("write a size with its unit, as in 2GiB or 0GiB")
    parse_bytes(value, zero=True)
    return value


def _sha256(value: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", value):
        raise ValueError("write the 64 hexadecimal digits that `sha256sum FILE` prints")
    return value


def _commit(value: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{40}", value):
        raise ValueError("write the full 40-digit commit, since a branch or a tag can move")
    return value


def _one_of(names: Iterable[str]) -> AfterValidator:
    """Return the check that a value is one of some names."""
    known = tuple(names)

    def check(value: str) -> str:
        if value not in known:
            raise ValueError(f"write one of {', '.join(known)}")
        return value

    return AfterValidator(check)


def _probe(value: str) -> str:
    if not PROBE.fullmatch(value):
        raise ValueError("name a file as in config/hardware/mine.json, which `zerolora probe` writes")
    return value


def _template(value: str) -> str:
    if value not in TEMPLATES and not USER_TEMPLATE.fullmatch(value):
        raise ValueError(f"write one of {', '.join(TEMPLATES)}, or a file as in config/templates/mine.jinja")
    return value


def _check(known: Iterable[str]) -> AfterValidator:
    names = tuple(known)

    def check(value: str) -> str:
        if value not in names and not USER_TASK.fullmatch(value):
            raise ValueError(f"write one of {', '.join(names)}, or a file as in config/tasks/mine.py")
        return value

    return AfterValidator(check)


def _expression(value: str) -> str:
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        with bounded("tasks.rows.NAME.choices"):  # jinja2 computes constants when it compiles
            ImmutableSandboxedEnvironment().compile_expression(value)
    except TemplateSyntaxError as error:
        raise ValueError(f"is no Jinja expression: {error.message}; write one, as in [option_a, option_b]") from None
    return value


def _jinja(value: str) -> str:
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        ImmutableSandboxedEnvironment().parse(value)
    except TemplateSyntaxError as error:
        raise ValueError(f"is no Jinja template: {error.message}; write one, as in {{{{ question }}}}") from None
    return value


def _resume(value: str) -> str:
    if value not in ("auto", "never") and not value.endswith(".safetensors"):
        raise ValueError(
            "write auto, never, or a checkpoint's file, as in work/checkpoints/mine/step-00000060.safetensors"
        )
    return value


def _gate(value: str) -> str:
    parse(value)
    return value


def _strategy(value: str) -> str:
    plain = value.removeprefix("deepspeed_")
    if plain in ("mics", "zero3_mics"):
        raise ValueError("DeepSpeed 0.19.8 no longer has MiCS (DeepSpeed#8489); write zero3_hpz or fsdp_hybrid")
    if plain not in (*STRATEGIES, "auto") and not USER_CONFIG.fullmatch(value):
        raise ValueError(f"write one of {', '.join(STRATEGIES)}, auto, or a file as in config/deepspeed/mine.json")
    return value if value.endswith(".json") else plain


def is_loopback(address: str) -> bool:
    """Tell whether the host of an address is this machine."""
    host = urlsplit(address).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _endpoint(value: str) -> str:
    try:
        parts = urlsplit(value)
        usable = bool(parts.hostname) and (parts.port is None or parts.port > 0) and value.isprintable()
    except ValueError:
        usable = False
    if not usable or parts.scheme not in ("http", "https") or parts.query or parts.fragment or " " in value:
        raise ValueError("write an address without a query, as in https://judge.example/v1")
    if parts.username is not None or parts.password is not None:
        raise ValueError("write the address without a user; the key comes from the variable in key_variable")
    if parts.scheme == "http" and not is_loopback(value):
        raise ValueError("write https, since http would send the key and all answers in the clear")
    return value.rstrip("/")


Name = Annotated[str, AfterValidator(_name)]
Sha256 = Annotated[str, AfterValidator(_sha256)]
Commit = Annotated[str, AfterValidator(_commit)]
Probe = Annotated[str, AfterValidator(_probe)]
Resume = Annotated[str, AfterValidator(_resume)]
Strategy = Annotated[str, AfterValidator(_strategy)]
Endpoint = Annotated[str, AfterValidator(_endpoint)]
Condition = Annotated[str, AfterValidator(_gate)]
Size = Annotated[str, BeforeValidator(_size)]
SizeOrZero = Annotated[str, BeforeValidator(_size_or_zero)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Format = Annotated[str, _one_of(["auto", *FORMS]), Field(json_schema_extra={"enum": ["auto", *FORMS]})]
COLUMNS = Field(json_schema_extra={"propertyNames": {"enum": list(FIELDS)}})
TemplateName = Annotated[
    str,
    AfterValidator(_template),
    Field(json_schema_extra={"anyOf": [{"enum": list(TEMPLATES)}, {"pattern": f"^{USER_TEMPLATE.pattern}$"}]}),
]
RowField = Annotated[str, _one_of(FIELDS)]
MethodName = Annotated[str, _one_of(METHODS), Field(json_schema_extra={"enum": list(METHODS)})]
Role = Literal["system", "user", "assistant", "tool"]
TrackerName = Annotated[
    str, _one_of([NO_TRACKER, *TRACKERS]), Field(json_schema_extra={"enum": [NO_TRACKER, *TRACKERS]})
]
ObjectiveName = Annotated[str, _one_of(OBJECTIVES), Field(json_schema_extra={"enum": list(OBJECTIVES)})]
OptimizerName = Annotated[str, _one_of(OPTIMIZERS), Field(json_schema_extra={"enum": list(OPTIMIZERS)})]
ScheduleName = Annotated[str, _one_of(SCHEDULES), Field(json_schema_extra={"enum": list(SCHEDULES)})]
TargetName = Annotated[str, _one_of(TARGETS), Field(json_schema_extra={"enum": list(TARGETS)})]
GENERATED = [name for name, ask in TASKS.items() if ask == "generate"]


def _check_schema(names: list[Any]) -> Any:
    return Field(json_schema_extra={"anyOf": [{"enum": names}, {"pattern": f"^{USER_TASK.pattern}$"}]})


Check = Annotated[str, _check(GENERATED), _check_schema(GENERATED)]
AnyCheck = Annotated[str, _check(TASKS), _check_schema(list(TASKS))]
Jinja = Annotated[str, Field(min_length=1), AfterValidator(_jinja)]
Expression = Annotated[str, Field(min_length=1), AfterValidator(_expression)]
