"""Downloads a model's config.json from the Hugging Face hub, and nothing else of its repository."""

import re
from pathlib import Path

from zerolora.errors import UserError, shown
from zerolora.fetch.hub_errors import explained_errors

NAME = re.compile(r"([\w.-]+/[\w.-]+|[\w.-]+)@([0-9a-f]{40})")


def download_config(pinned: str) -> Path:
    """Return the path of config.json of NAME@REVISION, in the cache of the hub's client.

    Raises UserError if it is not written so, or cannot be downloaded.
    """
    match = NAME.fullmatch(pinned)
    if not match:
        raise UserError(f"--hub {shown(pinned)}: write NAME@REVISION, a repository and the 40 digits of a commit of it")
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils import validate_repo_id

    repository, revision = match.groups()
    try:
        validate_repo_id(repository)
    except HFValidationError:
        raise UserError(f"--hub {shown(pinned)}: is not the name of a repository; copy it from the hub") from None
    if isinstance(cached := try_to_load_from_cache(repository, "config.json", revision=revision), str):
        return Path(cached)
    name = f"model {repository} at {revision}"
    with explained_errors(name, "model"):
        try:
            # Without a network this fails at once, where the download would try again for half a minute.
            get_hf_file_metadata(hf_hub_url(repository, "config.json", revision=revision))
            return Path(hf_hub_download(repository, "config.json", revision=revision))
        except LocalEntryNotFoundError:  # there is no network
            raise
        except EntryNotFoundError:
            raise UserError(f"{name}: has no config.json; write the repository of a transformers model") from None
