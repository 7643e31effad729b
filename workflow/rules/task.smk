# Further evaluation tasks: the rows once, then each task for every base model and every run.
rule task_rows:
    input:
        rows=job("data_files"),
        made=job("made_data"),
    output:
        "results/tasks/{task}.jsonl",
    log:
        "results/logs/task_rows/{task}.log",
    localrule: True
    params:
        code=code("task_rows"),
        settings=settings("task_rows"),
        names=names("task_rows"),
    shell:
        "zerolora --log {log} stage task_rows {wildcards.task} {params.names} --settings {params.settings:q}"


rule task_base:
    input:
        data=of("results/data/{dataset}/manifest.json"),
        stats=of("results/data/{dataset}/stats.json"),
        rows=job("task_rows"),
    output:
        metrics="results/base/{dataset}/tasks/{task}.json",
        answers="results/base/{dataset}/tasks/{task}.answers.json",
    log:
        "results/logs/task_base/{dataset}-{task}.log",
    threads: job("evaluation_cores")
    resources:
        **resources_of("task_base"),
    params:
        code=code("task_base"),
        settings=settings("task_base"),
        names=names("task_base"),
        model=path_of("resources/models/{model}"),
        weights=path_of("resources/weights/{model}"),
        device=job("device"),
    shell:
        "zerolora weights --model {params.model} --weights {params.weights} --device {params.device} &&"
        ' "$ZEROLORA_SCRIPTS/on_gpus" {resources.node_gpus} 1 {resources.gpu}'
        " zerolora --log {log} stage task_base {wildcards.dataset} {wildcards.task} {params.names}"
        " --settings {params.settings:q} --device {params.device}"


rule task:
    input:
        adapter="results/{run}/adapter/manifest.json",
        manifest="results/{run}/merged/manifest.json",
        rows=job("task_rows"),
    output:
        metrics="results/{run}/tasks/{task}.json",
        answers="results/{run}/tasks/{task}.answers.json",
    log:
        "results/logs/task/{run}-{task}.log",
    threads: job("evaluation_cores")
    resources:
        **resources_of("task"),
    params:
        code=code("task"),
        settings=settings("task"),
        names=names("task"),
        data=path_of("results/data/{dataset}"),
        model=path_of("resources/models/{model}"),
        weights=path_of("resources/weights/{model}"),
        device=job("device"),
        adapter=subpath(input.adapter, parent=True),
    shell:
        "zerolora weights --model {params.model} --weights {params.weights} --device {params.device} &&"
        " zerolora merged-weights --weights {params.weights}.json --adapter {params.adapter}"
        " --data {params.data} --manifest {input.manifest} &&"
        ' "$ZEROLORA_SCRIPTS/on_gpus" {resources.node_gpus} 1 {resources.gpu}'
        " zerolora --log {log} stage task {wildcards.run} {wildcards.task} {params.names}"
        " --settings {params.settings:q} --device {params.device}"
