"""The Croissant description of a run's data set: its files with hash, origin and licence, and no row.

Written here, not by MLCommons' mlcroissant, which needs seven packages more, two of them without a release in years;
that library checks what is written (tests/evidence).
"""

from pathlib import PurePath
from typing import Any

from zerolora.files import as_json
from zerolora.publish.data_files import DataFile, data_files
from zerolora.publish.finished import FinishedRun
from zerolora.units import counted

NAME = "croissant.json"
VERSION = "http://mlcommons.org/croissant/1.0"
CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "equivalentProperty": "cr:equivalentProperty",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileObject": "cr:fileObject",
    "fileProperty": "cr:fileProperty",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}
"""The context that the specification prescribes (docs.mlcommons.org/croissant, 1.0, appendix 1)."""
FORMATS = {
    ".arrow": "application/vnd.apache.arrow.file",
    ".csv": "text/csv",
    ".gz": "application/gzip",
    ".json": "application/json",
    ".jsonl": "application/jsonlines",
    ".parquet": "application/x-parquet",
    ".tsv": "text/tab-separated-values",
    ".txt": "text/plain",
    ".zst": "application/zstd",
}
"""Media types by suffix."""


def croissant(run: FinishedRun) -> str:
    """Return the description of a run's data set, as JSON-LD."""
    stats, files = run.read(run.data / "stats.json"), data_files(run)
    splits = ", ".join(f"{split} {stats[f'{split}_rows']:,}" for split in ("train", "validation", "test"))
    columns = sorted(stats.get("names", {}).get("read_columns", {}))
    licences = sorted({file.licence for file in files if file.licence})
    value: dict[str, Any] = {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "name": run.dataset,
        "description": f"{counted(stats['read_rows'], 'row')} read for a run of zerolora; in its splits: {splits}. "
        "Each file is named by its sha256; a file without an origin is its author's and is not published here.",
        "conformsTo": VERSION,
        "isLiveDataset": False,
        "distribution": [_file(number, file) for number, file in enumerate(files)],
    }
    if licences:
        value["license"] = licences
    if columns:
        value["variableMeasured"] = columns
    return as_json(value)


def media_type(name: str) -> str:
    """Return the media type of a file by its name."""
    return FORMATS.get(PurePath(name).suffix, "application/octet-stream")


def _file(number: int, file: DataFile) -> dict[str, Any]:
    origin = f", from {file.origin}" if file.origin else ""
    return {
        "@type": "cr:FileObject",
        "@id": f"file-{number}",
        "name": file.name,
        "description": f"Of source {file.source}{origin}; licence: {file.licence or 'not known'}",
        "contentUrl": file.address or file.name,
        "encodingFormat": media_type(file.name),
        "sha256": file.sha256,
    }
