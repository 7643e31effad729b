rule estimate:
    input:
        packing=of("results/{packed}/packing/manifest.json"),
        stats=of("results/{packed}/packing/stats.json"),
    output:
        estimate="results/{estimated}/estimate.json",
    log:
        "results/logs/estimate/{estimated}.log",
    # With torch they are jobs of their own (startup.py, spare_login_node).
    localrule: True
    resources:
        **resources_of("estimate"),
    params:
        code=code("estimate"),
        settings=settings("estimate"),
        names=names("estimate"),
    shell:
        "zerolora --log {log} stage estimate {wildcards.estimated} {params.names} --settings {params.settings:q}"
