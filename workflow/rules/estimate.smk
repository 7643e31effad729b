rule estimate:
    input:
        packing=of("results/{packed}/packing/manifest.json"),
        stats=of("results/{packed}/packing/stats.json"),
    output:
        estimate="results/{estimated}/estimate.json",
    log:
        "results/logs/estimate/{estimated}.log",
    localrule: True
    params:
        code=code("estimate"),
        settings=settings("estimate"),
        packing=subpath(input.packing, parent=True),
        model=path_of("resources/models/{model}"),
    shell:
        "zerolora --log {log} estimate --settings {params.settings:q}"
        " --model {params.model} --packing {params.packing} --output {output.estimate}"
