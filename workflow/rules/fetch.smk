# The outputs are a model's config, tokenizer and hashes; neither engine tracks the weights.
rule fetch:
    input:
        source=job("source_files"),
    output:
        manifest="resources/models/{model}/manifest.json",
    log:
        "results/logs/fetch/{model}.log",
    localrule: True
    params:
        code=code("fetch"),
        settings=settings("fetch"),
        names=names("fetch"),
    shell:
        "zerolora --log {log} stage fetch {wildcards.model} {params.names} --settings {params.settings:q}"
