rule report:
    input:
        data=prepared,
        estimate=estimated,
        render=rendered,
        train=trained,
        base=evaluated_base,
        evaluate=evaluated,
        lock=LOCK_FILE,
        model=ancient(model_manifest),
        code=code("report"),
        config=ancient(RESOLVED),
    output:
        report(
            "results/{run}/report.html",
            caption="../report/run.rst",
            category="Runs",
            labels={"run": "{run}"},
        ),
    log:
        "results/logs/report/{run}.log",
    conda:
        "../../envs/conda.yaml"
    params:
        settings=settings("runs", "run", "report"),
        data=data_directory,
        base=base_directory,
        results="results/{run}",
    shell:
        "zerolora --log {log} report --config {input.config} --run {wildcards.run} --model {input.model}"
        " --data {params.data} --base {params.base} --results {params.results} --lock {input.lock} --output {output}"
