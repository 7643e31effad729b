checkpoint prepare:
    input:
        rows=data_file,
        model=fetched,
        code=code("prepare"),
    output:
        manifest="results/data/{dataset}/manifest.json",
        stats=report(
            "results/data/{dataset}/stats.json",
            caption="../report/stats.rst",
            category="Data",
        ),
    log:
        "results/logs/prepare/{dataset}.log",
    conda:
        "../../envs/conda.yaml"
    params:
        settings=settings("prepare", "dataset"),
        output="results/data/{dataset}",
    shell:
        "zerolora --log {log} prepare --settings {params.settings:q}"
        " --model {input.model} --output {params.output}"
