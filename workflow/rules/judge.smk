# Not in `all`, since it may cost money: request results/RUN/judge/judge.json or judge_all.
rule judge:
    input:
        data=of("results/data/{dataset}/manifest.json"),
        stats=of("results/data/{dataset}/stats.json"),
        adapter="results/{run}/adapter/manifest.json",
        manifest="results/{run}/merged/manifest.json",
        questions=job("questions"),
    output:
        metrics="results/{run}/judge/judge.json",
        answers="results/{run}/judge/answers.jsonl",
        verdicts="results/{run}/judge/verdicts.jsonl",
    log:
        "results/logs/judge/{run}.log",
    threads: job("evaluation_cores")
    resources:
        **resources_of("judge"),
    params:
        code=code("judge"),
        settings=settings("judge"),
        names=names("judge"),
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
        " zerolora --log {log} stage judge {wildcards.run} {params.names}"
        " --settings {params.settings:q} --device {params.device}"


rule judge_all:
    input:
        expand("results/{run}/judge/judge.json", run=JOBS.names["run"]),
