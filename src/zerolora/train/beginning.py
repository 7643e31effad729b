"""Checks of train.from_adapter, and of the model of a reference, against their manifests and the run's base, once
before the ranks start.

The ranks load the adapter (earlier_adapter.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.config.objective_sections import START
from zerolora.data.reference_columns import COMMAND
from zerolora.errors import UserError
from zerolora.files import MANIFEST, sha256
from zerolora.methods.method import TrainableMethod
from zerolora.methods.peft_format import ADAPTER, is_copy, read_adapter, saved_name
from zerolora.methods.registry import OWN_FILES
from zerolora.model import foreign
from zerolora.model.dequantized import weight_headers
from zerolora.model.manifest import base_identity, check_adapter_files, check_same_base, located

if TYPE_CHECKING:
    from zerolora.tensor_file import StoredTensor

KEY = "train.from_adapter"
ROWS = 4096
"""Rows of two tensors compared at a time."""


@contextmanager
def _named() -> Iterator[None]:
    """Prefix errors with the adapter's key."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{KEY}: {error}") from None


def check_beginning(directory: Path, method: type[TrainableMethod], stamp: Path) -> None:
    """Raise UserError if the adapter in `directory` differs from its manifest, or from the base located by `stamp`."""
    check_identity(directory, method, stamp)
    check_copies(directory, method, located(stamp))


@_named()
def check_identity(directory: Path, method: type[TrainableMethod], stamp: Path) -> None:
    """Raise UserError if an adapter's files differ from its manifest, or the manifest names another base."""
    check_adapter_files(directory, OWN_FILES)
    if method.peft_type:
        check_same_base(directory, stamp)


def model_identity(stamp: Path, adapter: Path | None) -> dict[str, Any]:
    """Return hashes of the weights that `stamp` locates, and of the files of an adapter."""
    files = [adapter / name for name in OWN_FILES] if adapter else []
    return {
        "weights": base_identity(stamp)["weights"],
        "adapter": {path.name: sha256(path) for path in files if path.is_file()},
    }


def check_reference_model(directory: Path, reference: str, start: str | None, stamp: Path) -> None:
    """Raise UserError unless the log-probabilities in `directory` are under the weights that `stamp` locates with the
    adapter that `reference` names: START for `start`, a run, or a directory.

    Of an adapter that is not on this machine, only the name is compared. Values under the model that training starts
    from are also computed again (isolation.py); those of another model cannot be, since it is not loaded.
    """
    manifest = foreign.manifest(directory / MANIFEST, COMMAND, "settings", "model")
    theirs = manifest["settings"].get("from_adapter")
    if theirs not in ([start] if reference == START else [reference, f"results/{reference}/adapter"]):
        ours = (start or "the base model") if reference == START else reference
        raise UserError(
            f"{directory}: has log-probabilities under {theirs or 'the base model'}, and the run compares with {ours}; "
            f"run `{COMMAND}` again"
        )
    adapter = Path(theirs) if theirs else None
    known, now = manifest["model"], model_identity(stamp, adapter)
    changed = [
        key for key in now if known.get(key) != now[key] and (key != "adapter" or not adapter or adapter.is_dir())
    ]
    if changed:
        what = f"the adapter {theirs}" if changed == ["adapter"] else "the base model"
        raise UserError(f"{directory}: has log-probabilities under {what} before it changed; run `{COMMAND}` again")


@_named()
def check_copies(directory: Path, method: type[TrainableMethod], base: Path) -> None:
    """Raise UserError if the adapter in `directory` has copies of embedding or head that differ from those of `base`.

    peft saves them beside an adapter of the two, and would load them into the base; training starts from the base.
    """
    if not method.peft_type or not (directory / ADAPTER).is_file():
        return
    tensors, config = read_adapter(directory)
    copies = {saved_name(name): each for name, each in tensors.items() if is_copy(name, config)}
    if not copies:
        return
    from zerolora.compat.transformers_patches import stored_names
    from zerolora.model.architecture import built_on_meta, config_of
    from zerolora.model.base_check import stored_weight

    model = built_on_meta(config_of(base))
    names, tied = stored_names(model), model.all_tied_weights_keys
    files = weight_headers(base)
    for weight, copy in copies.items():
        if weight not in names.shapes:
            continue  # of another base, which the check of its tensors reports
        stored = stored_weight(weight, files, names) or stored_weight(tied.get(weight, weight), files, names)
        if stored is not None and not _is_copy_of(copy, stored):
            raise UserError(
                f"{directory / ADAPTER}: {copy.name} differs from {weight} of the base, from which training "
                "would start; merge the adapter into its base (`zerolora merge`), and train on that"
            )


def _is_copy_of(copy: "StoredTensor", stored: "StoredTensor") -> bool:
    """Return whether a tensor equals another, rounded to its own type."""
    import torch

    if copy.shape != stored.shape:
        return False
    spans = ((at, at + ROWS) for at in range(0, copy.shape[0], ROWS))
    return all(torch.equal(one, stored.read(*span).to(one.dtype)) for span in spans for one in (copy.read(*span),))
