"""A copy of the project on the cluster, as a user has it: commands run on the login node, jobs on the nodes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from cluster import ACCOUNT, Cluster
from conftest import Project, project_environment

from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.config.settings import EstimateSettings, RenderSettings
from zerolora.files import canonical, write_json
from zerolora.memory.estimate import estimate
from zerolora.planner.render import render

PROFILE = "profiles/slurm/config.yaml"
QUICK = Path(__file__).with_name("quick_snakemake.py")


class ClusterProject(Project):  # type: ignore[misc]  # tests find conftest by pytest's path alone
    """A project that trains on two nodes through profiles/slurm, filled in as a site would."""

    served = False  # Slurm follows the processes that a job starts

    def __init__(self, project: Project, cluster: Cluster) -> None:
        super().__init__(project.directory)
        self.cluster = cluster
        tools = self.directory.parent / "tools"
        tools.mkdir()
        (tools / "snakemake").write_text(f'#!/bin/sh\nexec {sys.executable} {QUICK} "$@"\n')
        (tools / "snakemake").chmod(0o755)
        environment = project_environment(self.directory)
        self.environment = environment | {
            "PATH": f"{tools}:{environment['PATH']}",
            "SNAKEMAKE_PROFILE": "profiles/slurm",
        }
        self.config["hardware"]["nodes"] = 2
        self.config["train"] |= {"nodes": 2, "ranks_per_node": 1}
        self.write_config()
        self._first = json.loads(json.dumps(self.config))
        self._fill_in_profile()

    def run(self, *command: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the project on the login node."""
        return self.cluster.run(
            *command, directory=self.directory, environment=self.environment | environment, check=check
        )

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a command in the project on the login node; it ends with the tests at the latest."""
        return subprocess.Popen(
            self.cluster.command(*command, directory=self.directory),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def jobs(self, comment: str) -> list[str]:
        """Return the ids of all jobs of this project with this comment, oldest first."""
        return self.cluster.jobs(comment, self.directory)

    def rank_process(self, rank: int) -> int | None:
        """Return the process id, as seen here, of a rank that trains on some node; None if there is none yet."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                name = (process / "comm").read_text().strip()
                ours = (process / "cwd").readlink() == self.directory
            except OSError:
                continue
            if ours and name == f"zl-rank{rank}":
                return int(process.name)
        return None

    def snakemake(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run snakemake with the Slurm profile."""
        return self.run("snakemake", "--profile", "profiles/slurm", *arguments, check=check)

    def training(self, folder: Path, nodes: int, ranks_per_node: int, **train: Any) -> list[str]:
        """Return the command that trains the first config's run, with other settings of `train`, into `folder` on this
        many ranks."""
        config = json.loads(json.dumps(self._first))
        config["hardware"]["nodes"] = nodes
        config["train"] |= {"nodes": nodes, "ranks_per_node": ranks_per_node, "micro_batch": 1} | train
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        run = resolve(load(folder / "config.yaml")).model_dump(mode="json")["runs"]["default"]
        packing = self.directory / "results/default/packing"
        write_json(
            folder / "estimate.json",
            estimate(
                EstimateSettings.model_validate(run["estimate"]), self.directory / "resources/models/tiny", packing
            ),
        )
        zero, _ = render(RenderSettings.model_validate(run["render"]), folder / "estimate.json")
        zero.write(folder / "zero.json")
        paths = {
            "data": self.directory / "results/data/rows",
            "packing": packing,
            "zero": folder / "zero.json",
            "weights": self.directory / "resources/weights/tiny.json",
            "checkpoints": folder / "checkpoints",
            "output": folder,
            "logs": folder / "logs",
        }
        options = [text for option, path in paths.items() for text in (f"--{option}", str(path))]
        return ["zerolora", "stage", "train", "--settings", canonical(run["train"]), *options]

    def _fill_in_profile(self) -> None:
        """Set what a site sets: account, partition and network; and one process to tokenize, for 20 rows."""
        profile = self.profile()
        profile["default-resources"] |= {"slurm_account": ACCOUNT, "slurm_partition": "normal"}
        profile["set-threads"] = dict.fromkeys(profile["set-threads"], 1)
        train = profile["set-resources"]["train"]
        train |= {"launcher": f"{train['launcher']} --export=ALL,GLOO_SOCKET_IFNAME=eth0"}
        self.write_profile(profile)

    def profile(self) -> dict[str, Any]:
        """Return the Slurm profile as it stands."""
        return yaml.safe_load((self.directory / PROFILE).read_text())

    def write_profile(self, profile: dict[str, Any]) -> None:
        """Write the Slurm profile."""
        (self.directory / PROFILE).write_text(yaml.safe_dump(profile))
