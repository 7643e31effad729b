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
        weights=below("resources/weights/{model}"),
        output=subpath(output.manifest, parent=True),
    shell:
        "zerolora --log {log} fetch --settings {params.settings:q}"
        " --weights {params.weights} --output {params.output}"
