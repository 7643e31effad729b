rule resolve:
    input:
        user_files=engine_sync.user_files(),
    output:
        shared=RESOLVED,
        runs="results/settings/manifest.json",
    log:
        "results/logs/resolve.log",
    localrule: True
    conda:
        "../../envs/conda.yaml"
    params:
        values=config_values,
        code=canonical(CODE.named),
        config=CONFIG_FILE,
    shell:
        "zerolora --log {log} resolve --config {params.config} --output {output.shared}"
