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
        adapter=subpath(input.adapter, parent=True),
        data=subpath(input.data, parent=True),
        model=path_of("resources/models/{model}"),
        weights=path_of("resources/weights/{model}"),
        place=job("merged_directory"),
        options=job("merge_options"),
        output=subpath(output.manifest, parent=True),
    shell:
        "zerolora weights --model {params.model} --weights {params.weights} &&"
        " zerolora --log {log} merge --weights {params.weights}.json --adapter {params.adapter}"
        " --data {params.data} --place {params.place} --output {params.output} {params.options}"
