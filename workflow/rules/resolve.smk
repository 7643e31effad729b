rule resolve:
    input:
        own=engine_sync.own_json_files(),
    output:
        RESOLVED,
    log:
        "results/logs/resolve.log",
    localrule: True
    conda:
        "../../envs/conda.yaml"
    params:
        values=canonical(VALUES),
        code=canonical(CODE),
        config=CONFIG_FILE,
    shell:
        "zerolora --log {log} resolve --config {params.config} --output {output}"
