# No part of `all`, and unknown to DVC: what leaves the project is made when somebody asks for it.
rule export:
    input:
        job("exported"),


rule export_target:
    input:
        data=of("results/data/{dataset}/manifest.json"),
        stats=of("results/data/{dataset}/stats.json"),
        adapter="results/{run}/adapter/manifest.json",
        merged="results/{run}/merged/manifest.json",
    output:
        manifest="results/{run}/export/{target}/manifest.json",
    log:
        "results/logs/export/{run}.{target}.log",
    conda:
        "../../envs/conda.yaml"
    resources:
        runtime=requested("export_target", "minutes"),
        mem_mb=requested("export_target", "mem_mib"),
        gres=requested("export_target", "gres"),
        gpu=requested("export_target", "gpus"),
        node_gpus=requested("export_target", "gpus"),
    params:
        code=code("export_target"),
        settings=settings("export_target"),
        data=subpath(input.data, parent=True),
        model=of("resources/models/{model}"),
        weights=of("resources/weights/{model}"),
        device=job("export_device"),
        adapter=subpath(input.adapter, parent=True),
        options=job("export_options"),
        output=subpath(output.manifest, parent=True),
    shell:
        "zerolora weights --model {params.model} --weights {params.weights} --device {params.device} &&"
        " zerolora merged-weights --weights {params.weights}.json --adapter {params.adapter}"
        " --data {params.data} --manifest {input.merged} &&"
        " workflow/scripts/on_gpus {resources.node_gpus} 1 {resources.gpu}"
        " zerolora --log {log} export --target {wildcards.target} --settings {params.settings:q}"
        " --model {params.model} --weights {params.weights}.json --adapter {params.adapter} --merged {input.merged}"
        " --data {params.data} --output {params.output} {params.options}"
