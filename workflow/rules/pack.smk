rule pack:
    input:
        data=of("results/data/{dataset}/manifest.json"),
        stats=of("results/data/{dataset}/stats.json"),
    output:
        manifest="results/{packed}/packing/manifest.json",
        stats="results/{packed}/packing/stats.json",
        plans=multiext("results/{packed}/packing/", "train.arrow", "validation.arrow"),
    log:
        "results/logs/pack/{packed}.log",
    localrule: True
    params:
        code=code("pack"),
        settings=settings("pack"),
        names=names("pack"),
    shell:
        "zerolora --log {log} stage pack {wildcards.packed} {params.names} --settings {params.settings:q}"
