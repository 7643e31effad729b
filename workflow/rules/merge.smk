rule merge:
    input:
        data=prepared,
        adapter="results/{run}/adapter/manifest.json",
    output:
        manifest="results/{run}/merged/manifest.json",
    log:
        "results/logs/merge/{run}.log",
    conda:
        "../../envs/conda.yaml"
    resources:
        runtime=minutes(resources_of_merge),
        mem_mb=memory(resources_of_merge),
    params:
        code=code("merge"),
        settings=settings("runs", "run", "merge"),
        adapter=adapter_directory,
        data=data_directory,
        model=model_directory,
        weights=weights_directory,
        place=merged_place,
        options=merge_options,
        output="results/{run}/merged",
    shell:
        "zerolora weights --model {params.model} --weights {params.weights} &&"
        " zerolora --log {log} merge --weights {params.weights}.json --adapter {params.adapter}"
        " --data {params.data} --place {params.place} --output {params.output} {params.options}"
