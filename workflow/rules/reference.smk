# The log-probabilities of the data's answers under the model that training starts from or another, for objectives that
# compare with it. Runs of a grid share them.
rule reference:
    input:
        data=of("results/data/{dataset}/manifest.json"),
        stats=of("results/data/{dataset}/stats.json"),
        start=job("compared_files"),
    output:
        manifest="results/{referenced}/reference/manifest.json",
        others=multiext(
            "results/{referenced}/reference/", "train.arrow", "validation.arrow"
        ),
    log:
        "results/logs/reference/{referenced}.log",
    threads: job("evaluation_cores")
    resources:
        **resources_of("reference"),
    params:
        code=code("reference"),
        settings=settings("reference"),
        names=names("reference"),
        model=path_of("resources/models/{model}"),
        weights=path_of("resources/weights/{model}"),
        device=job("training_device"),
    shell:
        "zerolora weights --model {params.model} --weights {params.weights} --device {params.device} &&"
        ' "$ZEROLORA_SCRIPTS/on_gpus" {resources.node_gpus} 1 {resources.gpu}'
        " zerolora --log {log} stage reference {wildcards.referenced} {params.names} --settings {params.settings:q}"
