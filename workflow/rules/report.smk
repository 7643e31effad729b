rule report:
    input:
        data=of("results/data/{dataset}/manifest.json"),
        stats=of("results/data/{dataset}/stats.json"),
        packing=of("results/{packed}/packing/manifest.json"),
        packing_stats=of("results/{packed}/packing/stats.json"),
        estimate=of("results/{estimated}/estimate.json"),
        zero=of("results/{rendered}/zero.json"),
        reasons=of("results/{rendered}/render.json"),
        adapter="results/{run}/adapter/manifest.json",
        train=multiext(
            "results/{run}/metrics/",
            "train.json",
            "train_resources.json",
            "loss.csv",
            "telemetry.csv",
        ),
        base=of("results/base/{dataset}/evaluate.json"),
        base_others=of(
            "results/base/{dataset}/evaluate_resources.json",
            "results/base/{dataset}/answers.json",
        ),
        evaluate=multiext(
            "results/{run}/metrics/", "evaluate.json", "evaluate_resources.json"
        ),
        answers="results/{run}/answers.json",
        tasks=job("task_files"),
        lock=JOBS.users_file(project_file("envs/requirements.lock")),
    output:
        page=report(
            "results/{run}/report.html",
            caption="../report/run.rst",
            category="Runs",
            labels={"run": "{run}"},
        ),
        usage="results/{run}/usage.json",
        summary="results/{run}/summary.json",
        difference="results/{run}/metrics/difference.json",
        row="results/compare/rows/{run}.json",
    log:
        "results/logs/report/{run}.log",
    resources:
        **resources_of("report"),
    params:
        code=code("report"),
        settings=settings("report"),
        data=subpath(input.data, parent=True),
        packing=subpath(input.packing, parent=True),
        base=subpath(input.base, parent=True),
        model=path_of("resources/models/{model}"),
        config=job("config_file"),
        results=subpath(output.page, parent=True),
        steps=below("results/logs/train/{run}/steps"),
    shell:
        "zerolora --log {log} report --settings {params.settings:q} --run {wildcards.run} --model {params.model}"
        " --data {params.data} --packing {params.packing} --estimate {input.estimate} --zero {input.zero} --reasons {input.reasons} --base {params.base} --results {params.results} --lock {input.lock} --config {params.config}"
        ' --accounting "$("$ZEROLORA_SCRIPTS/accounting.py" {params.steps})" --usage {output.usage}'
        " --summary {output.summary} --difference {output.difference} --row {output.row} --output {output.page}"
