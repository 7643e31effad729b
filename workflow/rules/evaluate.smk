# The base model is evaluated once for each data set. The metrics are copied to the folder of further tasks, which DVC's
# stage report reads, so that it exists without any task.
rule evaluate_base:
    input:
        data=of("results/data/{dataset}/manifest.json"),
        stats=of("results/data/{dataset}/stats.json"),
    output:
        metrics="results/base/{dataset}/evaluate.json",
        resources="results/base/{dataset}/evaluate_resources.json",
        answers="results/base/{dataset}/answers.json",
        held_out="results/base/{dataset}/tasks/held_out.metrics.json",
    log:
        "results/logs/evaluate_base/{dataset}.log",
    threads: job("evaluation_cores")
    resources:
        **resources_of("evaluate_base"),
    params:
        code=code("evaluate_base"),
        settings=settings("evaluate_base"),
        names=names("evaluate_base"),
        model=path_of("resources/models/{model}"),
        weights=path_of("resources/weights/{model}"),
        device=job("device"),
    shell:
        "zerolora weights --model {params.model} --weights {params.weights} --device {params.device} &&"
        ' "$ZEROLORA_SCRIPTS/on_gpus" {resources.node_gpus} 1 {resources.gpu}'
        " zerolora --log {log} stage evaluate_base {wildcards.dataset} {params.names} --settings {params.settings:q}"


rule evaluate:
    input:
        data=of("results/data/{dataset}/manifest.json"),
        stats=of("results/data/{dataset}/stats.json"),
        adapter="results/{run}/adapter/manifest.json",
        manifest="results/{run}/merged/manifest.json",
    output:
        metrics="results/{run}/metrics/evaluate.json",
        resources="results/{run}/metrics/evaluate_resources.json",
        answers="results/{run}/answers.json",
        held_out="results/{run}/tasks/held_out.metrics.json",
    log:
        "results/logs/evaluate/{run}.log",
    threads: job("evaluation_cores")
    resources:
        **resources_of("evaluate"),
    params:
        code=code("evaluate"),
        settings=settings("evaluate"),
        names=names("evaluate"),
        data=subpath(input.data, parent=True),
        model=path_of("resources/models/{model}"),
        weights=path_of("resources/weights/{model}"),
        device=job("device"),
        adapter=subpath(input.adapter, parent=True),
    shell:
        "zerolora weights --model {params.model} --weights {params.weights} --device {params.device} &&"
        " zerolora merged-weights --weights {params.weights}.json --adapter {params.adapter}"
        " --data {params.data} --manifest {input.manifest} &&"
        ' "$ZEROLORA_SCRIPTS/on_gpus" {resources.node_gpus} 1 {resources.gpu}'
        " zerolora --log {log} stage evaluate {wildcards.run} {params.names} --settings {params.settings:q}"
