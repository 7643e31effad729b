checkpoint pack:
    input:
        data=prepared,
    output:
        manifest="results/{run}/packing/manifest.json",
        stats="results/{run}/packing/stats.json",
        plans=multiext("results/{run}/packing/", "train.arrow", "validation.arrow"),
    log:
        "results/logs/pack/{run}.log",
    localrule: True
    conda:
        "../../envs/conda.yaml"
    params:
        code=code("pack"),
        settings=settings("runs", "run", "pack"),
        data=data_directory,
        output=packing_directory,
    shell:
        "zerolora --log {log} pack --settings {params.settings:q}"
        " --data {params.data} --output {params.output}"
