"""The record of a run: what someone else needs to make it again and to compare what comes out.

A push has it as record.json, without a row of the data: settings, versions, figures, and the sha256 of all else. Paths
of this machine become paths below INPUTS.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from zerolora import __version__
from zerolora.config.stages import PLACEHOLDER, STAGES, Stage
from zerolora.config.values import JUDGE
from zerolora.errors import UserError, shown
from zerolora.files import MANIFEST, as_json, canonical, read_object, sha256
from zerolora.json_file import LARGEST, read_bytes
from zerolora.json_kinds import is_below
from zerolora.judge.work_file import SERVED, VERDICTS
from zerolora.publish.finished import RESULTS, FinishedRun, PushedModel, remedy
from zerolora.publish.run_config import config_of_run
from zerolora.publish.slsa_provenance import LOCK
from zerolora.receipt import FOLDER, Receipt, parse, path_of
from zerolora.report.comparison_columns import columns_of
from zerolora.report.comparison_rows import ROWS, all_runs
from zerolora.report.provenance import commit
from zerolora.report.repeats import figures
from zerolora.train.checkpoint.names import newest_run_folder, steps_of

RECORD = "record.json"
INPUTS = "inputs"
"""Folder of a rebuild for the files that had an absolute path here."""
PROMPTS = "prompts.arrow"
"""Of a data set, for samples alone."""
CHECKPOINTS, ROWS_FOLDER = "checkpoints", "rows"
"""Folders of a push, if the user asks for them."""
ENDS = ("train", "merge", "evaluate")
"""Stages of a run whose results are rebuilt, with all that they come from; and `evaluate_base`."""
CONTENTS = ("loss.csv", "train.json", "train_resources.json", "evaluate.json", "evaluate_resources.json")
"""Names of the outputs whose content a record has: the figures that are compared where bytes differ."""
STATE = ("step", "updates", "best_step", "loss_scale", "tensors")
"""What counts of a checkpoint's manifest: all but times and the number of resumes."""
ABSOLUTE = re.compile(r"[/~]\S*/\S*")
NAMES = re.compile(r"(--names(?: \w+=[\w.-]*(?:,\w+=[\w.-]*)*)?)?")
JOB = re.compile(r"[\w.-]*")
TEXTS = (".json", ".jsonl", ".html", ".md", ".yaml")
"""Suffixes of outputs in which a path may be. Others, as those of weights, are compared whole or not pushed."""
LONGEST_TEXT = 16 << 20
"""Bytes of an output that is searched for paths."""
Find = Callable[[str], Path | None]
"""Returns the file of a result or an input, by its path in the project; None if it is not at hand."""


def _path(value: str) -> str:
    """A path in a project, which is no option of a command."""
    if not is_below(value) or value.startswith("-") or not value.isprintable():
        raise ValueError(f"{shown(value)} is no path of a file in a project")
    return value


