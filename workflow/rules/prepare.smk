rule prepare:
    input:
        rows=data_files,
        fetched=fetched_data,
        model=fetched,
    output:
        manifest="results/data/{dataset}/manifest.json",
        stats=report(
            "results/data/{dataset}/stats.json",
            caption="../report/stats.rst",
            category="Data",
        ),
        mask=report(
            "results/data/{dataset}/mask.html",
            caption="../report/mask.rst",
            category="Data",
        ),
        others=multiext(
            "results/data/{dataset}/",
            "train.arrow",
            "validation.arrow",
            "test.arrow",
            "mask.json",
            "lengths.csv",
            "dropped.jsonl",
        ),
    log:
        "results/logs/prepare/{dataset}.log",
    conda:
        "../../envs/conda.yaml"
    threads: all_cores
    resources:
        runtime=minutes(resources_of_prepare),
        mem_mb=memory(resources_of_prepare),
    params:
        code=code("prepare"),
        settings=settings("prepare", "dataset"),
        output="results/data/{dataset}",
    shell:
        "zerolora --log {log} prepare --settings {params.settings:q}"
        " --model {input.model} --output {params.output} --workers {threads}"
