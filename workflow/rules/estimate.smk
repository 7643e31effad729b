checkpoint estimate:
    input:
        data=prepared,
        model=ancient(model_manifest),
        code=code("estimate"),
        config=ancient(RESOLVED),
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
        "zerolora --log {log} estimate --config {input.config} --run {wildcards.run}"
        " --model {params.model} --data {params.data} --output {output.estimate}"
