#!/usr/bin/env python3
"""Print what Slurm accounted of a training that is finished, as JSON; null where no Slurm job did it.

    workflow/scripts/accounting.py results/logs/train/NAME/steps

The file has a line for each step that trained (record_slurm_step), and `finished` where one ended well.
"""

# ruff: noqa: E402
import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # from now on Ctrl-C ends it without a traceback

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

FIELDS = ("JobIDRaw", "State", "ElapsedRaw", "TimelimitRaw", "NNodes", "AllocTRES", "MaxRSS")
FINISHED = "finished"


def steps_of(lines: list[str]) -> list[str]:
    """Return the steps of the last training that finished, as in 17.0: those noted since the one before."""
    if FINISHED not in lines:
        return []
    last = len(lines) - 1 - lines[::-1].index(FINISHED)
    earlier = lines[:last]
    since = len(earlier) - earlier[::-1].index(FINISHED) if FINISHED in earlier else 0
    return earlier[since:]


def used(steps: list[str]) -> dict[str, Any] | None:
    """Return what the jobs of these steps used, all tries together; memory is that of the fullest task.

    Seconds and GPUs are those of whole jobs, which is what a site charges. A job that still runs does more than to
    train (profiles/allocation): of it the steps count.
    """
    jobs = list(dict.fromkeys(step.partition(".")[0] for step in steps))
    records = asked(jobs)
    running = {record["JobIDRaw"] for record in records if record["State"] == "RUNNING"}
    counted = [
        record
        for record in records
        if (record["JobIDRaw"] in steps if of(record) in running else "." not in record["JobIDRaw"])
    ]
    if not counted:
        return None
    held = [size(record["MaxRSS"]) for record in records if of(record) not in running or record["JobIDRaw"] in steps]
    last = [record for record in records if "." not in record["JobIDRaw"]][-1]
    return {
        "jobs": " ".join(jobs),
        "seconds": sum(int(record["ElapsedRaw"]) for record in counted),
        "gpu_seconds": sum(int(record["ElapsedRaw"]) * int(tres(record, "gres/gpu") or 0) for record in counted),
        "host_bytes": max(held),
        "limit_seconds": 60 * int(last["TimelimitRaw"]) if last["TimelimitRaw"].isdigit() else None,
        "limit_host_bytes": size(tres(last, "mem")) // int(last["NNodes"]),
    }


def asked(jobs: list[str]) -> list[dict[str, str]]:
    """Return what sacct says of jobs and their steps; of a job that was requeued, each of its times.

    One task of a job array has the number of the array: sacct then answers for the others too.
    """
    command = ["sacct", "--noheader", "--parsable2", "--duplicates", f"--jobs={','.join(jobs)}"]
    result = subprocess.run([*command, f"--format={','.join(FIELDS)}"], capture_output=True, text=True, check=True)
    records = [dict(zip(FIELDS, line.split("|"), strict=True)) for line in result.stdout.splitlines()]
    return [record for record in records if of(record) in jobs]


def of(record: dict[str, str]) -> str:
    """Return the job of a record."""
    return record["JobIDRaw"].partition(".")[0]


def tres(record: dict[str, str], name: str) -> str:
    """Return how much a job had of a resource, empty for none."""
    return dict(each.split("=") for each in record["AllocTRES"].split(",") if each).get(name, "")


def size(text: str) -> int:
    """Return the bytes that Slurm writes as in 8000M; 0 for nothing."""
    factor = 1024 ** ("KMGT".find(text[-1:]) + 1) if text else 1
    return int(float(text.rstrip("KMGT") or 0) * factor)


def main() -> None:
    """Answer for the file named; never fail a stage because accounting does not answer."""
    file = Path(sys.argv[1])
    steps = steps_of(file.read_text(encoding="utf-8").split()) if file.is_file() else []
    try:
        print(json.dumps(used(steps) if steps else None))
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"what training used is not known from Slurm: {error}", file=sys.stderr)
        print("null")


if __name__ == "__main__":
    main()
