# Not in `all`, since it may cost money: it runs when results/RUN/judge/judge.json or judge_all is asked for.
rule judge:
    input:
        data=prepared,
        adapter="results/{run}/adapter/manifest.json",
        manifest="results/{run}/merged/manifest.json",
        questions=judge_questions,
    output:
        metrics="results/{run}/judge/judge.json",
        answers="results/{run}/judge/answers.jsonl",
        verdicts="results/{run}/judge/verdicts.jsonl",
    log:
        "results/logs/judge/{run}.log",
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
        code=code("judge"),
        settings=judge_settings,
        data=data_directory,
        model=model_directory,
        weights=weights_directory,
        device=device_of,
        adapter=adapter_directory,
        work="work/judge/{run}",
        output="results/{run}/judge",
    shell:
        "zerolora weights --model {params.model} --weights {params.weights} --device {params.device} &&"
        " zerolora merged-weights --weights {params.weights}.json --adapter {params.adapter}"
        " --data {params.data} --manifest {input.manifest} &&"
        " workflow/scripts/on_gpus {resources.node_gpus} 1 {resources.gpu}"
        " zerolora --log {log} judge --settings {params.settings:q} --data {params.data}"
        " --base {params.weights}.json --tuned {input.manifest} --adapter {params.adapter}"
        " --work {params.work} --output {params.output} --device {params.device}"


rule judge_all:
    input:
        expand("results/{run}/judge/judge.json", run=CONFIG.all_runs),
