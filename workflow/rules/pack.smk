rule pack:
    input:
        data=prepared,
    output:
        manifest="results/{packed}/packing/manifest.json",
        stats="results/{packed}/packing/stats.json",
        plans=multiext("results/{packed}/packing/", "train.arrow", "validation.arrow"),
    log:
        "results/logs/pack/{packed}.log",
    localrule: True
    conda:
        "../../envs/conda.yaml"
    params:
        code=code("pack"),
        settings=shared("pack"),
        data=data_directory,
        output=packing_directory,
    shell:
        "zerolora --log {log} pack --settings {params.settings:q}"
        " --data {params.data} --output {params.output}"
