# No part of `all`, and unknown to DVC: what leaves the project is made when somebody asks for it.
rule export:
    input:
        exported,


rule export_target:
    input:
        data=prepared,
        adapter="results/{run}/adapter/manifest.json",
        merged="results/{run}/merged/manifest.json",
    output:
        manifest="results/{run}/export/{target}/manifest.json",
    log:
        "results/logs/export/{run}.{target}.log",
    conda:
        "../../envs/conda.yaml"
    resources:
        runtime=minutes(resources_of_export),
        mem_mb=memory(resources_of_export),
        gres=gres_of(resources_of_export),
        gpu=gpus_of(resources_of_export),
        node_gpus=gpus_of(resources_of_export),
    params:
        code=code("export_target"),
        settings=export_settings,
        data=data_directory,
        model=model_directory,
        weights=weights_directory,
        device=export_device,
        adapter=adapter_directory,
        options=export_options,
        output="results/{run}/export/{target}",
    shell:
        "zerolora weights --model {params.model} --weights {params.weights} --device {params.device} &&"
        " zerolora merged-weights --weights {params.weights}.json --adapter {params.adapter}"
        " --data {params.data} --manifest {input.merged} &&"
        " workflow/scripts/on_gpus {resources.node_gpus} 1 {resources.gpu}"
        " zerolora --log {log} export --target {wildcards.target} --settings {params.settings:q}"
        " --model {params.model} --weights {params.weights}.json --adapter {params.adapter} --merged {input.merged}"
        " --data {params.data} --output {params.output} {params.options}"
