rule prepare:
    input:
        rows=job("data_files"),
        made=job("made_data"),
        model=of("resources/models/{model}/manifest.json"),
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
            "prompts.arrow",
            "train.arrow",
            "validation.arrow",
            "test.arrow",
            "mask.json",
            "lengths.csv",
            "dropped.jsonl",
        ),
    log:
        "results/logs/prepare/{dataset}.log",
    threads: all_cores
    resources:
        **resources_of("prepare"),
    params:
        code=code("prepare"),
        settings=settings("prepare"),
        names=names("prepare"),
    shell:
        "zerolora --log {log} stage prepare {wildcards.dataset} {params.names}"
        " --settings {params.settings:q} --workers {threads}"
