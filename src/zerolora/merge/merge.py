"""Stage merge: add the adapter to the base weights and write a directory that plain transformers loads.

    zerolora stage merge RUN
    zerolora merge --base DIRECTORY --adapter DIRECTORY --output DIRECTORY

The plan is made from headers alone (merge_plan.py). Weights are then written a block of rows at a time, so memory does
not grow with the model (stream.py). Updates are computed in fp32 and rounded once, to the dtype of the base weight.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from zerolora.compat.transformers_patches import stored_names
from zerolora.errors import UserError
from zerolora.files import MANIFEST, as_json, describe, staged_directory, write_json
from zerolora.json_kinds import check
from zerolora.log import result
from zerolora.merge.listed import ListedNames, listed_model
from zerolora.merge.merge_plan import BaseNames, plan_merge
from zerolora.merge.merge_updates import requantized, untied_copies, updates_of, write_untied
from zerolora.merge.stream import write_weights
from zerolora.methods.method import tied_weights
from zerolora.model import added_tokens, foreign
from zerolora.model.architecture import built_on_meta, config_of
from zerolora.model.base_check import listed_shapes
from zerolora.model.dequantized import MARK, index_of, is_dequantized_on_load, weight_headers
from zerolora.model.manifest import is_weight, is_whole, model_files, write_stamps
from zerolora.model.prompt_format import write_prompt_format, write_tokens
from zerolora.model.stored_quantization import check_mergeable
from zerolora.model.weight_files import WEIGHT_INDEX
from zerolora.units import byte_size


def merge(
    base: Path, adapter: Path, output: Path, directory: Path, data: Path | None = None, dequantized: bool = False
) -> None:
    """Write the merged model to `directory` and its manifest to `output`/manifest.json.

    `directory` is `output` if the weights are versioned; otherwise it is another directory, and only their hashes are
    versioned. With `data`, the prepared data, the model gets its prompt format. With `dequantized`, the adapter is
    added to the weights as training quantized them. Raises UserError if the adapter was trained on another base model.
    """
    with staged_directory(directory) as staged:
        hashes = write_model(base, [(adapter, 1.0)], staged, directory, data, dequantized, hashed=True)
        files = describe(staged, hashes)
        manifest = {"path": str(directory), "files": files} | ({"dequantized": True} if dequantized else {})
        if directory == output:
            write_json(staged / MANIFEST, manifest)
    if directory != output:
        write_stamps(directory, files)
        with staged_directory(output) as staged:
            write_json(staged / MANIFEST, manifest)
    size = byte_size(sum(file["bytes"] for file in files.values()))
    result(size if directory == output else f"{size} in {directory}")


def skip_merge(output: Path) -> None:
    """Replace `output` by a manifest without weights, which records that merge.enabled is false."""
    with staged_directory(output) as staged:
        write_json(staged / MANIFEST, {"enabled": False, "files": {}})
    result("nothing merged: merge.enabled is false")


def restore(base: Path, adapter: Path, manifest: Path, data: Path | None = None) -> None:
    """Merge again if weights of `manifest` are missing or differ from it.

    Raises UserError if the result differs from the manifest.
    """
    expected = foreign.manifest(manifest, "zerolora stage merge", "files", "path")
    directory = Path(expected["path"])
    if not is_whole(manifest):
        with staged_directory(directory) as staged:
            dequantized = expected.get("dequantized", False)
            hashes = write_model(base, [(adapter, 1.0)], staged, directory, data, dequantized, hashed=True)
            if describe(staged, hashes) != expected["files"]:
                raise UserError(f"{manifest}: base and adapter here merge to other weights; run the merge stage again")
            if directory == manifest.parent:
                write_json(staged / MANIFEST, expected)
        if directory != manifest.parent:
            write_stamps(directory, expected["files"])


def write_model(
    base: Path,
    adapters: Sequence[tuple[Path, float]],
    staged: Path,
    directory: Path,
    data: Path | None = None,
    dequantized: bool = False,
    *,
    hashed: bool = False,
) -> dict[str, str]:
    """Write a base plus adapters, each times its weight, to the directory `staged`.

    Messages name `directory`. Returns the sha256 of the weight files by name; without `hashed`, nothing.
    """
    check_mergeable(base)
    files = weight_headers(base)
    spec = None if dequantized else listed_model(base, files, [path for path, _ in adapters])
    tokens = added_tokens.of_directory(adapters[0][0])
    names: BaseNames
    before = None
    if spec is not None:
        names, updates, tied = ListedNames(listed_shapes(spec)), updates_of(adapters, spec), tied_weights(spec)
    else:
        model = built_on_meta(config_of(base))
        before = model.config.get_text_config().vocab_size if tokens else None
        added_tokens.add_rows(model, tokens)
        tied = tied_weights(model)
        names, updates = stored_names(model), updates_of(adapters, model)
        if dequantized:
            updates = requantized(updates, [path for path, _ in adapters], model)
    stored = {names.of_model(name)[0] for file in files for name in file.tensors} if tied else set()
    updates, untied = untied_copies(updates, tied, stored)
    plan = plan_merge(files, names, updates, staged, before, untied)
    if missing := plan.missing(updates):
        if missing[0] not in names.shapes:
            raise UserError(
                f"{base}: the model of its config.json has no {missing[0]}, which the adapter changes; use the adapter "
                "with its base unmerged, or train one without it"
            )
        # The adapter's tensors are those of the model that config.json describes (methods/adapter_check.py).
        raise UserError(
            f"{base}: its files have no {missing[0]}, which its config.json describes and the adapter changes; fetch "
            "the whole model"
        )
    for path in model_files(base):
        if not is_weight(path.name) and path.name != MARK:
            shutil.copyfile(path, staged / path.name)
    if is_dequantized_on_load(base) and (base / WEIGHT_INDEX).is_file():
        (staged / WEIGHT_INDEX).write_text(as_json(index_of(files)), encoding="utf-8")
    if tokens:
        write_tokens(staged, tokens, model.config.get_text_config().vocab_size)
    if data is not None:
        write_prompt_format(data, staged)
    if untied:
        write_untied(staged)
    copies = {unit.copy: path.name for path, added in plan.copies.items() for unit in added if unit.copy}
    update_index(staged, plan.more_parameters, plan.more_bytes, copies)
    return write_weights(plan, directory, hashed)


def update_index(model: Path, parameters: int, size: int, added: Mapping[str, str]) -> None:
    """Add parameters and bytes to the totals of a model's weight index, and `added`, file by tensor, to its map.

    A model in one file has no index.
    """
    path = model / WEIGHT_INDEX
    if not path.is_file():
        return
    index = foreign.weight_index(path)
    increase = {"total_parameters": parameters, "total_size": size}
    metadata = index.get("metadata") or {}
    check(metadata, foreign.IndexTotals, path, foreign.FETCH_AGAIN)
    for name in increase.keys() & metadata.keys():
        metadata[name] += increase[name]
    index["metadata"] = metadata
    index["weight_map"] |= added
    write_json(path, index)
