# The rule whose output is versioned (settings, tokenizer, hashes), and the one that keeps the gigabytes on this machine.


checkpoint fetch:
    input:
        source=source_files,
        code=code("fetch"),
        config=ancient(RESOLVED),
    output:
        manifest="resources/models/{model}/manifest.json",
    log:
        "results/logs/fetch/{model}.log",
    localrule: True
    conda:
        "../../envs/conda.yaml"
    params:
        settings=settings("fetch", "model"),
        weights="resources/weights/{model}",
        output="resources/models/{model}",
    shell:
        "zerolora --log {log} fetch --config {input.config} --model {wildcards.model}"
        " --weights {params.weights} --output {params.output}"


# Wanted only by a job that is about to run: results stay up to date on a machine that has no weights.
rule weights:
    input:
        manifest=fetched,
        config=ancient(RESOLVED),
    output:
        "resources/weights/{model}.json",
    log:
        "results/logs/weights/{model}.log",
    localrule: True
    conda:
        "../../envs/conda.yaml"
    params:
        settings=settings("fetch", "model"),
        weights="resources/weights/{model}",
    shell:
        "zerolora --log {log} weights --config {input.config} --model {wildcards.model}"
        " --manifest {input.manifest} --weights {params.weights} --output {output}"
