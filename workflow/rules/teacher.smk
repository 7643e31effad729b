# The most likely tokens of a teacher at each supervised token of the data, for distillation. Runs of a grid share them.
rule teacher:
    input:
        data=of("results/data/{dataset}/manifest.json"),
        stats=of("results/data/{dataset}/stats.json"),
        teacher=job("teacher_files"),
    output:
        manifest="results/{taught}/teacher/manifest.json",
        others=multiext(
            "results/{taught}/teacher/",
            "stats.json",
            "train.arrow",
            "validation.arrow",
        ),
    log:
        "results/logs/teacher/{taught}.log",
    threads: job("evaluation_cores")
    resources:
        **resources_of("teacher"),
    params:
        code=code("teacher"),
        settings=settings("teacher"),
        names=names("teacher"),
        model=path_of("resources/models/{teacher}"),
        weights=path_of("resources/weights/{teacher}"),
        device=job("training_device"),
    shell:
        "zerolora weights --model {params.model} --weights {params.weights} --device {params.device} &&"
        ' "$ZEROLORA_SCRIPTS/on_gpus" {resources.node_gpus} 1 {resources.gpu}'
        " zerolora --log {log} stage teacher {wildcards.taught} {params.names} --settings {params.settings:q}"
