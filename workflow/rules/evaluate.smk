# The metrics are among those of further tasks too, so that the folder which DVC's stage report reads is there without any.
# The base model answers once for each data set, whatever the number of runs.
rule evaluate_base:
    input:
        data=prepared,
    output:
        metrics="results/base/{dataset}/evaluate.json",
        resources="results/base/{dataset}/evaluate_resources.json",
        answers="results/base/{dataset}/answers.json",
        held_out="results/base/{dataset}/tasks/held_out.metrics.json",
    log:
        "results/logs/evaluate_base/{dataset}.log",
    conda:
        "../../envs/conda.yaml"
    threads: 2
    resources:
        runtime=minutes(resources_of_evaluate),
        mem_mb=memory(resources_of_evaluate),
        gres=gres_of(resources_of_evaluate),
        gpu=gpus_of(resources_of_evaluate),
        node_gpus=gpus_of(resources_of_evaluate),
    params:
        code=code("evaluate_base"),
        settings=settings("evaluate", "dataset"),
        data=data_directory,
        model=model_directory,
        weights=weights_directory,
        device=device_of,
        output="results/base/{dataset}",
        work="work/evaluate/base/{dataset}",
    shell:
        "zerolora weights --model {params.model} --weights {params.weights} --device {params.device} &&"
        " workflow/scripts/on_gpus {resources.node_gpus} 1 {resources.gpu}"
        " zerolora --log {log} evaluate --settings {params.settings:q} --data {params.data}"
        " --weights {params.weights}.json --output {params.output} --answers {output.answers}"
        " --work {params.work} && cp {output.metrics} {output.held_out}"


rule evaluate:
    input:
        data=prepared,
        adapter="results/{run}/adapter/manifest.json",
        manifest="results/{run}/merged/manifest.json",
    output:
        metrics="results/{run}/metrics/evaluate.json",
        resources="results/{run}/metrics/evaluate_resources.json",
        answers="results/{run}/answers.json",
        held_out="results/{run}/tasks/held_out.metrics.json",
    log:
        "results/logs/evaluate/{run}.log",
    conda:
        "../../envs/conda.yaml"
    threads: 2
    resources:
        runtime=minutes(resources_of_evaluate),
        mem_mb=memory(resources_of_evaluate),
        gres=gres_of(resources_of_evaluate),
        gpu=gpus_of(resources_of_evaluate),
        node_gpus=gpus_of(resources_of_evaluate),
    params:
        code=code("evaluate"),
        settings=settings("runs", "run", "evaluate"),
        data=data_directory,
        model=model_directory,
        weights=weights_directory,
        device=device_of,
        adapter=adapter_directory,
        output="results/{run}/metrics",
        work="work/evaluate/runs/{run}",
    shell:
        "zerolora weights --model {params.model} --weights {params.weights} --device {params.device} &&"
        " zerolora merged-weights --weights {params.weights}.json --adapter {params.adapter}"
        " --data {params.data} --manifest {input.manifest} &&"
        " workflow/scripts/on_gpus {resources.node_gpus} 1 {resources.gpu}"
        " zerolora --log {log} evaluate --settings {params.settings:q} --data {params.data}"
        " --weights {input.manifest} --base {params.weights}.json --adapter {params.adapter}"
        " --output {params.output} --answers {output.answers} --work {params.work}"
        " && cp {output.metrics} {output.held_out}"
