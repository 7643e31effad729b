# Further evaluation tasks: their rows once, then each for every base model and for every run.
rule task_rows:
    input:
        rows=task_files,
        fetched=fetched_for_task,
    output:
        "results/tasks/{task}.jsonl",
    log:
        "results/logs/task_rows/{task}.log",
    localrule: True
    conda:
        "../../envs/conda.yaml"
    params:
        code=code("task_rows"),
        settings=settings("task_rows", "task"),
    shell:
        "zerolora --log {log} task-rows --settings {params.settings:q} --output {output}"


rule task_base:
    input:
        data=prepared,
        rows=rows_of_task,
    output:
        metrics="results/base/{dataset}/tasks/{task}.json",
        answers="results/base/{dataset}/tasks/{task}.answers.json",
    log:
        "results/logs/task_base/{dataset}-{task}.log",
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
        code=code("task_base"),
        settings=settings("tasks", "task"),
        rows=rows_option,
        data=data_directory,
        model=model_directory,
        weights=weights_directory,
        device=device_of,
    shell:
        "zerolora weights --model {params.model} --weights {params.weights} --device {params.device} &&"
        " workflow/scripts/on_gpus {resources.node_gpus} 1 {resources.gpu}"
        " zerolora --log {log} task --settings {params.settings:q} {params.rows} --data {params.data}"
        " --weights {params.weights}.json --output {output.metrics} --answers {output.answers} --device {params.device}"


rule task:
    input:
        adapter="results/{run}/adapter/manifest.json",
        manifest="results/{run}/merged/manifest.json",
        rows=rows_of_task,
    output:
        metrics="results/{run}/tasks/{task}.json",
        answers="results/{run}/tasks/{task}.answers.json",
    log:
        "results/logs/task/{run}-{task}.log",
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
        code=code("task"),
        settings=settings("tasks", "task"),
        rows=rows_option,
        data=data_directory,
        model=model_directory,
        weights=weights_directory,
        device=device_of,
        adapter=adapter_directory,
    shell:
        "zerolora weights --model {params.model} --weights {params.weights} --device {params.device} &&"
        " zerolora merged-weights --weights {params.weights}.json --adapter {params.adapter}"
        " --data {params.data} --manifest {input.manifest} &&"
        " workflow/scripts/on_gpus {resources.node_gpus} 1 {resources.gpu}"
        " zerolora --log {log} task --settings {params.settings:q} {params.rows} --data {params.data}"
        " --weights {input.manifest} --base {params.weights}.json --adapter {params.adapter}"
        " --output {output.metrics} --answers {output.answers} --device {params.device}"
