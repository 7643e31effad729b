checkpoint merge:
    input:
        data=prepared,
        adapter=trained_adapter,
        weights=ancient(weights_stamp),
        code=code("merge"),
        config=ancient(RESOLVED),
    output:
        manifest="results/{run}/merged/manifest.json",
    log:
        "results/logs/merge/{run}.log",
    conda:
        "../../envs/conda.yaml"
    params:
        settings=settings("runs", "run", "merge"),
        adapter="results/{run}/adapter",
        place=merged_place,
        output="results/{run}/merged",
    shell:
        "zerolora --log {log} merge --weights {input.weights} --adapter {params.adapter}"
        " --place {params.place} --output {params.output}"


# Merged weights that are not versioned come back from base and adapter wherever they are wanted and missing.
rule merged_weights:
    input:
        manifest=merged,
        weights=ancient(weights_stamp),
    output:
        "work/merged/{run}.json",
    log:
        "results/logs/merged_weights/{run}.log",
    conda:
        "../../envs/conda.yaml"
    params:
        adapter="results/{run}/adapter",
    shell:
        "zerolora --log {log} merged-weights --weights {input.weights} --adapter {params.adapter}"
        " --manifest {input.manifest} --output {output}"
