"""Record a terminal: a first submission to Slurm that is refused, corrected, queued and run, as docs/figures/queue.svg.

    PYTHONPATH=src:tests:tests/slurm:tests/launchers:tests/browser .venv/bin/python docs/queue_picture.py

It needs root and the packages of the tests' Slurm, and takes two minutes.

The nodes are busy as the corrected run begins. Snakemake looks at the queue every two seconds, and says after two what
a job waits for (tests/slurm/quick_snakemake.py).
"""

import tempfile
from pathlib import Path

from cluster import NODES, Cluster
from cluster_project import ClusterProject
from conftest import make_tiny_model, new_project
from recording import picture, recorded

from zerolora.files import write_text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs/figures/queue.svg"
BUSY_SECONDS = 15
RUN = "snakemake --profile profiles/slurm results/default/adapter/manifest.json"
REFUSED = ("grep slurm_ profiles/slurm/config.yaml", RUN)
CORRECTED = ("sed -i s/gpu/normal/ profiles/slurm/config.yaml", RUN)


def session(project: ClusterProject) -> str:
    """Return what the terminal shows of both submissions."""
    profile = project.profile()
    profile["default-resources"]["slurm_partition"] = "gpu"
    project.write_profile(profile)
    project.run("snakemake", "--profile", "profiles/local", "--until", "fetch")  # as the page says
    options = {"environment": project.environment, "enter": project.cluster.command}
    text = recorded(REFUSED, project.directory, refused=(RUN,), **options)
    busy = (f"--nodes={len(NODES)}", "--exclusive", "--output=/dev/null", "--wrap", f"sleep {BUSY_SECONDS}")
    project.run("sbatch", *busy)
    return f"{text}\n\n{recorded(CORRECTED, project.directory, **options)}"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        project = new_project(folder / "project", make_tiny_model(folder / "model"))
        with Cluster(folder / "slurm") as cluster:
            text = session(ClusterProject(project, cluster))
    print(text)
    write_text(PICTURE, picture(text, "a login node", "queue"))


if __name__ == "__main__":
    main()
