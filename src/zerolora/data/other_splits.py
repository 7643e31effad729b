"""Validation and test rows of another data set, for one that holds out the same (`prepare.NAME.held_out`)."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zerolora.config.settings import PrepareSettings
from zerolora.data.mask import Proof
from zerolora.data.mixture import HeldOut
from zerolora.data.prepared_rows import HASHES, SPLITS, kind_of, open_table, schema
from zerolora.data.statistics import Statistics
from zerolora.data.tokenize import ChunkTokenizer
from zerolora.errors import UserError
from zerolora.files import MANIFEST, canonical, sha256
from zerolora.model import foreign
from zerolora.model.manifest import check_intact

NAMES = SPLITS[1:]


@dataclass(frozen=True)
class OtherSplits:
    """The held-out rows of a data set, and the names of its sources."""

    settings: PrepareSettings
    tables: dict[str, Any]
    sources: list[str]

    @classmethod
    def of(cls, settings: PrepareSettings, datasets: Path, model: Path, work: ChunkTokenizer) -> "OtherSplits":
        """Return the held-out rows of `settings.held_out` in the directory `datasets`. Raises UserError if it is
        prepared for another model or prompt format, whose tokens are others."""
        data = datasets / str(settings.held_out)
        check_intact(data, "zerolora stage prepare")
        keys = ("model", "chat_template", "added_tokens", "sources")
        manifest = foreign.manifest(data / MANIFEST, "zerolora stage prepare", *keys)
        own = {
            "model": {"name": settings.model, "manifest_sha256": sha256(model)},
            "chat_template": work.template.published(),
            "added_tokens": [asdict(token) for token in work.added],
        }
        if other := next((key for key in own if canonical(manifest[key]) != canonical(own[key])), None):
            what = other.replace("_", " ")
            raise UserError(
                f"prepare: held_out: {settings.held_out} has another {what} than {settings.title}, so its rows "
                "have other tokens; prepare both for the same model, with the same template and added tokens"
            )
        tables = {name: open_table(data, name) for name in NAMES}
        if lacking := next((name for name, table in tables.items() if HASHES not in table.column_names), None):
            raise UserError(
                f"{data / lacking}.arrow: was written by an earlier version, without the column {HASHES}; run "
                f"`zerolora stage prepare {settings.held_out}` again"
            )
        return cls(settings, tables, list(manifest["sources"]))

    @property
    def held_out(self) -> HeldOut:
        """The hashes and questions of the rows, with which training rows are compared."""
        validation, test = (
            np.array(table[HASHES].to_pylist(), np.uint64).reshape(-1, 3) for table in self.tables.values()
        )
        questions = [text for table in self.tables.values() for text in table["question"].to_pylist()]
        row, prompt, normal = np.concatenate([validation, test]).T
        return HeldOut(row, prompt, normal, questions, len(validation))

    def write(self, staged: Path, names: list[str], statistics: Statistics, proof: Proof) -> list[str]:
        """Write the splits to `staged`, and return their sources that are not among `names` already.

        Validation rows that hold something else than the training rows, as texts beside pairs, are left out: no loss is
        computed on them.
        """
        import pyarrow

        more = [name for name in self.sources if name not in names]
        numbers = np.array([[*names, *more].index(name) for name in self.sources], np.int16)
        for name, rows in self.tables.items():
            place = rows.schema.get_field_index("source")
            source = pyarrow.array(numbers[rows["source"].to_numpy()], pyarrow.int16())
            table = rows.set_column(place, rows.schema.field(place), source)
            if name == "validation" and kind_of(rows) != self.settings.rows:
                table = pyarrow.Table.from_batches([], schema(held_out=True, rows=self.settings.rows))
            with (
                pyarrow.OSFile(str(staged / f"{name}.arrow"), "wb") as file,
                pyarrow.ipc.new_stream(file, table.schema) as out,
            ):
                for batch in table.combine_chunks().to_batches():
                    out.write_batch(batch)
                    statistics.count(name, batch)
                    proof.look(batch)
        return more
