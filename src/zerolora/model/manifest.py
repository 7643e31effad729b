"""Manifests of model directories, and the identity of a base model, without loading a tensor."""

import hashlib
import math
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zerolora.errors import UserError, shown
from zerolora.files import MANIFEST, canonical, checked_name, read_object, sha256, write_json
from zerolora.files import stamp as stamp_of
from zerolora.log import LOGGER
from zerolora.model import foreign
from zerolora.model.dequantized import weight_headers
from zerolora.model.stored_quantization import unpacked
from zerolora.model.weight_files import weight_files

# Output of save_pretrained of models, tokenizers and processors, vocabularies of older tokenizers, and licences.
SMALL_FILES = re.compile(
    r"(config|generation_config|model\.safetensors\.index|tokenizer|tokenizer_config|special_tokens_map|added_tokens"
    r"|vocab|dequantized_on_load|preprocessor_config|processor_config|video_preprocessor_config|chat_template)\.json"
    r"|vocab\.txt|merges\.txt|(tokenizer|spiece|sentencepiece(\.bpe)?)\.model|.*\.tiktoken|chat_template\.jinja"
    r"|(licen[cs]e|notice|copying|use_policy)[\w.-]*",
    re.IGNORECASE,
)


CONVERTED = "converted"
"""Key of a manifest: the weights of a user's directory were converted, so they are not those in that directory."""
LOADED = "bytes_when_loaded"
"""Key of a manifest: the bytes of weights that are dequantized as they are loaded; their files have fewer."""
DAYS = 30
"""Age of a stamp after which files are hashed again: a disk that loses bytes changes no stamp."""
HASHED_BYTES = 256 * 2**20
"""Largest file that is hashed, in a second or less: adapters. Larger files are compared by size."""


def check_intact(directory: Path, written_by: str) -> None:
    """Raise UserError unless the files in the output directory of the command `written_by` match its manifest.

    All are compared by size, those of up to HASHED_BYTES also by sha256.
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
    """Raise UserError unless the named files in an adapter's directory match the manifest of the stage `train`, if
    there is one; other files may be edited."""
    listed = foreign.adapter_manifest(directory).get("files", {})
    for name in names:
        path = directory / name
        if name in listed and not (path.is_file() and sha256(path) == listed[name]["sha256"]):
            raise UserError(
                f"{path}: {'is not' if path.is_file() else 'there is not'} the file that {directory / MANIFEST} lists; "
                f"bring that file back, or remove {MANIFEST} if this is another adapter"
            )


def check_loadable(directory: Path) -> None:
    """Raise UserError unless `directory` has config.json, and weights that all libraries read alike."""
    if not directory.is_dir():
        raise UserError(f"{directory}: there is no such directory; give the path of a model directory")
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory}: has no config.json, so it is not a transformers model; give another path")
    weight_files(directory)


def check_needs_no_code(directory: Path) -> None:
    """Raise UserError if transformers needs Python code from `directory`, which `auto_map` names, to load the model.

    The code is ignored if the architecture is built into transformers.
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
    except BaseException as error:  # classes raise errors of many types
        if not isinstance(error, Exception) and not foreign.is_panic(error):
            raise
        raise UserError(
            f"{directory}: transformers cannot read its config or tokenizer ({foreign.reason(error)}); "
            f"{foreign.FETCH_AGAIN}"
        ) from None
    if not built_in:
        raise UserError(
            f"{directory / named[0]}: auto_map names Python code that the model needs; such code is never run here, so "
            "choose a model whose architecture transformers has built in, and remove auto_map"
        )


def count_parameters(directory: Path) -> int:
    """Return the number of parameters in a directory's weight files, from their headers; a tied tensor counts once."""
    headers = unpacked(directory, weight_headers(directory))
    return sum(math.prod(tensor.shape) for header in headers for tensor in header.tensors.values())


def weight_directory(model: Path, weights: Path) -> Path:
    """Return the directory with the weights of `model`, written by fetch: the user's own, or `weights`."""
    manifest = foreign.manifest(model / MANIFEST, "zerolora stage fetch", "source")
    return weights if manifest.get(CONVERTED) else Path(manifest["source"].get("path", weights))


def is_weight(name: str) -> bool:
    """Return whether a file of a model directory is a file of weights."""
    return name.endswith(".safetensors")


def model_files(directory: Path) -> list[Path]:
    """Return the files in a directory that belong to the model, by name: `weight_files` and `SMALL_FILES`.

    Raises UserError for a small file that links outside `directory`, since small files are copied to results that are
    shared. Links of a Hugging Face snapshot into its cache's `blobs` are followed.
    """
    result = []
    weights = set(weight_files(directory))
    inside = [directory.resolve()]
    if directory.resolve().parent.name == "snapshots":
        inside.append(directory.resolve().parents[1] / "blobs")
    for path in sorted(directory.iterdir()):
        if not path.is_file() or path.name == MANIFEST or path.name.startswith("."):
            continue
        if path in weights:
            result.append(checked_name(path))
        elif SMALL_FILES.fullmatch(path.name):
            if not any(path.resolve().is_relative_to(each) for each in inside):
                raise UserError(f"{path}: is a link to {path.resolve()}, outside the model; put the file itself there")
            result.append(checked_name(path))
    return result


