# Not in `all`, and unknown to DVC: exports are made on request.
rule export:
    input:
        job("exported"),


rule export_target:
    input:
        data=of("results/data/{dataset}/manifest.json"),
        stats=of("results/data/{dataset}/stats.json"),
        adapter="results/{run}/adapter/manifest.json",
        merged="results/{run}/merged/manifest.json",
    output:
        manifest="results/{run}/export/{target}/manifest.json",
    log:
        "results/logs/export/{run}.{target}.log",
    resources:
        **resources_of("export_target"),
    params:
        code=code("export_target"),
        settings=settings("export_target"),
        names=names("export_target"),
        data=subpath(input.data, parent=True),
        model=path_of("resources/models/{model}"),
        weights=path_of("resources/weights/{model}"),
        device=job("export_device"),
        adapter=subpath(input.adapter, parent=True),
        options=job("export_options"),
    shell:
        "zerolora weights --model {params.model} --weights {params.weights} --device {params.device} &&"
        " zerolora merged-weights --weights {params.weights}.json --adapter {params.adapter}"
        " --data {params.data} --manifest {input.merged} &&"
        ' "$ZEROLORA_SCRIPTS/on_gpus" {resources.node_gpus} 1 {resources.gpu}'
        " zerolora --log {log} stage export_target {wildcards.run} {wildcards.target} {params.names}"
        " --settings {params.settings:q} {params.options}"
