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
    # With torch they are jobs of their own (startup.py, spare_login_node).
    localrule: True
    resources:
        **resources_of("render"),
    params:
        code=code("render"),
        settings=settings("render"),
        names=names("render"),
    shell:
        "zerolora --log {log} stage render {wildcards.rendered} {params.names} --settings {params.settings:q}"