def located(stamp: Path) -> Path:
    """Return the directory that a stamp `{"path", "files"}` names.

    Raises UserError if a file is missing or its size has changed, or if the directory has further weights.
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
    """Return whether the manifest of a run's merged model names weights; with merge.enabled: false there are none."""
    return bool(foreign.manifest(stamp, "zerolora stage merge").get("enabled", True))


def is_whole(stamp: Path) -> bool:
    """Return whether all files that the manifest of a merged model names are on this machine, in their size, and
    unversioned ones with their sha256: Snakemake and DVC compare only versioned ones with what the stage wrote."""
    record = foreign.manifest(stamp, "zerolora stage merge", "files", "path")
    directory, files = Path(record["path"]), record["files"]
    paths = {directory / name: file for name, file in files.items()}
    if not all(path.is_file() and path.stat().st_size == file["bytes"] for path, file in paths.items()):
        return False
    if directory == stamp.parent or have_stamps(directory, files, _stamps_in(_stamp_file(directory))):
        return True
    if not all(sha256(path) == file["sha256"] for path, file in paths.items()):
        return False
    write_stamps(directory, files)
    return True


def write_stamps(directory: Path, files: Mapping[str, Any]) -> None:
    """Write the stamps of an unversioned merged model, whose files have just been hashed, beside its directory."""
    write_json(_stamp_file(directory), stamps_of(directory, files))


def stamps_of(directory: Path, files: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stamps of files that have just been hashed, `{name: {"sha256", "bytes"}}`, and the time, in seconds
    since the epoch."""
    stamps = {name: stamp_of(directory / name) for name in files}
    return {"files": files, "stamps": stamps, "hashed": int(time.time())}


def have_stamps(directory: Path, files: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Return whether all files have the stamps in the `record` of `stamps_of`, which is of these and below DAYS old."""
    match record:
        case {"stamps": dict(stamps), "hashed": int(hashed)} if abs(time.time() - hashed) < DAYS * 86400:
            now = {name: stamp_of(directory / name) for name in files}
            return record["files"] == files and stamps == {name: each and [*each] for name, each in now.items()}
    return False


def _stamp_file(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.stamps.json")


def _stamps_in(path: Path) -> dict[str, Any]:
    try:
        return read_object(path, "zerolora merged-weights")
    except UserError:  # none yet, or damaged: all is hashed again
        return {}


BASE = "base_model"
"""Key of an adapter's manifest."""


def base_identity(stamp: Path) -> dict[str, Any]:
    """Return `name`, `revision` and `weights` of the base model that the file `stamp` locates.

    `weights` is a hash over the sha256 of its weight files, so copies, also with another tokenizer, are the same base.
    """
    record = foreign.manifest(stamp, "zerolora weights", "files", "source")
    name, revision = hub_name(record["source"])
    hashes = {name: file["sha256"] for name, file in record["files"].items() if is_weight(name)}
    return {"name": name, "revision": revision, "weights": _hash(hashes)}


def _hash(weights: dict[str, str]) -> str:
    """Return one hash for the sha256 of weight files by name."""
    return hashlib.sha256(canonical(weights).encode()).hexdigest()


def hub_name(source: dict[str, Any]) -> tuple[str, str | None]:
    """Return base_model_name_or_path and revision of peft's config for a source that `fetch` recorded.

    A hub model has its repository and commit. Other names are invalid on the hub, so no reader loads another model of
    that name: `PACKAGE==VERSION:FILE` for a package's file, and a path that begins with / or a dot for a directory
    (huggingface_hub/utils/_validators.py, validate_repo_id).
    """
    if source["source"] == "hub":
        return source["repository"], source["revision"]
    if source["source"] == "package":
        return f"{source['package']}=={source['version']}:{source['file']}", None
    path: str = source["path"]
    return (path if path.startswith(("/", ".")) else f"./{path}"), None


def check_same_base(directory: Path, stamp: Path) -> None:
    """Raise UserError if the adapter's manifest in `directory` names another base model than the file `stamp`.

    Adapters without a manifest, as on the hub, pass.
    """
    theirs = foreign.adapter_manifest(directory).get(BASE)
    if theirs and theirs["weights"] != (ours := base_identity(stamp))["weights"]:
        raise UserError(
            f"{directory / MANIFEST}: {BASE} is {_described(theirs)}, and this base is {_described(ours)}; use an "
            "adapter of this base model, or that adapter's"
        )


def check_base_directory(directory: Path, base: Path) -> None:
    """Raise UserError if the adapter's manifest in `directory` names other weights than those in directory `base`,
    which are hashed; without a manifest, log the base that the adapter's config names."""
    if theirs := foreign.adapter_manifest(directory).get(BASE):
        weights = _hash({path.name: sha256(path) for path in weight_files(base)})
        if theirs["weights"] != weights:
            raise UserError(
                f"{directory / MANIFEST}: {BASE} is {_described(theirs)}, and the weights in {base} are "
                f"{weights[:12]}; use that base, or remove {BASE} from the manifest if these are the same numbers in "
                "other files"
            )
    elif (directory / foreign.ADAPTER_CONFIG).is_file():
        name = foreign.adapter_config(directory).get("base_model_name_or_path")
        LOGGER.info("%s: names %s as its base", directory, shown(name) if name else "nothing")


def _described(base: dict[str, Any]) -> str:
    revision = f" at {base['revision'][:12]}" if base.get("revision") else ""
    return f"{base['name']}{revision} (weights {base['weights'][:12]})"
