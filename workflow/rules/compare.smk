# Compares finished runs, from the rows that report writes. After a failure, all runs are compared outside both engines
# (docs/engine-sync.md).
rule compare:
    input:
        rows=expand("results/compare/rows/{run}.json", run=JOBS.names["run"]),
    output:
        page=report(
            "results/compare/index.html",
            caption="../report/compare.rst",
            category="Comparison",
        ),
        markdown="results/compare/table.md",
        csv="results/compare/table.csv",
        metrics="results/compare/metrics.json",
    log:
        "results/logs/compare.log",
    localrule: True
    params:
        code=code("compare"),
        settings=settings("compare"),
        names=names("compare"),
    shell:
        "zerolora --log {log} stage compare {params.names} --settings {params.settings:q}"
