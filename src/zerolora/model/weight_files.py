"""Which files of a directory are a model's weights: one answer for counting, hashing, loading, merging and export.

transformers reads `model.safetensors`, else the files that `model.safetensors.index.json` names. Other libraries take
the index first, or every file of weights. So a directory in which these differ is refused. Source of the order:
transformers/modeling_utils.py, _get_resolved_checkpoint_files.
"""

from pathlib import Path

from zerolora.errors import UserError, shown
from zerolora.model import foreign

WEIGHTS = "*.safetensors"
SINGLE = "model.safetensors"
WEIGHT_INDEX = "model.safetensors.index.json"
EXPLICIT = "transformers_weights"
"""Key of a config.json: the file that transformers reads instead of these."""


def weight_files(directory: Path) -> list[Path]:
    """Return the files of a model's weights, sorted by name.

    Files beside an index that it does not name, and that no library takes for the model's (such as
    consolidated.safetensors), are left out. Raises UserError if the directory has no weights, if readers would choose
    different ones, or if an adapter there would be applied to them.
    """
    check_read_as_it_is(directory)
    present = {path.name for path in directory.glob(WEIGHTS) if path.is_file()}
    return [directory / name for name in chosen_names(directory, present)]


def chosen_names(directory: Path, present: set[str]) -> list[str]:
    """Return those of the safetensors files `present` that are the weights of a model, sorted.

    `directory` has its index, if there is one; the files need not be there yet. Raises UserError as `weight_files`.
    """
    if (directory / WEIGHT_INDEX).is_file():
        names = _named_by_index(directory)
        if SINGLE in present | names and names != {SINGLE}:
            raise UserError(
                f"{directory}: has two sets of weights, {SINGLE} and the files that {WEIGHT_INDEX} names; "
                "remove one of the two"
            )
        if absent := sorted(names - present):
            raise UserError(
                f"{directory / WEIGHT_INDEX}: names {few(absent)}, and there is no such file; fetch the whole model"
            )
        if others := sorted(name for name in present - names if name.startswith("model")):
            raise UserError(
                f"{directory}: has {few(others)}, which {WEIGHT_INDEX} does not name; remove what is not the model's"
            )
        return sorted(names)
    if not present:
        raise UserError(
            f"{directory}: has no .safetensors weights; save the model with save_pretrained "
            "(pickled weights such as pytorch_model.bin are not read)"
        )
    if SINGLE not in present:
        raise UserError(
            f"{directory}: has {few(sorted(present))} without {WEIGHT_INDEX}, so nothing says which weights are the "
            f"model's; fetch the whole model, or rename a single file to {SINGLE}"
        )
    if others := sorted(present - {SINGLE}):
        raise UserError(f"{directory}: has {few(others)} beside {SINGLE}; remove what is not the model's")
    return [SINGLE]


def few(names: list[str]) -> str:
    """Return the first three of some names, and how many more there are."""
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(shown(name) for name in names[:3]) + more


def weight_map(directory: Path) -> dict[str, str]:
    """Return the file of each tensor as the index of a model's weights has it; empty without an index.

    Raises UserError unless it maps names to names of safetensors files in the directory.
    """
    path = directory / WEIGHT_INDEX
    if not path.is_file():
        return {}
    found: dict[str, str] = foreign.weight_index(path)["weight_map"]
    for name in found.values():
        if not name.endswith(".safetensors"):
            raise UserError(f"{path}: weight_map names {shown(name)}; expected a .safetensors file")
    return found


def _named_by_index(directory: Path) -> set[str]:
    return set(weight_map(directory).values())


def check_read_as_it_is(directory: Path) -> None:
    """Raise UserError if transformers would apply an adapter to the weights of a directory, or read other files."""
    if (directory / foreign.ADAPTER_CONFIG).is_file():
        path = directory / foreign.ADAPTER_CONFIG
        raise UserError(
            f"{path}: is an adapter in the directory of its base, and transformers would apply "
            "it; move the adapter to a directory of its own"
        )
    config = foreign.model_config(directory) if (directory / foreign.CONFIG).is_file() else {}
    if config.get(EXPLICIT) is not None:
        path = directory / foreign.CONFIG
        raise UserError(
            f"{path}: {EXPLICIT} is {shown(config[EXPLICIT])}, which other libraries do not read; "
            f"remove the key, and name the file {SINGLE}"
        )