FilePath = Annotated[str, AfterValidator(_path)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class StageRecord(BaseModel):
    """A receipt, with paths that hold on any machine."""

    model_config = ConfigDict(strict=True)

    params: dict[str, str]
    inputs: dict[FilePath, Hash]
    outputs: dict[FilePath, Hash]

    @model_validator(mode="after")
    def _is_of_a_rule(self) -> "StageRecord":
        # They become arguments of commands.
        if not NAMES.fullmatch(self.params.get("names", "")):
            raise ValueError(f"params.names is {shown(self.params['names'])}, which no rule passes")
        if (device := self.params.get("device", "cpu")) not in ("cpu", "cuda"):
            raise ValueError(f"params.device is {shown(device)}, which no rule passes")
        return self


class Costs(BaseModel):
    """What a rebuild takes."""

    model_config = ConfigDict(strict=True)

    seconds: float
    """Of training and answering, as measured."""
    fetched: int
    """Bytes of the base model and of the inputs."""
    written: int
    """Bytes of the results and of the checkpoints that are compared."""


class Record(BaseModel):
    """The content of record.json."""

    model_config = ConfigDict(strict=True)

    format: Literal[1] = 1
    zerolora: str
    """Version of the package."""
    commit: str
    """The project's commit, or that there is none."""
    run: str
    config: dict[str, Any]
    files: dict[FilePath, str]
    """The user's files that the config names, by path."""
    lock: str
    """Text of envs/requirements.lock."""
    receipts: dict[str, StageRecord]
    """By stage, as in train@default, each after those that its inputs come from."""
    contents: dict[str, str]
    """Outputs of CONTENTS, by path."""
    with_paths: list[FilePath]
    """Outputs that hold a path of the recording machine, or the sha256 of such an output."""
    checkpoints: dict[Annotated[str, Field(pattern=r"^\d{1,12}$")], Hash]
    """Digest of each checkpoint at hand, by step."""
    merged: list[FilePath]
    """Names of the merged model's files, which need not be results (merge.version)."""
    seeds: dict[str, list[Annotated[float, Field(allow_inf_nan=False)]]]
    """Figures of runs that differ from this one in their seed alone, with this one's."""
    costs: Costs

    @model_validator(mode="after")
    def _is_of_its_stages(self) -> "Record":
        for name, receipt in self.receipts.items():
            stage, _, job = name.partition("@")
            if stage not in STAGES or not JOB.fullmatch(job):
                raise ValueError(f"receipts has {shown(name)}, which is no job of a stage")
            one = STAGES[stage].wildcards[:2]
            if len(one) == 1 and (target := STAGES[stage].target.format(**{one[0]: job})) not in receipt.outputs:
                raise ValueError(f"receipts.{name}.outputs lacks {target}, which the stage writes")
        if path := next((path for path in self.with_paths if Path(path).suffix not in TEXTS), None):
            raise ValueError(f"with_paths has {path}, which has no text to have a path in")
        train = self.receipts.get(f"train@{self.run}")
        if train and (lacking := {"dataset", "model", "rendered"} - names_of(train).keys()):
            raise ValueError(f"receipts.train@{self.run}.params.names lacks {min(lacking)}")
        return self


class RawInput(NamedTuple):
    """A file that no stage of the run wrote."""

    path: str
    sha256: str
    stage: str


def record_of(run: FinishedRun) -> Record:
    """Return the record of a finished run of the project in the working directory.

    Raises UserError if a receipt is missing, or the record would hold a path of this machine.
    """
    find: Find = _here
    receipts = without_prompts(of_run(run.name, receipts_here(), remedy(run.name)))
    config = config_of_run(run)
    moved = _Moved(config, receipts)
    checkpoints = {str(step): digest_of_file(path) for step, path in checkpoints_of(run.name).items()}
    files = {name for name in texts_in(config) if name.startswith("config/") and Path(name).is_file()}
    values: dict[str, Any] = {
        "zerolora": __version__,
        "commit": commit(),
        "run": run.name,
        "config": moved.value(config),
        "files": {name: read_bytes(Path(name), LONGEST_TEXT).decode() for name in sorted(files)},
        "lock": LOCK.read_text(encoding="utf-8") if LOCK.is_file() else "",
        "receipts": {stage: StageRecord(**moved.value(each._asdict())) for stage, each in receipts.items()},
        "contents": contents_of(receipts, find),
        "with_paths": sorted(_with_paths(receipts, moved, find)),
        "checkpoints": checkpoints,
        "merged": sorted(run.read(run.directory / "merged" / MANIFEST).get("files", {})),
        "seeds": seeds_of(run.name),
        "costs": costs_of(receipts, find, len(checkpoints)),
    }
    try:
        result = Record(**values)
    except ValidationError as error:
        raise UserError(f"run {run.name} cannot be pushed for `zerolora rebuild`: {_first(error)}") from None
    _check_paths(result)
    return result


def with_files(product: PushedModel, record: Record, include: Collection[str]) -> PushedModel:
    """Return a product with the rows, by their sha256, and the checkpoints that the user includes. Raises UserError for
    anything else, or if there are no checkpoints."""
    if unknown := [name for name in include if name not in (ROWS_FOLDER, CHECKPOINTS)]:
        raise UserError(f"--include {shown(unknown[0])}: use {ROWS_FOLDER} or {CHECKPOINTS}")
    files: dict[str, Path] = {}
    if ROWS_FOLDER in include:
        receipts = receipts_here()
        of_run = {stage: receipts[stage] for stage in record.receipts}
        inputs = raw_inputs(of_run)
        replies = [Path(path) for path in kept_replies(of_run) if Path(path).is_file()]
        files |= {f"{ROWS_FOLDER}/{sha256(path)}": path for path in replies}
        files |= {f"{ROWS_FOLDER}/{each.sha256}": Path(each.path) for each in inputs if each.stage[:5] != "fetch"}
    if CHECKPOINTS in include:
        found = checkpoints_of(record.run)
        if not found:
            raise UserError(
                f"--include {CHECKPOINTS}: there are none of run {record.run} in work/checkpoints; leave it out"
            )
        files |= {f"{CHECKPOINTS}/{path.name}": path for path in found.values()}
    described = {name: {"sha256": sha256(path), "bytes": path.stat().st_size} for name, path in files.items()}
    for name, entry in described.items():
        if name.startswith(ROWS_FOLDER) and entry["sha256"] != Path(name).name:
            raise UserError(f"{files[name]}: is not what {record.run} was trained on; {remedy(record.run)}")
    return replace(product, files=product.files | described, included=files)


def as_text(record: Record) -> str:
    """Return the text of record.json."""
    return as_json(record.model_dump(mode="json"))


def read_record(path: Path) -> Record:
    """Return the record in a pushed directory. Raises UserError if the file is not one."""
    try:
        record = Record.model_validate_json(read_bytes(path, LARGEST))
    except FileNotFoundError:
        raise UserError(
            f"{path.parent}: has no {RECORD}, so what it was made of is not known; push it again with this version"
        ) from None
    except ValidationError as error:
        raise UserError(f"{path}: {_first(error)}; push it again with this version") from None
    outputs = {name: digest for each in record.receipts.values() for name, digest in each.outputs.items()}
    for name, text in record.contents.items():
        if name not in record.with_paths and hashlib.sha256(text.encode()).hexdigest() != outputs.get(name):
            raise UserError(f"{path}: contents.{name} is not what its receipt lists; push it again")
    return record


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"] if part != "[key]")
    return f"{key + ': ' if key else ''}{first['msg'].removeprefix('Value error, ')}"


def of_run(run: str, receipts: Mapping[str, Receipt], remedy: str) -> dict[str, Receipt]:
    """Return those of a project's receipts that a run's results come from, by stage, each after those of its inputs.

    Raises UserError, with the remedy, if one is missing.
    """

    def needed(stage: str) -> Receipt:
        if stage not in receipts:
            raise UserError(f"run {run}: there is no receipt {path_of(stage)} of a job that ended well; {remedy}")
        return receipts[stage]

    ends = [f"{stage}@{run}" for stage in ENDS]
    ends.append(f"evaluate_base@{names_of(needed(ends[0]))['dataset']}")
    made_by = {path: stage for stage, each in receipts.items() for path in each.outputs}
    result: dict[str, Receipt] = {}

    def add(stage: str) -> None:
        if stage in result:
            return
        for path in needed(stage).inputs:
            if path in made_by:
                add(made_by[path])
            elif path.startswith(f"{RESULTS}/"):
                raise UserError(f"run {run}: no receipt has {path}, which {stage} read; {remedy}")
        result[stage] = receipts[stage]

    for stage in ends:
        add(stage)
    return result


def receipts_here() -> dict[str, Receipt]:
    """Return the receipts of the project in the working directory, without those of jobs that did not end well."""
    read = {path.stem: parse(path.read_text(encoding="utf-8", errors="replace")) for path in FOLDER.glob("*.json")}
    return {stage: receipt for stage, receipt in sorted(read.items()) if receipt}


def names_of(receipt: Receipt | StageRecord) -> dict[str, str]:
    """Return the names in the paths of a stage's files, as its rule passes them."""
    _, _, text = receipt.params.get("names", "").partition(" ")
    return dict(pair.split("=", 1) for pair in text.split(",") if pair)


def kept_replies(receipts: Mapping[str, Receipt]) -> dict[str, str]:
    """Return the stages that asked a served model, which is not asked again, by the file that keeps its replies."""
    result = {}
    for stage, receipt in receipts.items():
        kind, _, name = stage.partition("@")
        settings = _decoded(receipt.params.get("settings", ""))
        if kind == "sample" and settings["of"].get("served"):
            result[f"work/samples/{name}/{SERVED}"] = stage
        if kind == "select" and settings["check"] == JUDGE:
            result[f"work/select/{name}/{VERDICTS}"] = stage
    return result


def raw_inputs(receipts: Mapping[str, Receipt]) -> Iterator[RawInput]:
    """Yield the files that no stage of a run wrote."""
    made = {path for receipt in receipts.values() for path in receipt.outputs}
    known: set[str] = set()
    for stage, receipt in receipts.items():
        for path, digest in receipt.inputs.items():
            if path not in made | known:
                known.add(path)
                yield RawInput(path, digest, stage)


def is_measured(stage: str, path: str) -> bool:
    """Return whether an output of a stage, as train@default, holds times or sizes of a machine."""
    return any(_matches(pattern, path) for pattern in STAGES[stage.partition("@")[0]].measured)


def _matches(pattern: str, path: str) -> bool:
    text, end = "", 0
    for found in PLACEHOLDER.finditer(pattern):
        text += re.escape(pattern[end : found.start()]) + "[^/]+"
        end = found.end()
    return bool(re.fullmatch(text + re.escape(pattern[end:]), path))


def stage_of(name: str) -> Stage:
    """Return the entry of a stage, as of train@default."""
    return STAGES[name.partition("@")[0]]


def contents_of(receipts: Mapping[str, Receipt], find: Find) -> dict[str, str]:
    """Return the text of the outputs of CONTENTS that are at hand, by path."""
    paths = [path for each in receipts.values() for path in each.outputs if Path(path).name in CONTENTS]
    return {path: file.read_text(encoding="utf-8") for path in paths if (file := find(path))}


def costs_of(receipts: Mapping[str, Receipt], find: Find, checkpoints: int) -> Costs:
    """Return what a rebuild takes that keeps so many checkpoints."""
    seconds, fetched, written = 0.0, 0, 0
    for stage, receipt in receipts.items():
        for path in receipt.outputs:
            if (file := find(path)) is None:
                continue
            written += file.stat().st_size
            if file.suffix != ".json" or not (is_measured(stage, path) or Path(path).name == MANIFEST):
                continue
            content = read_object(file, f"zerolora stage {stage.replace('@', ' ')}")
            seconds += content.get("total_seconds", 0.0) + content.get("answering_seconds", 0.0)
            written += content.get("checkpoint_bytes", 0) * checkpoints
            others = content.get("files", {}).items() if Path(path).name == MANIFEST else ()
            elsewhere = sum(
                each["bytes"] for name, each in others if str(Path(path).parent / name) not in receipt.outputs
            )
            if stage.startswith("fetch"):
                fetched += elsewhere
            else:
                written += elsewhere
    fetched += sum(file.stat().st_size for each in raw_inputs(receipts) if (file := find(each.path)))
    return Costs(seconds=seconds, fetched=fetched, written=written)


def seeds_of(run: str) -> dict[str, list[float]]:
    """Return figures of the project's runs that differ from this one in their seed alone, this one among them; empty
    without such runs."""
    if not (RESULTS / ROWS).is_dir():
        return {}
    rows, overrides = all_runs(RESULTS)
    groups = [
        (each.column.key, group)
        for each in figures(rows, columns_of(rows, overrides), overrides)
        for group in each.repeated
        if run in group.runs
    ]
    return {key: list(group.values) for key, group in groups}


def checkpoints_of(run: str, work: Path = Path("work")) -> dict[int, Path]:
    """Return the checkpoints of a run's last training that are there, by step."""
    folder = newest_run_folder(work / "checkpoints" / run)
    return steps_of(folder) if folder else {}


def digest_of_file(path: Path) -> str:
    """Return the digest of a checkpoint's state, every byte of which is checked. Raises UserError if it is damaged."""
    from zerolora.train.checkpoint.format import CorruptCheckpoint, read

    try:
        return digest_of(read(path)[1])
    except CorruptCheckpoint as error:
        raise UserError(f"{path}: is not a whole checkpoint: {error}; move it out of that folder") from None


def digest_of(manifest: Mapping[str, Any]) -> str:
    """Return the digest of a checkpoint's state from its manifest: equal states of equal steps have equal ones."""
    return hashlib.sha256(canonical({key: manifest[key] for key in STATE}).encode()).hexdigest()


def without_prompts(receipts: Mapping[str, Receipt]) -> dict[str, Receipt]:
    """Return receipts without the prompts that data sets have for the samples of other runs alone."""
    read = {path for each in receipts.values() for path in each.inputs}

    def kept(receipt: Receipt) -> Receipt:
        unread = {path for path in receipt.outputs if Path(path).name == PROMPTS} - read
        if not unread:
            return receipt
        settings = {key: value for key, value in json.loads(receipt.params["settings"]).items() if key != "prompts"}
        outputs = {path: digest for path, digest in receipt.outputs.items() if path not in unread}
        return Receipt(receipt.params | {"settings": canonical(settings)}, receipt.inputs, outputs)

    return {stage: kept(receipt) for stage, receipt in receipts.items()}


def _here(path: str) -> Path | None:
    file = Path(path)
    return file if file.is_file() else None


class _Moved:
    """Replaces paths that hold on this machine alone by paths below INPUTS."""

    def __init__(self, config: Mapping[str, Any], receipts: Mapping[str, Receipt]) -> None:
        texts = {text.rstrip("/") for text in texts_in(config) if text.startswith(("/", "~", "../"))}
        # A text such as /no_think is no path.
        paths = {text for text in texts if Path(text).expanduser().exists()}
        for receipt in receipts.values():
            paths |= {path for path in receipt.inputs if path.startswith(("/", "~", "../"))}
        # A path below another one keeps its place there.
        tops = [path for path in sorted(paths) if not any(path.startswith(f"{other}/") for other in paths)]
        self.names: dict[str, str] = {}
        for path in tops:
            name, number = Path(path).name, 2
            while f"{INPUTS}/{name}" in self.names.values():
                name, number = f"{number}-{Path(path).name}", number + 1
            self.names[path] = f"{INPUTS}/{name}"
        alternatives = "|".join(re.escape(path) for path in sorted(tops, key=len, reverse=True))
        self._pattern = re.compile(rf"(?<![\w./~-])(?:{alternatives})(?![\w.-])") if tops else None

    def text(self, text: str) -> str:
        """Return a text with the paths replaced."""
        return self._pattern.sub(lambda found: self.names[found[0]], text) if self._pattern else text

    def value(self, value: Any) -> Any:
        """Return a JSON value with the paths in its texts and keys replaced."""
        match value:
            case str():
                return self.text(value)
            case dict():
                return {self.text(key): self.value(each) for key, each in value.items()}
            case list():
                return [self.value(each) for each in value]
        return value


def _with_paths(receipts: Mapping[str, Receipt], moved: _Moved, find: Find) -> set[str]:
    """Return the outputs whose text holds a path that is replaced, or the sha256 of such an output."""
    if not moved.names:
        return set()
    texts: dict[str, str] = {}
    hashes = {path: digest for each in receipts.values() for path, digest in each.outputs.items()}
    for path in hashes:
        file = find(path)
        if file and file.stat().st_size <= LONGEST_TEXT:
            texts[path] = file.read_bytes().decode("utf-8", "replace")
    result = {path for path, text in texts.items() if moved.text(text) != text}
    while True:
        marked = {hashes[path] for path in result}
        more = {path for path, text in texts.items() if path not in result and any(each in text for each in marked)}
        if not more:
            return result
        result |= more


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value."""
    match value:
        case str():
            yield value
        case dict():
            for each in value.values():
                yield from texts_in(each)
        case list():
            for each in value:
                yield from texts_in(each)


def _check_paths(record: Record) -> None:
    """Raise UserError if a record holds a path of this machine: in a setting, or the project's or the user's home."""
    private = {f"{folder}/" for folder in (Path.cwd(), Path.home())} - {"//"}
    values = record.model_dump(mode="json")
    settings = [_decoded(text) for each in record.receipts.values() for text in each.params.values()]
    found = next((text for text in texts_in([record.config, settings]) if ABSOLUTE.fullmatch(text)), None)
    for value in values.values():
        text = json.dumps(value, ensure_ascii=False)
        found = found or next((path for path in private if path in text), None)
    if found:
        raise UserError(
            f"{RECORD}, which is pushed for `zerolora rebuild`, would hold {shown(found)}, a path of this machine; use "
            "paths relative to the project in the config and in the files that it names, and run again"
        )


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
