rule resolve:
    input:
        user_files=engine_sync.user_files(),
    output:
        shared="results/config.json",
        runs="results/settings/manifest.json",
    log:
        "results/logs/resolve.log",
    localrule: True
    params:
        values=job("config_values"),
        code=job("named_codes"),
        config="config/config.yaml",
    shell:
        "zerolora --log {log} resolve --config {params.config} --output {output.shared}"
