"""What a user reads in place of a key that the config does not have, and of one that it has (config/known_keys.py)."""

import subprocess
import sys

import pytest

from zerolora.config.known_keys import OWNERS, foreign_names, instead, known, listed
from zerolora.errors import UserError
from zerolora.imports.formats import FORMATS


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("train.lerning_rate", "did you mean train.learning_rate?"),
        ("train.lr", "use train.learning_rate"),
        ("learning_rate", "use train.learning_rate"),
        ("train.num_train_epochs", "use train.epochs"),
        ("train.lora_r", "use train.lora.r"),
        ("train.lora.rank", "use train.lora.r"),
        ("train.target_modules", "use train.lora.targets"),
        ("train.dataloader_num_workers", "it has no equal here: rows are prepared before training"),
        ("train.warmup", "did you mean train.warmup_ratio or train.warmup_steps?"),
        ("runs.a.learning_rate", "use runs.a.train.learning_rate"),
        ("runs.a.datasets", "did you mean runs.a.dataset?"),
        ("prepare.mine.max_lenth", "did you mean prepare.mine.max_length?"),
        ("data.max_lenth", "did you mean data.max_length?"),
        ("train.frobnicate", "`zerolora keys` lists all"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_one(written: str, text: str) -> None:
    assert instead(written.split(".")).startswith(text)


def test_a_doubled_letter_in_any_key_leads_back_to_it() -> None:
    for key in known():
        if key.path[0] not in OWNERS and len(key.path[-1]) > 5:
            wrong = (*key.path[:-1], key.path[-1] + key.path[-1][-1])
            assert key.dotted in instead(wrong), wrong


def test_every_equal_of_the_importers_is_a_key() -> None:
    paths = {key.path for key in known()}
    placeholders = {"OBJECTIVE", "RUN"}
    ours = {path for _, theirs in foreign_names() for path in theirs.paths if not placeholders & {*path}}
    assert len(ours) > 50 and ours <= paths
    assert len(foreign_names()) == sum(len(importer.rules) for importer in FORMATS.values())


def test_keys_are_listed_with_meaning_unit_and_default() -> None:
    assert "train.checkpoint_minutes (number; default 10.0)\n    Write a checkpoint when" in listed("checkpoint_min")
    assert "elsewhere: lora_r, lora_rank" in listed("lora_rank")
    assert len(listed(None).splitlines()) == len(known())
    with pytest.raises(UserError, match="'lerning_rate': did you mean train.learning_rate"):
        listed("lerning_rate")


def test_version_and_schema_need_nothing_else() -> None:
    command = [sys.executable, "-m", "zerolora"]
    told = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert told.stdout.startswith("zerolora 0.")
    told = subprocess.run([*command, "schema"], capture_output=True, text=True, check=True)
    assert told.stdout.startswith('{\n  "$defs"')
