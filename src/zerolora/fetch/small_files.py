"""The small files of a model in a local directory, as `fetch` publishes them, without its weights."""

import shutil
from pathlib import Path

from zerolora.errors import UserError
from zerolora.fetch.model_sources import check_published_settings
from zerolora.files import MANIFEST, write_json
from zerolora.model.manifest import is_weight, model_files


def small_files(directory: Path, into: Path) -> Path:
    """Copy config, tokenizer and templates of a model `into` a directory, with a manifest without hashes; return the
    directory that has them as training reads them: below it, if the model is converted.

    Raises UserError if the model cannot be used.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: there is no such directory; correct fetch.directory")
    for path in model_files(directory):
        if not is_weight(path.name):
            shutil.copyfile(path, into / path.name)
    try:
        files = check_published_settings(into)
    except UserError as error:
        raise UserError(str(error).replace(str(into), str(directory))) from None
    # The names of converted weights are not those in the directory, and not checked before.
    source = {"path": str(directory.resolve())} if files == into else {}
    write_json(files / MANIFEST, {"files": {}, "source": {"source": "directory", **source}})
    return files
