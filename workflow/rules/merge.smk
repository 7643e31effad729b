rule merge:
    input:
        data=of("results/data/{dataset}/manifest.json"),
        stats=of("results/data/{dataset}/stats.json"),
        adapter="results/{run}/adapter/manifest.json",
    output:
        manifest="results/{run}/merged/manifest.json",
    log:
        "results/logs/merge/{run}.log",
    resources:
        **resources_of("merge"),
    params:
        code=code("merge"),
        settings=settings("merge"),
        names=names("merge"),
        model=path_of("resources/models/{model}"),
        weights=path_of("resources/weights/{model}"),
    shell:
        "zerolora weights --model {params.model} --weights {params.weights} &&"
        " zerolora --log {log} stage merge {wildcards.run} {params.names} --settings {params.settings:q}"
