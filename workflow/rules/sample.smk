rule sample:
    input:
        data=of("results/data/{dataset}/manifest.json"),
        prompts=of("results/data/{dataset}/prompts.arrow"),
        model=job("sampled_model"),
    output:
        manifest="results/samples/{sample}/manifest.json",
        answers="results/samples/{sample}/answers.jsonl",
        counts="results/samples/{sample}/sample.json",
    log:
        "results/logs/sample/{sample}.log",
    threads: job("evaluation_cores")
    resources:
        **resources_of("sample"),
    params:
        code=code("sample"),
        settings=settings("sample"),
        names=names("sample"),
        restore=job("restore_sampled_model"),
    shell:
        "{params.restore}"
        '"$ZEROLORA_SCRIPTS/on_gpus" {resources.node_gpus} 1 {resources.gpu}'
        " zerolora --log {log} stage sample {wildcards.sample} {params.names} --settings {params.settings:q}"
