"""Manifest of a model directory: sizes, hashes and parameter count, without loading a tensor."""

import math
import re
from collections.abc import Iterable
from pathlib import Path

from zerolora.errors import UserError, shown
from zerolora.files import MANIFEST, checked_name, sha256
from zerolora.model import foreign
from zerolora.model.weight_files import weight_files
from zerolora.tensor_file import read_header

# What save_pretrained of models, tokenizers and processors writes, the vocabularies of older tokenizers, and licences.
SMALL_FILES = re.compile(
    r"(config|generation_config|model\.safetensors\.index|tokenizer|tokenizer_config|special_tokens_map|added_tokens"
    r"|vocab|preprocessor_config|processor_config|video_preprocessor_config|chat_template)\.json"
    r"|vocab\.txt|merges\.txt|(tokenizer|spiece|sentencepiece(\.bpe)?)\.model|.*\.tiktoken|chat_template\.jinja"
    r"|(licen[cs]e|notice|copying|use_policy)[\w.-]*",
    re.IGNORECASE,
)


HASHED_BYTES = 256 * 2**20  # a second or less; adapters are smaller, larger data sets are compared by size


def check_intact(directory: Path, written_by: str) -> None:
    """Raise UserError unless the files of a stage's output directory are those of its manifest.

    Sizes are compared for all of them, and the sha256 of files of up to 256 MiB. `written_by` names the command that
    makes the directory.
    """
    for name, entry in foreign.manifest(directory / MANIFEST, written_by)["files"].items():
        path = directory / name
        if not path.is_file():
            raise UserError(f"{path}: is missing; run `{written_by}` again, or `dvc checkout`")
        size = path.stat().st_size
        if size != entry["bytes"] or (size <= HASHED_BYTES and sha256(path) != entry["sha256"]):
            raise UserError(
                f"{path}: is not the file that {directory / MANIFEST} lists; "
                f"run `{written_by}` again, or `dvc checkout`"
            )


def check_adapter_files(directory: Path, names: Iterable[str]) -> None:
    """Raise UserError unless the files of `names` in an adapter's directory are those that its manifest lists, if it
    has one of `zerolora train`; what else lies there may be edited."""
    listed = foreign.adapter_manifest(directory).get("files", {})
    for name in names:
        path = directory / name
        if name in listed and not (path.is_file() and sha256(path) == listed[name]["sha256"]):
            raise UserError(
                f"{path}: {'is not' if path.is_file() else 'there is not'} the file that {directory / MANIFEST} lists; "
                f"bring that file back, or remove {MANIFEST} if this is another adapter"
            )


def check_loadable(directory: Path) -> None:
    """Raise UserError unless `directory` has config.json and safetensors weights that all readers agree about."""
    if not directory.is_dir():
        raise UserError(f"{directory}: there is no such directory; write the path of a model directory")
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory}: has no config.json, so it is no transformers model; write another path")
    weight_files(directory)


def check_needs_no_code(directory: Path) -> None:
    """Raise UserError if transformers loads the model of `directory` only with Python code that lies beside it.

    Models and tokenizers name such code in `auto_map`. Where transformers has the same architecture built in, that is
    used and the code is ignored.
    """
    contents = {
        foreign.CONFIG: foreign.model_config(directory) if (directory / foreign.CONFIG).exists() else {},
        foreign.TOKENIZER_CONFIG: foreign.tokenizer_config(directory),
    }
    named = [name for name, content in contents.items() if content.get("auto_map")]
    if not named:
        return
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        built_in = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    except ValueError:
        built_in = False
    except Exception as error:  # of any type, for a file of another form than the classes expect
        raise UserError(
            f"{directory}: transformers cannot read its config or tokenizer ({foreign.reason(error)}); "
            f"{foreign.FETCH_AGAIN}"
        ) from None
    if not built_in:
        raise UserError(
            f"{directory / named[0]}: auto_map names Python code that the model needs; such code is never run here, so "
            "choose a model whose architecture transformers has built in, and remove auto_map"
        )


def check_not_quantized(directory: Path) -> None:
    """Raise UserError if the weights of the model in `directory` are stored quantized, as its config.json says.

    What is trained beside such weights could not be added to them.
    """
    path = directory / "config.json"
    config = foreign.config_file(path)
    for part in (config, *config.values()):
        if isinstance(part, dict) and isinstance(stored := part.get("quantization_config"), dict):
            kind = shown(stored.get("quant_method", "unnamed"))
            raise UserError(
                f"{path}: quantization_config: the weights are stored quantized ({kind}), so that nothing trained "
                "could be merged into them; write the checkpoint in bf16, fp16 or fp32 that they were made of, with "
                "method: qlora if it is to take fewer bits in training"
            )


def count_parameters(directory: Path) -> int:
    """Return the number of parameters stored in the directory's safetensors files, from their headers.

    A tied tensor is stored once and counted once. Raises UserError for a broken file.
    """
    return sum(_stored(path) for path in weight_files(directory))


def is_weight(name: str) -> bool:
    """Tell whether a file of a model directory holds weights (gigabytes) rather than settings."""
    return name.endswith(".safetensors")


def model_files(directory: Path) -> list[Path]:
    """Return the files of a model directory that belong to the model, by name: `weight_files` and `SMALL_FILES`.

    Small files are copied to results that are versioned and shared, so UserError is raised for one that is a link to a
    file outside `directory`. Links into the `blobs` of a Hugging Face cache, of which `directory` is a snapshot, are
    followed.
    """
    found = []
    weights = set(weight_files(directory))
    inside = [directory.resolve()]
    if directory.resolve().parent.name == "snapshots":
        inside.append(directory.resolve().parents[1] / "blobs")
    for path in sorted(directory.iterdir()):
        if not path.is_file() or path.name == MANIFEST or path.name.startswith("."):
            continue
        if path in weights:
            found.append(checked_name(path))
        elif SMALL_FILES.fullmatch(path.name):
            if not any(path.resolve().is_relative_to(place) for place in inside):
                raise UserError(f"{path}: is a link to {path.resolve()}, outside the model; put the file itself there")
            found.append(checked_name(path))
    return found


def located(stamp: Path) -> Path:
    """Return the directory that a stamp `{"path", "files"}` names, after a look at the sizes of its files.

    Raises UserError if a file is missing or has another size than when it was checked, or if the weights that are read
    from the directory are no longer those of the stamp.
    """
    record = foreign.manifest(stamp, "zerolora weights")
    if "path" not in record:
        raise UserError(f"{stamp}: nothing was merged; set merge.enabled: true, or use base and adapter")
    directory = Path(record["path"])
    for name, file in record["files"].items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != file["bytes"]:
            raise UserError(f"{path}: is missing or has changed since it was checked; delete {stamp} and run again")
    others = sorted({path.name for path in weight_files(directory)} - record["files"].keys())
    if others and record["files"]:
        raise UserError(f"{directory / others[0]}: was added since the model was checked; remove it")
    return directory


def is_merged(stamp: Path) -> bool:
    """Tell whether the manifest of a run's merged model names weights; without the stage merge there are none."""
    return bool(foreign.manifest(stamp, "zerolora merge").get("enabled", True))


def _stored(path: Path) -> int:
    return sum(math.prod(tensor.shape) for tensor in read_header(path).tensors.values())
