# The base model answers once for each data set, whatever the number of runs.
checkpoint evaluate_base:
    input:
        data=prepared,
        weights=ancient(weights_stamp),
        code=code("evaluate_base"),
        config=ancient(RESOLVED),
    output:
        metrics="results/base/{dataset}/evaluate.json",
        resources="results/base/{dataset}/evaluate_resources.json",
        answers="results/base/{dataset}/answers.json",
    log:
        "results/logs/evaluate_base/{dataset}.log",
    conda:
        "../../envs/conda.yaml"
    threads: 2
    params:
        settings=evaluate_settings,
        data=data_directory,
        output="results/base/{dataset}",
    shell:
        "zerolora --log {log} evaluate --config {input.config} --dataset {wildcards.dataset} --data {params.data}"
        " --weights {input.weights} --output {params.output} --answers {output.answers}"


checkpoint evaluate:
    input:
        data=prepared,
        manifest=merged,
        weights=ancient(merged_stamp),
        code=code("evaluate"),
        config=ancient(RESOLVED),
    output:
        metrics="results/{run}/metrics/evaluate.json",
        resources="results/{run}/metrics/evaluate_resources.json",
        answers="results/{run}/answers.json",
    log:
        "results/logs/evaluate/{run}.log",
    conda:
        "../../envs/conda.yaml"
    threads: 2
    params:
        settings=evaluate_settings,
        dataset=dataset_of,
        data=data_directory,
        output="results/{run}/metrics",
    shell:
        "zerolora --log {log} evaluate --config {input.config} --dataset {params.dataset} --data {params.data}"
        " --weights {input.weights} --output {params.output} --answers {output.answers}"
