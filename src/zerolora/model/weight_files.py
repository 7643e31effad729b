"""A model's weight files in a directory, the same for counting, hashing, loading, merging and export.

transformers reads `model.safetensors`, else the files that `model.safetensors.index.json` names
(transformers/modeling_utils.py, _get_resolved_checkpoint_files). Other libraries read the index first, or every file of
weights, so a directory in which these differ is refused.
"""

from pathlib import Path

from zerolora.errors import UserError, shown
from zerolora.model import foreign

WEIGHTS = "*.safetensors"
SINGLE = "model.safetensors"
WEIGHT_INDEX = "model.safetensors.index.json"
EXPLICIT = "transformers_weights"
"""Key of a config.json that names another file for transformers to read."""


def weight_files(directory: Path) -> list[Path]:
    """Return a model's weight files, sorted by name, without other files beside an index that no library reads, such as
    consolidated.safetensors.

    Raises UserError if the directory has no weights, if libraries would read different files, or if transformers would
    apply an adapter there.
    """
    check_read_as_it_is(directory)
    present = {path.name for path in directory.glob(WEIGHTS) if path.is_file()}
    return [directory / name for name in chosen_names(directory, present)]


def chosen_names(directory: Path, present: set[str]) -> list[str]:
    """Return the safetensors files among `present` that are a model's weights, sorted.

    `directory` has the index, if any, but need not have the files. Raises UserError as `weight_files` does.
    """
    if (directory / WEIGHT_INDEX).is_file():
        names = set(weight_map(directory).values())
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
    """Return the first three names, and the number of others."""
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(shown(name) for name in names[:3]) + more


def weight_map(directory: Path) -> dict[str, str]:
    """Return the file of each tensor by the index of a model's weights; empty without an index.

    Raises UserError unless they are safetensors files in the directory.
    """
    path = directory / WEIGHT_INDEX
    if not path.is_file():
        return {}
    result: dict[str, str] = foreign.weight_index(path)["weight_map"]
    for name in result.values():
        if not name.endswith(".safetensors"):
            raise UserError(f"{path}: weight_map names {shown(name)}; expected a .safetensors file")
    return result


def check_read_as_it_is(directory: Path) -> None:
    """Raise UserError if transformers would apply an adapter to the weights of a directory, or read other files."""
    path = directory / foreign.ADAPTER_CONFIG
    if path.is_file():
        raise UserError(
            f"{path}: is an adapter in the directory of its base, and transformers would apply "
            "it; move the adapter to a directory of its own"
        )
    path = directory / foreign.CONFIG
    config = foreign.config_file(path) if path.is_file() else {}
    if config.get(EXPLICIT) is not None:
        raise UserError(
            f"{path}: {EXPLICIT} is {shown(config[EXPLICIT])}, which other libraries do not read; "
            f"remove the key, and name the file {SINGLE}"
        )
