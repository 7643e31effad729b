rule render:
    input:
        estimate=of("results/{estimated}/estimate.json"),
        start=job("fetched_start"),
    output:
        zero="results/{rendered}/zero.json",
        reasons="results/{rendered}/render.json",
    log:
        "results/logs/render/{rendered}.log",
    # A retry would fail again, whatever the profile's number of retries.
    retries: 0
    localrule: True
    params:
        code=code("render"),
        settings=settings("render"),
        model=path_of("resources/models/{model}"),
        weights=path_of("resources/weights/{model}"),
        data=path_of("results/data/{dataset}"),
    shell:
        "zerolora --log {log} render --settings {params.settings:q} --model {params.model}"
        " --weights {params.weights} --data {params.data} --estimate {input.estimate} --output {output.zero} --reasons {output.reasons}"
