"""The types of values in the config: names, sizes, files, registry entries; and the remedy for an invalid one."""

import ipaddress
import re
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from zerolora.bounded import bounded
from zerolora.fail_if import parse
from zerolora.registries import entries
from zerolora.schedules import SCHEDULES
from zerolora.units import parse_bytes

NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
LONGEST_NAME = 100  # characters; a directory name has at most 255, with the suffix of unfinished ones (files.py)
REPETITIVE = re.compile(r"(.+)\1{19}$")  # as in snakemake's PeriodicityDetector
# Only in these directories, so that Snakemake and DVC both know which files can change a run.
USER_CONFIG = re.compile(r"config/deepspeed/[A-Za-z0-9._-]+\.json")
PROBE = re.compile(r"config/hardware/[A-Za-z0-9._-]+\.json")
USER_TEMPLATE = re.compile(r"config/templates/[A-Za-z0-9._-]+\.jinja")
USER_TASK = re.compile(r"config/tasks/[A-Za-z0-9_-]+\.py")
USER_TASK_JSON = re.compile(r"config/tasks/[A-Za-z0-9._-]+\.json")
GGUF_FILE = r"[^/].*\.gguf(\.part[0-9]+)?"
HARNESS_FILES = "config/harness"  # task files of lm-evaluation-harness
HUB_DATA = "data/hub"  # downloaded data sets
PACKAGE_DATA = "data/packages"  # downloaded data sets of PyPI packages
HUB_ADAPTERS = "resources/adapters"  # downloaded adapters
RUN_ADAPTER = re.compile(r"results/([^/]+)/adapter/?")  # of a run
RESERVED_RUNS = ("base", "compare", "data", "held_out", "logs", "receipts", "samples", "selections", "settings",
                 "tasks")  # fmt: skip
MANY = Field(min_length=1)
NO_TRACKER = "none"
JUDGE = "judge"
"""The check of a selection by the model of the section `judge`."""
UNKNOWN_LICENSE = "unknown"
RUN_SECTIONS = ("hardware", "pack", "estimate", "render", "train", "merge", "export", "report")
"""Sections that a run overrides."""
SHARED_SECTIONS = ("fetch", "prepare", "evaluate", "tasks", "judge")
Names = Iterable[str] | Callable[[], Iterable[str]]
"""Names, or what returns them. Registries are imported only to check a value, since some import the config."""


def _name(value: str) -> str:
    if not NAME.fullmatch(value):
        raise ValueError("use lower-case letters, digits, - and _ only, since it becomes a folder's name")
    if len(value) > LONGEST_NAME:
        raise ValueError(f"use at most {LONGEST_NAME} characters, since it becomes a folder's name")
    if REPETITIVE.search(value):
        raise ValueError("ends in many repetitions, which Snakemake refuses in a name; choose another")
    return value


