rule report:
    input:
        data=prepared,
        packing=packed,
        estimate=estimated,
        zero=zero_file,
        reasons=reasons_file,
        adapter="results/{run}/adapter/manifest.json",
        train=multiext(
            "results/{run}/metrics/",
            "train.json",
            "train_resources.json",
            "loss.csv",
            "telemetry.csv",
        ),
        base=evaluated_base,
        evaluate=multiext(
            "results/{run}/metrics/", "evaluate.json", "evaluate_resources.json"
        ),
        answers="results/{run}/answers.json",
        tasks=asked_tasks,
        lock=LOCK_FILE,
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
    conda:
        "../../envs/conda.yaml"
    resources:
        runtime=minutes(resources_of_report),
        mem_mb=memory(resources_of_report),
    params:
        code=code("report"),
        settings=settings("runs", "run", "report"),
        data=data_directory,
        packing=packing_directory,
        base=base_directory,
        model=model_directory,
        config=CONFIG_FILE,
        results=run_directory,
        steps="results/logs/train/{run}/steps",
    shell:
        "zerolora --log {log} report --settings {params.settings:q} --run {wildcards.run} --model {params.model}"
        " --data {params.data} --packing {params.packing} --estimate {input.estimate} --zero {input.zero} --reasons {input.reasons} --base {params.base} --results {params.results} --lock {input.lock} --config {params.config}"
        ' --accounting "$(workflow/scripts/accounting.py {params.steps})" --usage {output.usage}'
        " --summary {output.summary} --difference {output.difference} --row {output.row} --output {output.page}"
