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
        timings="results/{run}/timings.json",
        difference="results/{run}/metrics/difference.json",
        row="results/compare/rows/{run}.json",
    log:
        "results/logs/report/{run}.log",
    resources:
        **resources_of("report"),
    params:
        code=code("report"),
        settings=settings("report"),
        names=names("report"),
        config=job("config_file"),
        steps=below("results/logs/train/{run}/steps"),
    shell:
        "zerolora --log {log} stage report {wildcards.run} {params.names} --settings {params.settings:q}"
        ' --accounting "$("$ZEROLORA_SCRIPTS/accounting.py" {params.steps})"'
        " --config {params.config} --lock {input.lock}"
