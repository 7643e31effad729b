# The gate comes after the report, so that the page shows why a run was not accepted.
rule accept:
    input:
        difference="results/{run}/metrics/difference.json",
    output:
        accepted="results/{run}/accepted.json",
    log:
        "results/logs/accept/{run}.log",
    # The same figures would fail again.
    retries: 0
    localrule: True
    params:
        code=code("accept"),
        settings=settings("accept"),
        names=names("accept"),
    shell:
        "zerolora --log {log} stage accept {wildcards.run} {params.names} --settings {params.settings:q}"
