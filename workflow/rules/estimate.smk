rule estimate:
    input:
        packing=packed,
    output:
        estimate="results/{estimated}/estimate.json",
    log:
        "results/logs/estimate/{estimated}.log",
    localrule: True
    conda:
        "../../envs/conda.yaml"
    params:
        code=code("estimate"),
        settings=shared("estimate"),
        packing=packing_directory,
        model=model_directory,
    shell:
        "zerolora --log {log} estimate --settings {params.settings:q}"
        " --model {params.model} --packing {params.packing} --output {output.estimate}"
