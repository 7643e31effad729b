rule resolve:
    input:
        user_files=[JOBS.users_file(path) for path in user_files()],
    output:
        shared="results/config.json",
        runs="results/settings/manifest.json",
    log:
        "results/logs/resolve.log",
    localrule: True
    params:
        values=job("config_values"),
        code=job("named_codes"),
        sources=job("sources"),
        config=job("config_file"),
        names=names("resolve"),
    shell:
        "zerolora --log {log} stage resolve --config {params.config} {params.names}"
