checkpoint estimate:
    input:
        data=prepared,
        code=code("estimate"),
    output:
        estimate="results/{run}/estimate.json",
    log:
        "results/logs/estimate/{run}.log",
    localrule: True
    conda:
        "../../envs/conda.yaml"
    params:
        settings=settings("runs", "run", "estimate"),
        data=data_directory,
        model=model_directory,
    shell:
        "zerolora --log {log} estimate --settings {params.settings:q}"
        " --model {params.model} --data {params.data} --output {output.estimate}"