def _rows_or_share(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (value >= 0):
        raise ValueError("give a number of rows, 0 or more, or their share, as in 0.05")
    if 0 < value < 1:
        return float(value)
    if value != value // 1:
        raise ValueError("give a whole number of rows, or a share below 1, as in 0.05")
    return int(value)


def _some_rows(value: Any) -> Any:
    if _rows_or_share(value) == 0:
        raise ValueError("give a number of rows, 1 or more, or their share, as in 0.2")
    return _rows_or_share(value)


def _steps_or_share(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < 2**31):
        raise ValueError("give a number of steps, 1 or more, or a share of all steps, as in 0.25")
    if value < 1:
        return float(value)
    if value != int(value):
        raise ValueError("give a whole number of steps, or a share of all steps below 1, as in 0.25")
    return int(value)


def _epochs(value: Any) -> Any:
    """Return a whole number of epochs as an integer, so that 2 and 2.0 are the same run."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _size(example: str, zero: bool = False) -> BeforeValidator:
    def check(value: Any) -> Any:
        if not isinstance(value, str):
            raise ValueError(f"give a size with its unit, as in {example}")
        parse_bytes(value, zero)
        return value

    return BeforeValidator(check)


def _matches(pattern: str | re.Pattern[str], remedy: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(remedy)
        return value

    return AfterValidator(check)


def _all(group: str, *more: str) -> Names:
    """Return the names in a registry, after some more."""
    return lambda: (*more, *entries(group))


def _generated() -> Iterable[str]:
    return [name for name, task in entries("tasks").items() if task.ask == "generate"]


def _generated_or_judge() -> Iterable[str]:
    return *_generated(), JUDGE


LEFT_TO_THE_MODEL = ("command-r", "deepseek", "deepseek-2.5", "falcon-h1", "llama-4", "phi-3", "phi-4")
"""Names that `prepare.template` had for formats of models with a chat template of their own."""


def _of_model(value: str) -> str:
    if value in LEFT_TO_THE_MODEL:
        raise ValueError(
            "write chat: models of this format have it as their own chat template; to keep the text of rows that are "
            "prepared already, set template to their chat_template.jinja, copied into config/templates/"
        )
    return value


def _templates() -> Iterable[str]:
    return "chat", "plain", *import_module("zerolora.data.prompt_formats").PROMPT_FORMATS


def fields() -> Iterable[str]:
    """Return the fields that rows and their messages have in any form."""
    return dict.fromkeys(field for form in entries("formats").values() for field in (*form.fields, *form.keys))


def _listed(names: Names) -> list[str]:
    return list(names() if callable(names) else names)


def _one_of(names: Names, file: re.Pattern[str] | None = None, example: str = "") -> AfterValidator:
    """Return the check that a value is one of some names, or the path of a user's file."""

    def check(value: str) -> str:
        known = _listed(names)
        if value not in known and not (file and file.fullmatch(value)):
            or_file = f", or a file as in {example}" if file else ""
            raise ValueError(f"use one of {', '.join(known)}{or_file}")
        return value

    return AfterValidator(check)


def _enum(names: Names, file: re.Pattern[str] | None = None) -> Any:
    """Return the JSON schema of `_one_of`, for editors."""

    def add(schema: dict[str, Any]) -> None:
        enum = {"enum": _listed(names)}
        schema.update({"anyOf": [enum, {"pattern": f"^{file.pattern}$"}]} if file else enum)

    return Field(json_schema_extra=add)


def _fields_only(schema: dict[str, Any]) -> None:
    """Add the names that the keys of a JSON schema may have."""
    schema["propertyNames"] = {"enum": _listed(fields)}


def _jinja(kind: str, example: str) -> AfterValidator:
    """Return the check of a Jinja template or expression."""

    def check(value: str) -> str:
        from jinja2 import TemplateSyntaxError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment()
        try:
            with bounded("tasks.rows.NAME.choices"):  # jinja2 evaluates constants when it compiles
                environment.parse(value) if kind == "template" else environment.compile_expression(value)
        except TemplateSyntaxError as error:
            raise ValueError(f"is not a valid Jinja {kind}: {error.message}; use one, as in {example}") from None
        return value

    return AfterValidator(check)


def _resume(value: str) -> str:
    if value not in ("auto", "never") and not value.endswith(".safetensors"):
        raise ValueError(
            "use auto, never, or a checkpoint's file, as in work/checkpoints/mine/step-00000060.safetensors"
        )
    return value


def _condition(value: str) -> str:
    parse(value)
    return value


def _strategy(value: str) -> str:
    plain, known = value.removeprefix("deepspeed_"), entries("strategies")
    if plain in ("mics", "zero3_mics"):
        raise ValueError("DeepSpeed 0.19.8 no longer has MiCS (DeepSpeed#8489); use zero3_hpz or fsdp_hybrid")
    if plain not in (*known, "auto") and not USER_CONFIG.fullmatch(value):
        raise ValueError(f"use one of {', '.join(known)}, auto, or a file as in config/deepspeed/mine.json")
    return value if value.endswith(".json") else plain


def is_loopback(address: str) -> bool:
    """Return whether the host of a URL is this machine."""
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
        raise ValueError("give an address without a query, as in https://judge.example/v1")
    if parts.username is not None or parts.password is not None:
        raise ValueError("give the address without a user; the key comes from the variable in key_variable")
    if parts.scheme == "http" and not is_loopback(value):
        raise ValueError("use https, since http would send the key and all answers in the clear")
    return value.rstrip("/")


Name = Annotated[str, AfterValidator(_name)]
PackageName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
PackageVersion = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+!_-]*$")]
Repository = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")]
Sha256 = Annotated[str, _matches(r"[0-9a-f]{64}", "give the 64 hexadecimal digits that `sha256sum FILE` prints")]
Commit = Annotated[
    str,
    _matches(
        r"[0-9a-f]{40}", "give the full 40-digit commit, since a branch or a tag can move; `zerolora pin` looks it up"
    ),
]
Probe = Annotated[str, _matches(PROBE, "name a file as in config/hardware/mine.json, which `zerolora probe` writes")]
Resume = Annotated[str, AfterValidator(_resume)]
Strategy = Annotated[str, AfterValidator(_strategy)]
Endpoint = Annotated[str, AfterValidator(_endpoint)]
Condition = Annotated[str, AfterValidator(_condition)]
Size = Annotated[str, _size("80GiB")]
SizeOrZero = Annotated[str, _size("2GiB or 0GiB", zero=True)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Epochs = Annotated[int | float, BeforeValidator(_epochs), Field(gt=0, lt=2**31)]
StepsOrShare = Annotated[int | float, BeforeValidator(_steps_or_share), Field(gt=0, lt=2**31)]
RowsOrShare = Annotated[int | float, BeforeValidator(_rows_or_share), Field(ge=0)]
SomeRows = Annotated[int | float, BeforeValidator(_some_rows), Field(gt=0)]
Role = Literal["system", "user", "assistant", "tool"]
RowField = Annotated[str, _one_of(fields)]
COLUMNS = Field(json_schema_extra=_fields_only)
Format = Annotated[str, _one_of(_all("formats", "auto")), _enum(_all("formats", "auto"))]
TemplateName = Annotated[
    str,
    AfterValidator(_of_model),
    _one_of(_templates, USER_TEMPLATE, "config/templates/mine.jinja"),
    _enum(_templates, USER_TEMPLATE),
]
MethodName = Annotated[str, _one_of(_all("methods")), _enum(_all("methods"))]
TrackerName = Annotated[str, _one_of(_all("trackers", NO_TRACKER)), _enum(_all("trackers", NO_TRACKER))]
ObjectiveName = Annotated[str, _one_of(_all("objectives")), _enum(_all("objectives"))]
OptimizerName = Annotated[str, _one_of(_all("optimizers")), _enum(_all("optimizers"))]
ScheduleName = Annotated[str, _one_of(SCHEDULES), _enum(SCHEDULES)]
TargetName = Annotated[str, _one_of(_all("targets")), _enum(_all("targets"))]
Check = Annotated[str, _one_of(_generated, USER_TASK, "config/tasks/mine.py"), _enum(_generated, USER_TASK)]
AnyCheck = Annotated[str, _one_of(_all("tasks"), USER_TASK, "config/tasks/mine.py"), _enum(_all("tasks"), USER_TASK)]
SelectionCheck = Annotated[
    str, _one_of(_generated_or_judge, USER_TASK, "config/tasks/mine.py"), _enum(_generated_or_judge, USER_TASK)
]
Jinja = Annotated[str, Field(min_length=1), _jinja("template", "{{ question }}")]
Expression = Annotated[str, Field(min_length=1), _jinja("expression", "[option_a, option_b]")]


def is_fetched(adapter: str) -> bool:
    """Return whether a path is the folder of an adapter that `fetch.adapter` may have."""
    return adapter.startswith(f"{HUB_ADAPTERS}/") and "/" not in adapter.removeprefix(f"{HUB_ADAPTERS}/")
